"""How results lie, which a graph has to know before anything runs: as their operand does."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["laid", "like", "lse_of", "steps"]


def like(operand: Any, columns: Any, layout: str) -> Any:
    """Dense memory for an array as ``operand`` with so many columns: heads inside L, or L inside, as they lie there."""
    b, first, second, _ = operand.shape
    if _heads_inside(operand, layout) == (layout == "BLHD"):
        return operand.new_empty((b, first, second, columns))
    return operand.new_empty((b, second, first, columns)).swapaxes(1, 2)


def lse_of(query: Any, shape: tuple[Any, ...]) -> Any:
    """Dense memory for an lse beside ``query``."""
    return query.new_empty(shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


def laid(array: Any, operand: Any, layout: str) -> Any:
    """``array`` in such memory, if it is not in it."""
    plain = _heads_inside(operand, layout) == (layout == "BLHD")
    if (array if plain else array.swapaxes(1, 2)).is_contiguous():
        return array
    return like(operand, array.shape[-1], layout).copy_(array)


def steps(operand: torch.Tensor, columns: int, layout: str) -> tuple[int, ...]:
    """The strides of such memory."""
    alike = torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")
    return tuple(like(alike, columns, layout).stride())


def _heads_inside(operand: Any, layout: str) -> bool:
    """Whether heads lie inside L, as a program has them that splits rows into heads."""
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    long = _or(operand.shape[heads] > 1, True) and _or(operand.shape[length] > 1, True)
    return long and _or(operand.stride(heads) < operand.stride(length), False)


def _or(said: Any, otherwise: bool) -> bool:
    """What is so, or ``otherwise`` where a graph has sizes of which nothing is known before it runs."""
    if type(said) is bool:
        return said
    from torch.fx.experimental import symbolic_shapes

    return bool((symbolic_shapes.guard_or_true if otherwise else symbolic_shapes.guard_or_false)(said))
