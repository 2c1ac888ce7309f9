"""Causal, window, key lengths and attn_mask as the one mask that torch's operators take."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

__all__ = ["Hiding", "added", "additive", "compose", "compose_plain", "ends", "positions", "unsaturated"]


#: Queries times keys of a mask of positions that is kept from call to call, at most.
_KEPT = 2**14
#: A row of a float mask is saturated where its maximum is a number further from 0 than this: it is taken out.
SATURATED = 1024.0
#: From here on it absorbs every score, as it does in float64, whose next number is 4096 away: keys that have the
#: maximum weigh alike. ``finfo.min`` in a whole row is what programs write for "attend to nothing".
_ABSORBING = 2.0**64


class Hiding(NamedTuple):
    """What an operator is told about hidden positions, and what is to be made of its results.

    ``mask`` is bool (True = attend) or float and broadcasts to (B, Hq, Lq, Lk); ``causal`` is torch's top-left flag.

    ``dead`` is True for rows that see nothing, (B or 1, H or 1, Lq or 1, 1), where the operator does not give them an
    output of 0 by itself. Such rows see everything in ``mask``, so that no operator meets a softmax over nothing: their
    output is overwritten.

    ``lift`` is added to the lse: -inf in rows that see nothing, and elsewhere what was taken out of a row of ``mask``.
    That changes no output; but a row that is -1e9 throughout would leave no digits in lse for log(sum), from which the
    operators' backward computes P: its gradients would come out Lk times too large.

    ``share`` is 1 over the number of keys that weigh alike in a row that absorbs scores, and 1 elsewhere; or None.
    Nothing is taken out of such a row, so that gradients of its output have to be made as much smaller.
    """

    mask: torch.Tensor | None = None
    causal: bool = False
    dead: torch.Tensor | None = None
    lift: torch.Tensor | None = None
    share: torch.Tensor | None = None


def compose_plain(problem: Problem) -> Hiding:
    """What hides in a problem that needs no mask: causal or nothing, whatever the arrays."""
    return Hiding(causal=problem.plainly_causal and not problem.sees_all)


def compose(problem: Problem, inputs: Inputs, *, lifted: bool = False) -> Hiding:
    """The mask, the causal flag and the dead rows of one call; ``lift`` where the problem has an lse, or ``lifted``.

    Nothing is asked of a device: what is done about rows is done whether there are such rows or not.
    """
    if not problem.needs_mask:
        return compose_plain(problem)
    lifted = lifted or problem.lse
    mask = _together(problem, inputs, None)
    if mask.dtype == torch.bool:
        dead = ~mask.any(-1, keepdim=True)
        return Hiding(mask | dead, dead=dead, lift=_minus_inf(dead) if lifted else None)
    top = _top(mask)
    dead, shift = top == -torch.inf, _shift(top)
    lift = _lift(dead, shift, torch.float32) if lifted else None
    return Hiding(torch.where(dead, 0.0, mask - shift), dead=dead, lift=lift)


def added(problem: Problem, dtypes: tuple[torch.dtype, ...], inputs: Inputs, *, lifted: bool = False) -> Hiding:
    """The same for an operator that adds a mask of one of ``dtypes`` and gives rows that see nothing output 0 itself.

    Its gradients from such rows are 0 as well. A mask of another type is made one of the last of ``dtypes``.
    """
    if not problem.needs_mask:
        return compose_plain(problem)
    mask = _together(problem, inputs, dtypes[-1] if problem.grads else None)
    shift: Any = 0.0
    share = None
    if mask.dtype == torch.bool:
        mask = additive(mask, dtypes[0])
    else:
        top, given = _top(mask), mask
        # First: a number beyond the range of a narrower type would hide.
        mask, shift = _unshifted(mask, top, dtypes[-1])
        told = mask is not given
        if mask.dtype not in dtypes:
            mask = mask.to(dtypes[-1])
        if problem.grads and mask.device.type == "cpu" and told:
            share = _share(mask, top, problem.seq_k)
    lift = None
    if problem.lse or lifted:
        lift = _lift(_top(mask) == -torch.inf, shift, dtypes[-1])
    return Hiding(mask, lift=lift, share=share)


def unsaturated(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask with the largest number of each saturated row taken out, for an operator that adds ``dtype``.

    It is done in every call, so that the output does not depend on whether gradients are asked for.
    """
    return _unshifted(mask, _top(mask), dtype)[0]


