"""Memory that blocks of a launch leave sums to one another in: between launches, every bit of it is 1.

Whoever takes a sum makes its place blank again. So the memory is filled once, and the launches of a stream, which come
one after another, share it. A graph may be replayed on any stream, and fills memory of its own.
"""

from __future__ import annotations

import threading
from typing import Any

from . import memory

__all__ = ["BLANK", "blank"]

#: Every byte of a place where nothing was left.
BLANK = 0xFF
#: What ``cudaStreamPerThread`` is for every thread.
_PER_THREAD = 2
#: By GPU and stream. Not of an allocator that pools, as such may count what outlives a call.
_kept: dict[tuple[int, int, int], Any] = {}


def blank(size: int, like: Any, stream: int) -> Any:
    """An array of ``size`` bytes or more, on the GPU of ``like``, for a launch on ``stream`` that leaves it blank."""
    from cupy.cuda import runtime

    if runtime.streamIsCapturing(stream):
        return _filled(memory.empty((size,), like, "uint8"), stream)
    key = memory.index(like), stream, threading.get_ident() if stream == _PER_THREAD else 0
    places = _kept.get(key)
    if places is None or places.nbytes < size:
        try:
            larger = _allocated(1 << (size - 1).bit_length())  # as sizes that grow bit by bit would free as often
        except runtime.CUDARuntimeError:  # the caller's allocator may have all that is left
            return _filled(memory.empty((size,), like, "uint8"), stream)
        places = _kept[key] = _filled(larger, stream)
    return places


def _allocated(size: int) -> Any:
    """An array on the current GPU, freed when nobody has it any more and no launch is under way."""
    import cupy

    return cupy.ndarray((size,), "uint8", cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))


def _filled(array: Any, stream: int) -> Any:
    from cupy.cuda import runtime

    runtime.memsetAsync(memory.address(array), BLANK, array.nbytes, stream)
    return array
