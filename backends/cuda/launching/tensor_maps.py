"""Tensor maps, by which TMA knows an operand: encoded by the driver once, and kept by address, shape and strides."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from attnswitch.problem import DTYPES

from . import driver

__all__ = ["COLUMNS", "EmulatedMap", "Passed", "Remembered", "TensorMap", "tensor_map"]

#: Columns that a load brings, the span of the swizzle: PANEL of ``src/hopper/tma.cuh``.
COLUMNS = 64
#: Maps that are kept: buffers take turns, and a graph holds its own copies.
_KEPT = 768


class EmulatedMap(ctypes.Structure):
    """What the emulator knows an operand by: ``src/emulator/tma.hpp``."""

    _fields_: ClassVar = [
        ("address", ctypes.c_uint64),
        ("lengths", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("rows", ctypes.c_uint64),
        ("heads", ctypes.c_uint64),
        ("spare", ctypes.c_uint64 * 6),
    ]


@dataclass(frozen=True)
class TensorMap:
    """An operand (batch, heads, rows, columns) of which a load brings ``box`` rows of ``heads``; strides in bytes.

    It says all that the encoded map depends on, and nothing else.
    """

    dtype: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, int, int]
    box: int
    heads: int = 1

    @functools.cached_property
    def _encoded(self) -> tuple[int, Any]:
        shape, strides = self.shape[::-1], self.strides[::-1]
        return driver.encode(self.dtype, self.address, shape, strides, (COLUMNS, self.box, self.heads, 1))

    @property
    def pointer(self) -> int:
        """Where the encoded map is, as a launch passes it. Raises ``driver.DriverError`` if it is refused."""
        return self._encoded[0]

    @property
    def emulated(self) -> EmulatedMap:
        """The same for the emulator."""
        lengths, strides = (ctypes.c_uint64 * 4)(*self.shape[::-1]), (ctypes.c_uint64 * 3)(*self.strides[::-1])
        return EmulatedMap(self.address, lengths, strides, self.box, self.heads)


@functools.lru_cache(maxsize=_KEPT)
def tensor_map(dtype: str, shape: tuple[int, ...], box: int, place: tuple[int, ...], heads: int = 1) -> TensorMap:
    """The tensor map of an operand at ``place``: the address and the strides in elements.

    What the strides of axes of length 1 are means nothing, and may be no legal one.
    """
    size = DTYPES[dtype]
    line = -(-shape[3] * size // 16) * 16
    address, *steps = place
    by_batch, by_head, by_row = (
        line if length == 1 else step * size for length, step in zip(shape[:3], steps[:3], strict=True)
    )
    return TensorMap(dtype, address, shape, (by_batch, by_head, by_row), box, heads)


class Passed(NamedTuple):
    """Tensor maps, and where they are for as long as this is kept."""

    maps: tuple[TensorMap, ...]
    pointers: tuple[int, ...]


class Remembered(dict[tuple[Any, ...], Passed]):
    """The maps that ``make`` makes, by what it is given: a launch finds those of all its operands at once."""

    def __init__(self, make: Callable[..., tuple[TensorMap, ...]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, given: tuple[Any, ...]) -> Passed:
        maps = self._make(*given)
        if len(self) >= _KEPT:
            self.clear()
        passed = self[given] = Passed(maps, tuple(each.pointer for each in maps))
        return passed
