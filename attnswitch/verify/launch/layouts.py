"""Operands placed in memory in every way that an application might: same values, other strides.

Around every operand, and in the gaps between its elements, lies junk: NaN in float buffers. A kernel that reads what is
not its own shows it in the result, and one that writes there changes the junk, which ``Storage`` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from attnswitch.arrays import Array, library_of, passage
from attnswitch.verify.drawing import stored
from attnswitch.verify.drawing.placings import FAR, FENCED, PLACINGS, TURNED
from attnswitch.verify.launch.fenced import beside_fence

__all__ = ["Storage", "host", "passed", "place"]

_DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    **stored.DTYPES,
}
#: Rows of junk before and after an operand: more than a tile of most kernels.
_ROWS = 72
_ALIGNMENT = 64
#: Elements of which a row of any type is whole steps of 16 bytes.
_STEP = 16

Shape = tuple[int, ...]
#: From the shape of an operand, the shape of its buffer; and from a buffer, the view that is the operand.
Plan = tuple[Callable[[Shape], Shape], Callable[[Array, Shape], Array]]


def _same(shape: Shape) -> Shape:
    return shape


def _swapped(shape: Shape) -> Shape:
    return shape[0], shape[2], shape[1], shape[3]


def _garbage(buffer: Array, shape: Shape) -> Array:
    """Meaningless strides on axes of length 1."""
    strides = tuple(s if n > 1 else 99990001 * buffer.itemsize for s, n in zip(buffer.strides, shape, strict=True))
    bits = buffer.view(f"u{buffer.itemsize}")  # NumPy knows no stride tricks of every type from elsewhere
    return np.lib.stride_tricks.as_strided(bits, shape, strides).view(buffer.dtype) if buffer.size else buffer


def _last(columns: int) -> int:
    """Place of a mirrored row's first element, from which the others run backwards: a multiple of 16 bytes."""
    return -(-(columns - 1) // _STEP) * _STEP


def _expanded(axis: int) -> Plan:
    def shorter(shape: Shape) -> Shape:
        return tuple(min(n, 1) if a == axis else n for a, n in enumerate(shape))

    return shorter, np.broadcast_to


_PLANS: dict[str, Plan] = {
    "contiguous": (_same, lambda b, _: b),
    "transposed": (_swapped, lambda b, _: b.swapaxes(1, 2)),
    "packed": (lambda s: (s[0], s[2], 3, s[1], s[3]), lambda b, _: b[:, :, 1].swapaxes(1, 2)),
    "strided": (lambda s: (*s[:-1], 2 * s[-1]), lambda b, _: b[..., ::2]),
    "columns": (lambda s: (*s[:-2], s[-1], s[-2]), lambda b, _: b.swapaxes(-1, -2)),
    "offset": (_same, lambda b, _: b),
    "padded-rows": (lambda s: (*s[:-1], s[-1] + 1), lambda b, _: b[..., :-1]),
    "garbage": (_same, _garbage),
    "backwards": (_same, lambda b, _: b[:, :, ::-1]),
    "mirrored": (
        lambda s: (*s[:-1], _last(s[-1]) + _STEP),
        lambda b, s: b[..., _last(s[-1]) + 1 - s[-1] : _last(s[-1]) + 1][..., ::-1],
    ),
    "expanded-batch": _expanded(0),
    "expanded-heads": _expanded(1),
    "expanded-rows": _expanded(2),
}
assert _PLANS.keys() == set(PLACINGS)


@dataclass(frozen=True, slots=True)
class Storage:
    """All the memory that an operand was placed in, with the bytes that it had."""

    flat: Array
    #: None where there is too much of it to look at.
    before: Any

    def changed(self) -> bool:
        """Whether any byte of it was written to."""
        return self.before is not None and bool((_bytes(host(self.flat)) != self.before).any())


def _bytes(flat: Any) -> Any:
    return flat.view(np.uint8)


def place(
    values: Array, dtype: str, placing: str, library: str, device: str, *, turned: bool = False
) -> tuple[Array, Storage]:
    """float64, bool or 8-bit ``values`` as an array of ``library`` on ``device``, lying as ``placing`` says in junk.

    At a fence they lie row-major as they are, or ``turned``: with their second axis behind the third.
    """
    if placing == FAR:
        return _far(values, dtype, library, device)
    kind: Any = np.bool_ if values.dtype == np.bool_ else _DTYPES[dtype]
    if placing in FENCED:
        with np.errstate(all="ignore"):
            numbers = values.astype(kind)
        whole = beside_fence(numbers.swapaxes(1, 2) if turned else numbers, placing == "at-end", library, device)
        return whole.swapaxes(1, 2) if turned else whole, Storage(whole, None)
    shape = tuple(values.shape)
    buffer_shape, view = _PLANS[placing]
    size = math.prod(buffer_shape(shape))
    margin = min(_ROWS * (shape[-1] if shape else 1), 2**14)
    margin = -(-margin // _ALIGNMENT) * _ALIGNMENT
    start = margin + (1 if placing == "offset" else 0)
    flat = _aligned(start + size + margin, kind)
    flat.fill({np.bool_: True, np.int8: -128}.get(kind, math.nan))
    buffer = flat[start : start + size].reshape(buffer_shape(shape))
    placed = view(buffer, shape)
    with np.errstate(all="ignore"):
        if placing.startswith("expanded"):  # the values are equal along the repeated axis, which has no memory
            buffer[...] = values[tuple(slice(n) for n in buffer.shape)]
        else:
            placed[...] = values
    if library == "numpy":
        return placed, Storage(flat, _bytes(flat).copy())
    if placing in TURNED:
        raise ValueError(f"{library} arrays made from host memory cannot run backwards")
    before = _bytes(flat).copy() if device == "cpu" else _bytes(flat)
    moved: Any = passage(flat, "numpy", "torch")
    moved = moved if device == "cpu" else moved.to(device)
    offset = (placed.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // flat.itemsize
    strides = tuple(stride // flat.itemsize for stride in placed.strides)
    tensor = moved.as_strided(placed.shape, strides, offset)
    return (tensor if library == "torch" else passage(tensor, "torch", library)), Storage(moved, before)


def _far(values: Array, dtype: str, library: str, device: str) -> tuple[Array, Storage]:
    """Rows of one batch entry and head, the last of which begins past 2**31 elements; zeros between them."""
    rows = values.shape[2]
    stride = -(-(2**31) // max(rows - 1, 1)) + 64
    size, strides = (rows - 1) * stride + values.shape[3], (1, 1, stride, 1)
    if library == "numpy":
        flat: Any = np.zeros(size, _DTYPES[dtype])
        placed = np.lib.stride_tricks.as_strided(flat, values.shape, [n * flat.itemsize for n in strides])
        placed[...] = values
        return placed, Storage(flat, None)
    near, _ = place(values, dtype, "contiguous", "torch", device)
    # torch writes zeros; here they are there once they are read.
    zeros = passage(np.zeros(size * near.itemsize, np.uint8), "numpy", "torch") if device == "cpu" else None
    flat = near.new_zeros(size) if zeros is None else zeros.view(near.dtype)
    tensor = flat.as_strided(values.shape, strides)
    tensor.copy_(near)
    return (tensor if library == "torch" else passage(tensor, "torch", library)), Storage(flat, None)


def _aligned(size: int, dtype: Any) -> Any:
    """``size`` elements of uninitialised host memory, aligned as allocators of array libraries do."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size * itemsize + _ALIGNMENT, np.uint8)
    skip = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[skip : skip + size * itemsize].view(dtype)


def passed(library: str, made: Any, device: str, placing: str = "contiguous") -> Any:
    """An array of NumPy's as one of the caller's, which lies at a fence if its ``placing`` is one."""
    if placing in FENCED:
        return beside_fence(made, placing == "at-end", library, device)
    if library == "numpy":
        return made
    return passage(passage(made, "numpy", "torch").to(device), "torch", library)


def host(array: Any) -> Any:
    """An array of any library and device in NumPy, same dtype."""
    library = library_of(array)
    if library == "numpy":
        return array
    return passage(passage(array, library, "torch").detach().cpu(), "torch", "numpy")
