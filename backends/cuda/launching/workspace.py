"""Memory that blocks of a launch leave sums to one another in: between launches, every bit of it is 1.

Whoever takes a sum makes its place blank again. So the memory is filled once, and the launches of a stream, which come
one after another, share it. A graph may be replayed on any stream, and fills memory of its own.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from . import memory

__all__ = ["BLANK", "Places", "blank"]

#: Every byte of a place where nothing was left.
BLANK = 0xFF
#: What ``cudaStreamPerThread`` is for every thread.
_PER_THREAD = 2


class Places(NamedTuple):
    """Memory on a GPU, of so many bytes, which is there for as long as its owner."""

    address: int
    nbytes: int
    owner: Any


#: By GPU and stream. Not of an allocator that pools, as such may count what outlives a call.
_kept: dict[tuple[int, int, int], Places] = {}


def blank(size: int, like: Any, stream: int) -> Places:
    """``size`` bytes or more, on the GPU of ``like``, for a launch on ``stream`` that leaves them blank."""
    from cupy_backends.cuda.api import runtime

    if runtime.streamIsCapturing(stream):
        return _filled(_of_caller(size, like), stream)
    key = memory.index(like), stream, threading.get_ident() if stream == _PER_THREAD else 0
    places = _kept.get(key)
    if places is None or places.nbytes < size:
        try:
            larger = _allocated(1 << (size - 1).bit_length())  # as sizes that grow bit by bit would free as often
        except runtime.CUDARuntimeError:  # the caller's allocator may have all that is left
            return _filled(_of_caller(size, like), stream)
        places = _kept[key] = _filled(larger, stream)
    return places


def _of_caller(size: int, like: Any) -> Places:
    array = memory.empty((size,), like, "uint8")
    return Places(memory.address(array), size, array)


class _Owner:
    """Frees memory when nobody has it any more and no launch is under way."""

    def __init__(self, address: int) -> None:
        from cupy_backends.cuda.api import runtime

        weakref.finalize(self, runtime.free, address).atexit = False  # CUDA is gone by then


def _allocated(size: int) -> Places:
    """Memory on the current GPU."""
    from cupy_backends.cuda.api import runtime

    address = runtime.malloc(size)
    return Places(address, size, _Owner(address))


def _filled(places: Places, stream: int) -> Places:
    from cupy_backends.cuda.api import runtime

    runtime.memsetAsync(places.address, BLANK, places.nbytes, stream)
    return places
