"""Arrays of torch, CuPy and NumPy as a launch needs them: addresses, strides, results, devices and streams.

Nothing is converted: CuPy's and NumPy's strides are of either sign, and all are taken as they are. NumPy's arrays are
for the emulator. Results on the CPU start out as NaN, so that what is not written shows.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

from attnswitch.arrays import library_of
from attnswitch.problem import Memory

from ...own.allocating import allocator

__all__ = [
    "address",
    "allocator",
    "clear",
    "contiguous",
    "copied",
    "dense",
    "dtype_name",
    "empty",
    "in_steps",
    "index",
    "layout",
    "like",
    "on",
    "on_cpu",
    "place",
    "stream",
    "turned",
]


_HERE = contextlib.nullcontext()


def address(array: Any) -> int:
    """Where the first element is."""
    match _library(array):
        case "torch":
            return int(array.data_ptr())
        case "cupy":
            return int(array.data.ptr)
        case _:
            return int(array.__array_interface__["data"][0])


def place(array: Any) -> tuple[int, ...]:
    """Where the first element is, and the strides in elements."""
    if _library(array) == "torch":
        return array.data_ptr(), *array.stride()
    return address(array), *(stride // array.itemsize for stride in array.strides)


def layout(array: Any) -> Memory:
    """How ``array`` lies, as far as copies care."""
    at, *steps = place(array)
    size = array.itemsize
    strided = array.shape[3] > 1 and steps[3] != 1
    return Memory(align=math.gcd(16, at, *(stride * size for stride in steps[:3])), strided=strided)


def copied(operand: Memory, element: int) -> int:
    """Bytes that one copy may move of an operand whose elements have so many."""
    return element if operand.strided else max(operand.align, element)


def dtype_name(array: Any) -> str:
    """The name of its type: "float32", "int64"."""
    return str(array.dtype).removeprefix("torch.")


def empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
    """A result: contiguous, of ``like``'s library and device, and of its type where ``dtype`` does not name another."""
    library = _library(like)
    if library == "torch":
        torch: Any = sys.modules["torch"]
        array = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=getattr(torch, dtype))
        if array.is_cpu and array.numel():
            array.view(torch.uint8).fill_(0xFF)
        return array
    array = sys.modules[library].empty(shape, dtype or like.dtype)
    if on_cpu(array) and array.size:
        array.view("uint8").fill(0xFF)
    return array


def like(query: Any, dim: int) -> Any:
    """An output (batch, heads, L, dim) that lies in memory in the order of ``query``, heads inside L or L inside."""
    b, h, length, _ = query.shape
    if turned(query):
        return empty((b, length, h, dim), query).swapaxes(1, 2)
    return empty((b, h, length, dim), query)


def clear(*arrays: Any) -> None:
    """Fill those that are not None with 0, on the current stream of their library."""
    for array in arrays:
        if array is not None:
            array.zero_() if _library(array) == "torch" else array.fill(0)


def dense(array: Any) -> Any:
    """The same elements without gaps, in the order of the axes, in memory of their own."""
    if _library(array) == "torch":
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy(order="C")


def in_steps(mask: Any) -> Any:
    """A copy in rows that begin at multiples of 16 bytes; what lies between them is not set."""
    b, h, q, k = mask.shape
    step = 16 // mask.itemsize
    width = -(-k // step) * step
    if _library(mask) == "torch":
        return mask.new_empty_strided(mask.shape, (h * q * width, q * width, width, 1)).copy_(mask)
    copy = sys.modules[_library(mask)].empty((b, h, q, width), mask.dtype)[..., :k]
    copy[...] = mask
    return copy


def contiguous(array: Any) -> Any:
    """(B, H, L) without gaps, as the kernels read it."""
    if array is None:
        return None
    _, h, length = array.shape
    wanted = (h * length, length, 1)
    steps = place(array)[1:]
    if all(step == want for size, step, want in zip(array.shape, steps, wanted, strict=True) if size > 1):
        return array
    return array.contiguous() if hasattr(array, "contiguous") else array.copy(order="C")


def turned(query: Any) -> bool:
    """Whether heads lie inside L."""
    _, h, length, _ = query.shape
    _, _, by_head, by_row, _ = place(query)
    return h > 1 and length > 1 and abs(by_head) < abs(by_row)


def on_cpu(array: Any) -> bool:
    """Whether it is the CPU's memory that the array is in."""
    library = _library(array)
    return bool(array.is_cpu) if library == "torch" else library == "numpy"


def on(array: Any) -> Any:
    """The device of ``array`` as the current one."""
    library = _library(array)
    if library == "torch" and array.is_cuda:
        torch: Any = sys.modules["torch"]
        if array.get_device() != torch.cuda.current_device():
            return torch.cuda.device(array.device)
    elif library == "cupy":
        return array.device
    return _HERE


def index(array: Any) -> int:
    """The number of the GPU that the array is on."""
    return int(array.get_device() if _library(array) == "torch" else array.device.id)


def stream(array: Any) -> int:
    """The current stream of the library and device of ``array``, as CUDA knows it."""
    if _library(array) == "torch":
        torch: Any = sys.modules["torch"]
        return int(torch._C._cuda_getCurrentRawStream(array.get_device()))
    cupy: Any = sys.modules["cupy"]
    return int(cupy.cuda.get_current_stream().ptr)


def _library(array: Any) -> str:
    """``library_of``, which every launch asks ten times, remembered by type."""
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = library_of(array)
    return _libraries[kind]


_libraries: dict[type, str] = {}
