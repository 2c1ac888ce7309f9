"""Arrays of torch, CuPy and NumPy as a launch needs them: addresses, strides, results, devices and streams.

Nothing is converted: CuPy's and NumPy's strides are of either sign, and all are taken as they are. NumPy's arrays are
for the emulator. Results on the CPU start out as NaN, so that what is not written shows.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from attnswitch.arrays import library_of

__all__ = ["address", "dtype_name", "empty", "on", "on_cpu", "place", "stream"]


def address(array: Any) -> int:
    """Where the first element is."""
    return place(array)[0]


def place(array: Any) -> tuple[int, ...]:
    """Where the first element is, and the strides in elements."""
    match _library(array):
        case "torch":
            return array.data_ptr(), *array.stride()
        case "cupy":
            pointer = array.data.ptr
        case _:
            pointer = array.__array_interface__["data"][0]
    return pointer, *(stride // array.itemsize for stride in array.strides)


def dtype_name(array: Any) -> str:
    """The name of its type: "float32", "int64"."""
    return str(array.dtype).removeprefix("torch.")


def empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
    """A result: contiguous, of ``like``'s library and device, and of its type where ``dtype`` does not name another."""
    library = _library(like)
    if library == "torch":
        torch: Any = sys.modules["torch"]
        made = like.new_empty(shape, dtype=getattr(torch, dtype) if dtype else like.dtype)
        if on_cpu(made) and made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made
    made = sys.modules[library].empty(shape, dtype or like.dtype)
    if on_cpu(made) and made.size:
        made.view("uint8").fill(0xFF)
    return made


def on_cpu(array: Any) -> bool:
    """Whether it is the CPU's memory that the array is in."""
    library = _library(array)
    return library == "numpy" or (library == "torch" and bool(array.device.type == "cpu"))


def on(array: Any) -> Any:
    """The device of ``array`` as the current one."""
    match _library(array):
        case "torch" if array.is_cuda:
            torch: Any = sys.modules["torch"]
            if array.device.index != torch.cuda.current_device():
                return torch.cuda.device(array.device)
        case "cupy":
            return array.device
    return contextlib.nullcontext()


def stream(array: Any) -> Any:
    """The current stream of the library and device of ``array``, as CuPy takes it."""
    if _library(array) == "torch":
        torch: Any = sys.modules["torch"]
        index = array.device.index
        return _external(torch.cuda.current_stream(index).cuda_stream, index)
    cupy: Any = sys.modules["cupy"]
    return cupy.cuda.get_current_stream()


def _library(array: Any) -> str:
    """``library_of``, which every launch asks ten times, remembered by type."""
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = library_of(array)
    return _libraries[kind]


_libraries: dict[type, str] = {}


@functools.lru_cache(maxsize=256)
def _external(pointer: int, index: int) -> Any:
    import cupy

    return cupy.cuda.ExternalStream(pointer, index)
