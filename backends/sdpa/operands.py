"""Operands as torch's fused kernels want them: unit stride, aligned, head dimension padded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by

from .masks import additive

__all__ = ["aligned", "bias", "copied_if_expanded", "dense_rows", "padded"]


def aligned(tensor: Any) -> Any:
    """``tensor``, or a copy where a 16-byte load from it could be misaligned.

    Strides of axes of length 1 count: the kernels check them like the others.
    """
    step = 16 // tensor.element_size()
    unit = tensor.stride(-1) == 1
    if unit and tensor.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in tensor.stride()[:-1]):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def padded(tensor: Any, multiple: int) -> Any:
    """``tensor`` with zeros after its head dimension up to a multiple, aligned. Zeros change no score and no output."""
    extra = -tensor.shape[-1] % multiple
    return aligned(F.pad(tensor, (0, extra)) if extra else tensor)


def copied_if_expanded(tensor: Any) -> Any:
    """``tensor``, or a copy where some axis has stride 0."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.clone(memory_format=torch.contiguous_format) if expanded else tensor


def dense_rows(tensor: Any) -> Any:
    """``tensor``, or a copy where a row is not dense or overlaps another: torch's CPU kernel misreads such rows.

    Where an axis of batch or heads has the smaller step, it leaves most of an output unwritten that it lays out alike.
    """
    if tensor.is_contiguous():
        return tensor
    (*_, rows, columns), (*outer, step, unit) = tensor.shape, tensor.stride()
    dense = (columns == 1 or unit == 1) and (rows == 1 or step >= columns)
    if dense and all(not 0 < step < columns for step, size in zip(outer, tensor.shape, strict=False) if size > 1):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def bias(mask: Any, like: Any, scores: tuple[int, int, int, int]) -> Any:
    """``mask`` as an additive bias in the type of ``like``, (B, Hq, Lq, Lk), rows aligned to 8 elements."""
    if mask.dtype == like.dtype and mask.shape == scores and mask.stride(3) == 1 and mask.stride(2) % 8 == 0:
        return mask  # made so by ``compose``
    mask = additive(mask, like.dtype).to(like.dtype)
    keys = scores[3]
    mask = mask.expand(*mask.shape[:3], keys)
    # Whole rows are materialised once, with room to a multiple of 8; batch, head and query axes stay broadcast.
    mask = F.pad(mask, (0, -keys % 8)).contiguous()[..., :keys]
    return mask.expand(scores)
