"""Operands placed in memory in every way that an application might: same values, other strides."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from attnswitch.arrays import Array, passage

__all__ = ["PLACINGS", "place"]

_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def _contiguous(x: Array) -> Array:
    return np.ascontiguousarray(x)


def _transposed(x: Array) -> Array:
    """Stored as (B, L, H, D), as most models have it."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _packed(x: Array) -> Array:
    """The middle of three operands in one (B, L, 3, H, D) buffer."""
    b, h, length, d = x.shape
    buffer = np.zeros((b, length, 3, h, d), x.dtype)
    buffer[:, :, 1] = x.swapaxes(1, 2)
    return buffer[:, :, 1].swapaxes(1, 2)


def _strided(x: Array) -> Array:
    """Every second element of the last axis."""
    buffer = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _columns(x: Array) -> Array:
    """The last two axes stored the other way round."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def _offset(x: Array) -> Array:
    """One element into its buffer: not aligned to 16 bytes."""
    buffer = np.zeros(x.size + 1, x.dtype)
    view = buffer[1:].reshape(x.shape)
    view[...] = x
    return view


def _padded_rows(x: Array) -> Array:
    """Rows one element apart from the next: an odd row stride."""
    buffer = np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    buffer[..., :-1] = x
    return buffer[..., :-1]


def _garbage(x: Array) -> Array:
    """Meaningless strides on axes of length 1."""
    strides = tuple(
        stride if size > 1 else 99990001 * x.itemsize
        for stride, size in zip(np.ascontiguousarray(x).strides, x.shape, strict=True)
    )
    return np.lib.stride_tricks.as_strided(np.ascontiguousarray(x), x.shape, strides) if x.size else x


def _backwards(x: Array) -> Array:
    """The sequence runs backwards in memory; NumPy and CuPy only."""
    return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


def _expanded(axis: int) -> Callable[[Array], Array]:
    def place(x: Array) -> Array:
        if x.shape[axis] == 0:
            return x
        first = tuple(slice(0, 1) if a == axis else slice(None) for a in range(4))
        return np.broadcast_to(np.ascontiguousarray(x[first]), x.shape)

    return place


#: How an operand may lie, plainest first. The expanded ones hold equal values along their axis.
PLACINGS: dict[str, Callable[[Array], Array]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "packed": _packed,
    "padded-rows": _padded_rows,
    "offset": _offset,
    "strided": _strided,
    "columns": _columns,
    "garbage": _garbage,
    "expanded-heads": _expanded(1),
    "expanded-batch": _expanded(0),
    "expanded-rows": _expanded(2),
    "backwards": _backwards,
}


def place(values: Array, dtype: str, placing: str, library: str, device: str) -> Array:
    """float64 or bool ``values`` as an array of ``library`` on ``device``, lying as ``placing`` says."""
    typed = values if values.dtype == np.bool_ else values.astype(_DTYPES[dtype])
    placed = PLACINGS[placing](typed)
    if library == "numpy":
        return placed
    if placing == "backwards":
        raise ValueError(f"{library} arrays made from host memory cannot run backwards")
    host: Any = passage(placed, "numpy", "torch")
    if device == "cpu":
        return host
    on_device = _moved(host, device)
    return on_device if library == "torch" else passage(on_device, "torch", library)


def _moved(tensor: Any, device: str) -> Any:
    """The tensor on another device with its strides and offset, which ``.to`` would tidy away."""
    torch: Any = importlib.import_module("torch")
    size = (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    offset = tensor.storage_offset()
    if tensor.data_ptr() % 16 and not offset:  # made at an odd address by NumPy, which torch sees as offset 0
        offset = tensor.data_ptr() % 16 // tensor.element_size()
    flat = tensor.as_strided((size,), (1,))
    buffer = torch.empty(offset + size, dtype=tensor.dtype, device=device)
    buffer[offset:] = flat.to(device)
    return buffer.as_strided(tensor.shape, tensor.stride(), offset)
