"""Arrays as they lie, strides, junk between the elements and alignment included, in memory that two processes see.

The candidate sees its inputs read-only and at the same addresses from call to call: a kernel that writes to them dies
of it, and one that takes equal addresses for equal inputs is wrong. Results come back dense, in a file.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from attnswitch.arrays import Array, library_of
from attnswitch.errors import InvalidProblem

__all__ = ["Arena", "Layout", "Results", "View"]

#: Arrays begin at multiples of the first, and keep their remainder of the second, which kernels choose by.
_APART, _ALIGNMENT = 256, 16
_NOTHING = bytes(_APART + _ALIGNMENT)
#: Bytes of an arena at least, and that are looked at together.
_LEAST, _PIECE = 2**20, 2**24
_TYPES = frozenset(
    (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)
_AXES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """An array of ``library`` on ``device``: its ``size`` bytes begin at ``start``, its first element ``at`` in them.

    ``strides`` count bytes.
    """

    library: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    size: int
    at: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, tuple(getattr(self, name) for name in Layout.__slots__)


class Arena:
    """The judge's end: the inputs of one call after another, from the first byte on.

    It is not mapped here: a file that somebody cuts short would end the process that looks at it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "inputs", os.O_RDWR | os.O_CREAT, 0o600)
        self.size = 0
        self._put: list[Any] = []

    def put(self, given: Sequence[Array | None]) -> tuple[Layout | None, ...]:
        """Lay ``given`` out; what lay there before is written over. Raises ``MemoryError`` if there is no room."""
        found, end, parts = list[Layout | None](), 0, list[Any]()
        for array in given:
            if array is None:
                found.append(None)
                continue
            content, address, at, strides, dtype, device = _flat(array)
            between = -end % _APART + address % _ALIGNMENT
            end += between
            shape = tuple(map(int, array.shape))
            found.append(Layout(library_of(array), device, dtype, shape, strides, end, content.size, at))
            parts += (_NOTHING[:between], content.data)
            end += content.size
        try:
            self._grow(end)
            self._write(parts)
        except OSError as error:
            raise MemoryError(f"out of memory: {end:,} bytes of inputs, and {error.strerror}") from None
        self._put = parts
        return tuple(found)

    def changed(self) -> bool:
        """Whether what was laid out is other than it was."""
        parts = self._put if sum(map(len, self._put)) > _LEAST else [b"".join(self._put)]
        at = 0
        for part in parts:
            for first in range(0, len(part), _PIECE):
                expected = bytes(part[first : first + _PIECE])
                if os.pread(self._file, len(expected), at) != expected:
                    return True
                at += len(expected)
        return False

    def close(self) -> None:
        """Give it up."""
        os.close(self._file)

    def _write(self, parts: Sequence[Any]) -> None:
        left, start = os.pwritev(self._file, parts, 0), 0
        for part in parts:  # what is more than is written at once
            done = min(left, len(part))
            left -= done
            while done < len(part):
                done += os.pwrite(self._file, part[done:], start + done)
            start += len(part)

    def _grow(self, size: int) -> None:
        if size > self.size or not self.size:
            self.size = max(_LEAST, 2 ** math.ceil(math.log2(max(size, 1))))
        if os.fstat(self._file).st_size != self.size:
            os.ftruncate(self._file, self.size)


