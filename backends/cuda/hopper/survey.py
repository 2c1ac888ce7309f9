"""Launches of a look at a bool mask, which Hopper's kernels take before they begin."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import memory, run
from ..launching.arguments import Arguments
from ..launching.look import Look

__all__ = ["Survey"]

#: Rows of a group of rows of a mask.
_ROWS = 64
#: Warps of a block, its blocks on an SM, and their tiles of keys.
_WARPS, _RESIDENT, _TILES = 16, 2, 8
#: Blocks that there are at least before one takes several groups of rows.
_LEAST = 128
#: Tiles of keys to a word of what it finds, and words to 16 bytes, at multiples of which each part begins.
_BITS, _HEAD = 32, 4
#: Fields of arguments side by side: the batch, heads and rows of a mask; and the counter, sets and bits.
_SHAPE, _PLACES = struct.Struct("=3i"), struct.Struct("=3q")


class Survey(Look):
    """One look at a bool mask: which tiles of keys it hides, and its bits (``src/hopper/mask.cuh``).

    Memory that it takes, until the next kernel is done: 16 bytes for each row of the mask and tile of ``keys`` keys,
    which is an eighth of the mask where ``keys`` is 128, a fifth at 80, a quarter at 64. An axis that the mask is
    broadcast over, be it of length 1 or of stride 0, counts once.
    """

    def __init__(self, p: Problem, keys: int) -> None:
        self._tiles = arithmetic.tiles(p.seq_k, keys)
        self.variant = _survey(p, keys)

    def __call__(self, mask: Any, a: Arguments) -> Any:
        """Launch it. Returns the memory that ``a`` then points to, the forward's counter included, which is 0."""
        looks = self._looks(mask)
        space = _space(mask, a, looks)
        run.start(self.variant, looks.blocks, a, space)
        return space

    def bound(self, mask: Any, index: int) -> Callable[[Arguments, int], Any]:
        """See ``Look.bound``."""
        looks = self._looks(mask)
        send = run.sender(self.variant, looks.blocks, index)
        empty, size, int32 = memory.allocator(mask), (_HEAD + looks.sets + looks.bits,), sys.modules["torch"].int32

        def look(a: Arguments, stream: int) -> Any:
            space = empty(size, (1,), int32)
            _point(a, looks, space.data_ptr())
            send(stream, ctypes.addressof(a))
            return space

        return look

    def _looks(self, mask: Any) -> _Looks:
        """What a launch has to do for a mask that lies like this one."""
        _, *steps = memory.place(mask)
        b, h, rows = (n if step else 1 for n, step in zip(mask.shape[:3], steps[:3], strict=True))
        words, groups = arithmetic.tiles(self._tiles, _BITS), arithmetic.tiles(rows, _ROWS)
        sets = arithmetic.tiles(2 * b * h * groups * words, _HEAD) * _HEAD
        teams = _teams(self._tiles, b * h * groups)
        parts = arithmetic.tiles(groups, teams) * arithmetic.tiles(self._tiles, _TILES)
        bits = 4 * b * h * self._tiles * (1 if rows == 1 else groups * _ROWS)
        return _Looks(b, h, rows, sets, bits, b * h * parts)


def _teams(tiles: int, groups: int) -> int:
    """Groups of rows that a block takes where there are so many tiles, and groups: ``teams_for`` of survey.cu."""
    teams = 1
    while 2 * teams * tiles <= _TILES and 2 * teams * _LEAST <= groups:
        teams *= 2
    return teams


class _Looks(NamedTuple):
    """A mask's shape without what it is broadcast over, numbers of 4 bytes to either end, and blocks."""

    batch: int
    heads: int
    rows: int
    sets: int
    bits: int
    blocks: int


def _space(like: Any, a: Arguments, looks: _Looks) -> Any:
    """Memory of the library and on the GPU of ``like`` for it, which ``a`` then points to."""
    space = memory.empty((_HEAD + looks.sets + looks.bits,), like, "int32")
    _point(a, looks, memory.address(space))
    return space


def _point(a: Arguments, looks: _Looks, at: int) -> None:
    _SHAPE.pack_into(a, Arguments.mask_batch.offset, *looks[:3])
    _PLACES.pack_into(a, Arguments.counter.offset, at, at + 4 * _HEAD, at + 4 * (_HEAD + looks.sets))


@per_class
def _survey(_: Problem, keys: int) -> Variant:
    """One build for every type of query and key, which it does not read."""
    shared = _WARPS * 4
    return Variant("survey", "bfloat16", _ROWS, keys, warps=_WARPS, resident=_RESIDENT, shared=shared, family="hopper")
