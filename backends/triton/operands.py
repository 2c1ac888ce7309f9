"""Operands as the kernels read them: rows of 16-byte steps, which can be brought to shared memory asynchronously."""

from __future__ import annotations

from typing import Any

from attnswitch.problem import DTYPES, Memory, Problem

__all__ = ["copied", "even", "in_steps", "uneven"]


def uneven(p: Problem) -> tuple[str, ...]:
    """The operands of ``p``, by their names in ``Inputs``, whose rows are no whole steps."""
    roles: tuple[tuple[str, Memory, int], ...] = (
        ("query", p.query, p.dim_qk),
        ("key", p.key, p.dim_qk),
        ("value", p.value, p.dim_v),
    )
    step = 16 // DTYPES[p.dtype]
    return tuple(role for role, memory, dim in roles if memory.align < 16 or memory.strided or dim % step)


def even(array: Any) -> bool:
    """Whether every row of ``array``, and its end, lies at a multiple of 16 bytes."""
    step = 16 // array.element_size()
    *rows, dim = array.shape
    return (
        dim % step == 0
        and array.stride(3) == 1
        and array.data_ptr() % 16 == 0
        and all(n == 1 or stride % step == 0 for n, stride in zip(rows, array.stride()[:3], strict=True))
    )


def in_steps(array: Any) -> Any:
    """``array``, or a copy where it is not even."""
    return array if even(array) else copied(array)


def copied(array: Any) -> Any:
    """A copy of ``array`` (..., D) in even rows, with zeros behind D. What is expanded stays so.

    Elements loaded one by one go through registers: 3.7 ms for 2,048 keys of 4 x 16 heads of 128, and 0.36 with a copy
    (an H200). Hopper's matrix units read such tiles by descriptors that ptxas 12.8 (Triton 3.6) makes of registers it
    never wrote: fixtures/corpus/own-triton-cuda-uneven-rows.json.
    """
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.stride()[:3])]
    *rows, dim = once.shape
    step = 16 // array.element_size()
    make = once.new_zeros if dim % step else once.new_empty
    copy = make((*rows, -(-dim // step) * step))
    copy[..., :dim].copy_(once)
    return copy[..., :dim].expand(array.shape)