def _unshifted(mask: torch.Tensor, top: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The same, and what was taken out, (..., 1) or 0. The mask is the same tensor where it has no saturated row."""
    asks = mask.device.type == "cpu" and not _looked_at()  # elsewhere asking would wait
    if asks and _near(top):
        return mask, 0.0
    shift = _shift(top)
    if mask.device.type != "cpu":
        return mask - shift, shift
    absorbs = _absorbs(top)
    shift = torch.where(absorbs, 0.0, shift)
    if asks and not (shift.any() or absorbs.any()):
        return mask, 0.0
    return _within(mask - shift, top, dtype), shift


def _within(mask: torch.Tensor, top: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``mask`` with rows that absorb beyond the range of ``dtype`` at its end: all but their maxima hide there."""
    end = torch.finfo(dtype).max
    if torch.finfo(mask.dtype).max <= end:
        return mask
    there = mask - mask.detach() + end * top.sign()  # a gradient goes where it went
    beyond = top.isfinite() & (top.abs() > end)
    return torch.where(beyond, torch.where(mask == top, there, -torch.inf), mask)


def _share(mask: torch.Tensor, top: torch.Tensor, seq_k: int) -> torch.Tensor | None:
    """``Hiding.share`` of a float mask on the CPU, as it is added: keys that it tells apart no more weigh alike."""
    absorbs = _absorbs(top)
    if not _looked_at() and not absorbs.any():
        return None
    keys = (mask.detach() == _top(mask)).sum(-1, keepdim=True) * (seq_k // mask.shape[-1])
    return torch.where(absorbs, 1 / keys.to(mask.dtype), 1.0)


def _absorbs(top: torch.Tensor) -> torch.Tensor:
    """Which rows absorb every score."""
    return (top.double().abs() >= _ABSORBING) & top.isfinite()


def _looked_at() -> bool:
    """Whether a transform or a mode looks at tensors, which then may have no numbers."""
    return bool(torch._C._functorch.peek_interpreter_stack() or torch._C._len_torch_dispatch_stack())


def _top(mask: torch.Tensor) -> torch.Tensor:
    """The largest number of each row, (..., 1)."""
    return mask.detach().amax(-1, keepdim=True)


def _near(top: torch.Tensor) -> bool:
    """Whether no row is saturated, as far as a look at the least and the largest number tells."""
    low, high = torch.aminmax(top)
    return float(low) >= -SATURATED and float(high) <= SATURATED


def _shift(top: torch.Tensor) -> torch.Tensor:
    """What is taken out of each row: its largest number where that is far from 0.

    NaN where that is inf, as is all that becomes of the row: torch's CPU kernel in 16 bits makes it 0.
    """
    far = torch.where((top.abs() > SATURATED) & top.isfinite(), top, 0.0)
    return torch.where(top == torch.inf, torch.nan, far)


def _lift(dead: torch.Tensor, shift: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """``Hiding.lift``: of a row that sees something it is finite, even where its number is beyond the type of lse."""
    if isinstance(shift, torch.Tensor) and shift.dtype.itemsize > dtype.itemsize:
        limits = torch.finfo(dtype)
        shift = shift.clamp(limits.min, limits.max)
    return torch.where(dead, -torch.inf, shift)[..., 0].to(dtype)


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """``mask`` as numbers to add: a float mask itself, 0 and -inf of type ``dtype`` for a bool mask."""
    if mask.dtype != torch.bool:
        return mask
    if mask.device.type == "cpu":
        return torch.where(mask, *ends(dtype))
    return torch.log(mask, out=torch.empty(mask.shape, dtype=dtype, device=mask.device))  # of 1 and of 0, in one kernel


@functools.cache
def ends(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf on the CPU."""
    with torch.inference_mode(mode=False):
        return torch.zeros((), dtype=dtype, device="cpu"), torch.full((), -torch.inf, dtype=dtype, device="cpu")


def _minus_inf(dead: torch.Tensor) -> torch.Tensor:
    """-inf where a row sees nothing, else 0; (B or 1, H or 1, Lq or 1)."""
    return additive(~dead[..., 0], torch.float32)  # type: ignore[no-any-return]


def _together(problem: Problem, inputs: Inputs, dtype: torch.dtype | None) -> torch.Tensor:
    """All that hides as one mask, bool or float; a float mask of fewer bytes than ``dtype`` is raised to it."""
    visible = positions(problem, inputs)
    mask = inputs.attn_mask
    if mask is None:
        assert visible is not None  # or there would be nothing to compose
        return visible
    if mask.dtype == torch.bool:
        return mask if visible is None else mask & visible  # type: ignore[no-any-return]
    if dtype is not None and dtype.itemsize > mask.dtype.itemsize:
        mask = mask.to(dtype)  # first, so that its gradient is summed before it is rounded
    return mask if visible is None else mask.masked_fill(~visible, -torch.inf)  # type: ignore[no-any-return]


def positions(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """Visibility by position and length, (B or 1, 1, Lq or 1, Lk); None where nothing is hidden that way."""
    p, device, lengths = problem, inputs.query.device, inputs.key_lengths
    reach = p.reach if p.hides_by_position else (None, None)
    kept = lengths is None and device.type == "cpu" and p.seq_q * p.seq_k <= _KEPT
    return (_kept if kept else _visible)(p.seq_q, p.seq_k, p.bottom_right, reach, device, lengths)


def _visible(
    seq_q: int,
    seq_k: int,
    bottom_right: bool,
    reach: tuple[int | None, int | None],
    device: torch.device,
    lengths: torch.Tensor | None,
) -> torch.Tensor | None:
    """What ``positions`` says, of the facts that it follows from."""
    left, right = reach
    if lengths is None and left is None and right is None:
        return None
    j = torch.arange(seq_k, device=device)
    visible = None
    if lengths is not None:
        lengths = lengths.to(torch.int64)[:, None, None, None]
        visible = j < lengths
    if left is not None or right is not None:
        centre = torch.arange(seq_q, device=device)[:, None]
        if bottom_right:
            centre = centre + ((seq_k if lengths is None else lengths) - seq_q)
        if left is not None:
            visible = _both(visible, j >= centre - left)
        if right is not None:
            visible = _both(visible, j <= centre + right)
    return None if visible is None else visible.reshape(*(1,) * (4 - visible.dim()), *visible.shape)


@functools.lru_cache(maxsize=64)
def _kept(*facts: Any) -> torch.Tensor | None:
    """``_visible`` of small calls on the CPU, where it takes as long to make as to attend."""
    with torch.inference_mode(mode=False):
        return _visible(*facts)


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second
