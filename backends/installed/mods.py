"""A problem's mask and scores as the functions of indices that FlexAttention takes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

__all__ = ["added", "score", "spans", "visible"]

#: Of indices b, h, i and j that broadcast.
Mod = Callable[..., Any]


def spans(problem: Problem) -> tuple[bool, bool] | None:
    """Whether what hides differs between batch entries, and between heads; None where nothing hides."""
    p = problem
    boolean = p.mask.axes if p.mask is not None and p.mask.is_bool else None
    if boolean is None and not p.key_lengths and not p.hides_by_position:
        return None
    return p.key_lengths or "b" in (boolean or ""), "h" in (boolean or "")


def visible(problem: Problem, lengths: Any, mask: Any) -> Mod:
    """Whether query i sees key j. Only what the problem needs is computed: each condition costs time in the kernel."""
    p = problem
    left, right = p.reach if p.hides_by_position else (None, None)
    boolean = mask if p.mask is not None and p.mask.is_bool else None

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        centre = _centre(p, lengths, b, i)
        conditions = []
        if left is not None:
            conditions.append(j >= centre - left)
        if right is not None:
            conditions.append(j <= centre + right)
        if p.key_lengths:
            conditions.append(j < lengths[b])
        if boolean is not None:
            conditions.append(_at(boolean, b, h, i, j))
        if not conditions:
            return j >= 0
        return functools.reduce(operator.and_, conditions)

    return mod


def score(problem: Problem, bias: Any, slopes: Any, lengths: Any) -> Mod | None:
    """Softcap, then ALiBi, then the float mask; None where there is none of them."""
    p = problem
    if not (p.softcap or p.alibi or p.adds_mask):
        return None

    def mod(number: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        import torch

        if p.softcap:
            number = p.softcap * torch.tanh(number / p.softcap)
        if p.alibi:
            distance = _centre(p, lengths, b, i) - j
            number = number - slopes[b if slopes.shape[0] > 1 else 0, h] * torch.abs(distance)
        return number + _at(bias, b, h, i, j) if p.adds_mask else number

    return mod


def added(problem: Problem, inputs: Inputs) -> Any:
    """The float mask, if there is one."""
    return inputs.attn_mask if problem.adds_mask else None


def _centre(problem: Problem, lengths: Any, b: Any, i: Any) -> Any:
    """The key that query i stands at."""
    p = problem
    if not ((p.positional or p.alibi) and p.bottom_right):
        return i
    return i + ((lengths[b] if p.key_lengths else p.seq_k) - p.seq_q)


def _at(mask: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The mask's element, where axes of length 1 broadcast."""
    return mask[tuple(index if size > 1 else 0 for index, size in zip((b, h, i, j), mask.shape, strict=True))]
