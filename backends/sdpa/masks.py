"""Causal, window, key lengths and attn_mask as the one mask that torch's operators take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

__all__ = ["Hiding", "compose", "compose_plain"]


#: A row whose mask reaches no closer to 0 than this, or beyond it, has its maximum taken out.
SATURATED = 1024.0


class Hiding(NamedTuple):
    """What an operator is told about hidden positions.

    ``mask`` is bool (True = attend) or float and broadcasts to (B, Hq, Lq, Lk); ``causal`` is torch's top-left flag.
    ``alive`` is False for rows that see nothing, (B or 1, H or 1, Lq or 1); None says that there are none. Such rows
    see everything in ``mask``, so that no operator meets a softmax over nothing: the caller overwrites their output.

    ``shift`` was taken out of each row of ``mask``, and belongs on top of the lse. It changes no output; but a row that
    is -1e9 throughout would leave no digits in lse for log(sum), from which the operators' backward computes P: its
    gradients would come out Lk times too large.
    """

    mask: torch.Tensor | None = None
    causal: bool = False
    alive: torch.Tensor | None = None
    shift: torch.Tensor | None = None


def compose(problem: Problem, inputs: Inputs, dtype: torch.dtype | None = None) -> Hiding:
    """The mask, the causal flag and the dead rows of one call; a float mask in ``dtype``, or as it came."""
    if not problem.needs_mask:
        return compose_plain(problem)
    visible = _positions(problem, inputs)
    mask = inputs.attn_mask
    if mask is None:
        assert visible is not None  # or there would be nothing to compose
        return _of_visible(visible)
    if mask.dtype == torch.bool:
        return _of_visible(mask if visible is None else mask & visible)
    if dtype is not None and dtype.itemsize > mask.dtype.itemsize:
        mask = mask.to(dtype)  # first, so that its gradient is summed before it is rounded
    if visible is not None:
        mask = mask.masked_fill(~visible, -torch.inf)
    top = mask.detach().amax(-1)
    alive = shift = None
    if not _known(top.abs() <= SATURATED):
        alive = top != -torch.inf
        shift = torch.where(alive & (top.abs() > SATURATED), top, 0.0)
        mask = torch.where(alive[..., None], mask - shift[..., None], 0.0)
    return Hiding(mask if dtype is None else mask.to(dtype), alive=alive, shift=shift)


def compose_plain(problem: Problem) -> Hiding:
    """What hides in a problem that needs no mask: causal or nothing, whatever the arrays."""
    return Hiding(causal=problem.plainly_causal and not problem.sees_all)


def _of_visible(visible: torch.Tensor) -> Hiding:
    alive = visible.any(-1)
    return Hiding(visible) if _known(alive) else Hiding(visible | ~alive[..., None], alive=alive)


def _known(rows: torch.Tensor) -> bool:
    """Whether it is known to be so of every row: asking a GPU would take longer than doing without the answer."""
    return rows.device.type == "cpu" and bool(rows.all())


def _positions(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """Visibility by position and length, (B or 1, 1, Lq or 1, Lk); None where nothing is hidden that way."""
    device = inputs.query.device
    j = torch.arange(problem.seq_k, device=device)
    lengths = inputs.key_lengths
    visible = None
    if lengths is not None:
        lengths = lengths.to(torch.int64)[:, None, None, None]
        visible = j < lengths
    if not problem.positional or problem.sees_all:
        return visible
    centre = torch.arange(problem.seq_q, device=device)[:, None]
    if problem.bottom_right:
        centre = centre + ((problem.seq_k if lengths is None else lengths) - problem.seq_q)
    left, right = problem.reach
    if left is not None:
        visible = _both(visible, j >= centre - left)
    if right is not None:
        visible = _both(visible, j <= centre + right)
    return None if visible is None else visible.reshape(*(1,) * (4 - visible.dim()), *visible.shape)


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second