class View:
    """The candidate's end of an ``Arena``, which it may only read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "inputs"
        self._memory: Any = None

    def get(self, layout: Layout | None, size: int) -> Array | None:
        """The array that lies so, in an arena of ``size`` bytes."""
        if layout is None:
            return None
        if self._memory is None or len(self._memory) != size:
            with self._path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        if layout.library == "torch":
            return _torch_of(layout, self._memory)
        dtype = _numpy_type(layout.dtype)
        array: Any = np.ndarray(layout.shape, dtype, self._memory, layout.start + layout.at, layout.strides)
        return array if layout.library == "numpy" else sys.modules["cupy"].asarray(array)


class Results:
    """The file of results: the candidate writes, the judge reads."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "results", os.O_RDWR | os.O_CREAT, 0o600)

    def clear(self) -> None:
        """Forget all."""
        os.ftruncate(self._file, 0)

    def write(self, made: Sequence[Array | None]) -> tuple[Layout | None, ...]:
        """Write the arrays one behind the other."""
        found, end = list[Layout | None](), 0
        for array in made:
            if array is None:
                found.append(None)
                continue
            content, _, _, _, dtype, device = _flat(_dense(array))
            shape = tuple(map(int, array.shape))
            found.append(Layout(library_of(array), device, dtype, shape, (), end, content.size))
            os.pwrite(self._file, content.data, end)
            end += content.size
        return tuple(found)

    def close(self) -> None:
        """Give it up."""
        os.close(self._file)

    def read(self, layout: Layout | None, most: int, like: Layout) -> Array | None:
        """The array that is said to lie so, of at most ``most`` bytes, of the library and on the device of ``like``.

        Raises ``InvalidProblem`` for what is none.
        """
        if layout is None:
            return None
        if (layout.library, layout.device) != (like.library, like.device):
            where = f"of {layout.library} on {layout.device}", f"of {like.library} on {like.device}"
            raise InvalidProblem(f"a result {where[0]} to operands {where[1]}")
        known = layout.dtype in _TYPES and len(layout.shape) <= _AXES
        if not known or min(layout.shape, default=0) < 0 or layout.start < 0:
            raise InvalidProblem(f"a result of {len(layout.shape)} axes of {layout.dtype}")
        size = math.prod(layout.shape) * _numpy_type(layout.dtype).itemsize
        if size > most:
            raise InvalidProblem(f"a result of {size:,} bytes where {most:,} are the most that is right")
        content = os.pread(self._file, size, layout.start)
        if len(content) != size:
            raise InvalidProblem(f"{len(content):,} bytes of a result that has {size:,}")
        if layout.library == "torch":
            torch: Any = sys.modules["torch"]
            dtype = getattr(torch, layout.dtype)
            whole = torch.frombuffer(bytearray(content), dtype=dtype) if size else torch.empty(0, dtype=dtype)
            return whole.reshape(layout.shape).to(layout.device)
        array = np.frombuffer(bytearray(content), _numpy_type(layout.dtype)).reshape(layout.shape)
        return array if layout.library == "numpy" else sys.modules["cupy"].asarray(array)


def _flat(array: Array) -> tuple[Any, int, int, tuple[int, ...], str, str]:
    """The bytes from first to last element, their address, where element 0 is in them, strides, dtype, device."""
    if library_of(array) == "torch":
        torch: Any = sys.modules["torch"]
        with torch.no_grad():
            x, itemsize = array.detach(), array.element_size()
            count = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
            row = torch.as_strided(x, (count,), (1,), x.storage_offset()).view(torch.uint8)
            strides = tuple(step * itemsize for step in x.stride())
            return row.cpu().numpy(), x.data_ptr(), 0, strides, str(x.dtype).removeprefix("torch."), str(x.device)
    device = "cpu"
    if library_of(array) == "cupy":
        device, array = f"cuda:{array.device.id}", np.ascontiguousarray(array.get())
    address = array.__array_interface__["data"][0]
    spans = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    before = -sum(min(0, span) for span in spans)
    size = before + sum(max(0, span) for span in spans) + array.itemsize if array.size else 0
    content = np.asarray(_Bytes(array, address - before, size)) if size else np.empty(0, np.uint8)
    return content, address - before, before, array.strides, array.dtype.name, device


class _Bytes:
    """Memory of an array, for NumPy to read as bytes: it is there as long as these are."""

    def __init__(self, array: Array, address: int, size: int) -> None:
        self._array = array
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, True), "version": 3}


def _dense(array: Array) -> Array:
    """``array`` where it is, without gaps; of CuPy's ``_flat`` makes a dense copy anyway."""
    if library_of(array) == "torch":
        return array.detach().contiguous()
    return array if library_of(array) == "cupy" else np.ascontiguousarray(array)


def _torch_of(layout: Layout, memory: Any) -> Array:
    import torch

    dtype: Any = getattr(torch, layout.dtype)
    steps = tuple(step // dtype.itemsize for step in layout.strides)
    if not layout.size:
        return torch.empty_strided(layout.shape, steps, dtype=dtype, device=layout.device)
    below = layout.start % _APART  # so that it is as far from a multiple on a GPU as well
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may not be written to, which is what is wanted
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=below + layout.size, offset=layout.start - below)
    if layout.device != "cpu":
        whole = whole.to(layout.device)
    return torch.as_strided(whole[below:].view(dtype), layout.shape, steps, below // dtype.itemsize)


def _numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))
