"""Operands as the kernels read them: rows of 16-byte steps, which can be brought to shared memory asynchronously."""

from __future__ import annotations

from typing import Any

from attnswitch.problem import Memory, Problem

__all__ = ["Upstream", "copied", "even", "in_steps", "in_words", "mask_even", "mask_in_steps", "uneven"]

#: Elements. Triton itself sees that rows lie apart by a multiple of this, and of nothing less.
_SEEN = 16


def uneven(p: Problem) -> tuple[str, ...]:
    """The operands of ``p``, by their names in ``Inputs``, whose rows are no whole steps."""
    roles: tuple[tuple[str, Memory, int], ...] = (
        ("query", p.query, p.dim_qk),
        ("key", p.key, p.dim_qk),
        ("value", p.value, p.dim_v),
    )
    return tuple(
        role for role, memory, dim in roles if memory.align < 16 or memory.strided or dim * p.element(role) % 16
    )


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


class Upstream:
    """Upstream gradients where they lie, or as copies: by the first, since how they lie is no part of the problem."""

    def __init__(self) -> None:
        self._even: bool | None = None

    def __call__(self, grad_out: Any) -> Any:
        """``grad_out`` as kernels read it."""
        if self._even is None:
            self._even = even(grad_out)
        return grad_out if self._even else copied(grad_out)


def in_words(integers: Any) -> bool:
    """Whether ``integers`` lie side by side and take whole words of 32 bits, which is how kernels read them."""
    return bool(integers.element_size() >= 4 and integers.is_contiguous())


def mask_in_steps(mask: Any) -> Any:
    """``mask``, or a copy in rows that lie apart by multiples of 16 elements, where it has rows and they do not.

    Its elements would be loaded one by one: 84 ms where 3 are enough, for (9, 1, 1, 3229) and 40 heads (an H200).
    """
    return mask if mask_even(mask) else copied(mask, _SEEN)


def mask_even(mask: Any) -> bool:
    """Whether ``mask`` lies in such rows, or has none."""
    *rows, keys = mask.shape
    *steps, step = mask.stride()
    if keys == 1 or step == 0:
        return True
    apart = all(n == 1 or stride % _SEEN == 0 for n, stride in zip(rows, steps, strict=True))
    return apart and step == 1 and mask.data_ptr() % 16 == 0


def copied(array: Any, step: int | None = None) -> Any:
    """A copy of ``array`` (..., D) in even rows, or of multiples of ``step`` elements, with zeros behind D.

    What is expanded stays so.

    Elements loaded one by one go through registers: 3.7 ms for 2,048 keys of 4 x 16 heads of 128, and 0.36 with a copy
    (an H200). Hopper's matrix units read such tiles by descriptors that ptxas 12.8 (Triton 3.6) makes of registers it
    never wrote: fixtures/corpus/own-triton-cuda-uneven-rows.json.
    """
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.stride()[:3])]
    *rows, dim = once.shape
    step = step or 16 // array.element_size()
    make = once.new_zeros if dim % step else once.new_empty
    copy = make((*rows, -(-dim // step) * step))
    copy[..., :dim].copy_(once)
    return copy[..., :dim].expand(array.shape)
