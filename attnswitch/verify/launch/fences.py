"""Arrays that begin, or end, where memory does: what reads beside them has its process ended, or its GPU's context.

On the CPU the page beyond is one that nobody may touch; on an NVIDIA GPU nothing is mapped on either side. An array
begins at a multiple of 16 bytes, and so ends up to 15 before the fence: reads of 16 bytes at once cannot pass it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from typing import Any

import numpy as np

from attnswitch.arrays import Array, passage

__all__ = ["beside_fence", "lacking"]

_STEP = 16
_UNTOUCHABLE = 0  # PROT_NONE


def lacking(device: str) -> str:
    """Why there are no fences on ``device`` (cpu, cuda:0); empty if there are."""
    if os.name != "posix":
        return "pages that nobody may touch are asked for as POSIX has it"
    return "" if device == "cpu" or _cuda() is not None else "no driver that maps memory"


def beside_fence(values: Array, end: bool, library: str, device: str) -> Array:
    """``values``, of NumPy, as an array of ``library`` that begins where memory does, or at its ``end``."""
    if device == "cpu":
        placed = _of_host(values.nbytes, end).view(values.dtype).reshape(values.shape)
        placed[...] = values
        return passage(placed, "numpy", library)
    near = passage(np.ascontiguousarray(values), "numpy", "torch")
    torch: Any = sys.modules["torch"]
    torch.cuda.init()  # which the driver waits for
    if values.size:
        memory = torch.as_tensor(_OfGpu(values.nbytes, end, torch.device(device).index or 0), device=device)
        tensor = memory.view(near.dtype).view(near.shape).copy_(near)
    else:  # which has no place
        tensor = near.to(device)
    return passage(tensor, "torch", library)


def _start(size: int, mapped: int, end: bool) -> int:
    """Where an array of ``size`` bytes begins in as many as are ``mapped``."""
    return (mapped - size) // _STEP * _STEP if end else 0


def _of_host(size: int, end: bool) -> Any:
    """Bytes between pages that nobody may touch."""
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    whole = np.frombuffer(mmap.mmap(-1, inner + 2 * page), np.uint8)
    at = whole.__array_interface__["data"][0]
    for fence in (at, at + page + inner):
        if _libc().mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _UNTOUCHABLE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page + _start(size, inner, end)
    return whole[start : start + size]


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("of_windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


#: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3


@functools.cache
def _cuda() -> Any:
    """The driver, where it maps memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuMemSetAccess") else None


def _asked(function: str, *given: Any) -> None:
    if code := getattr(_cuda(), function)(*given):
        raise MemoryError(f"{function}: CUDA error {code}")


class _OfGpu:
    """``size`` bytes on a GPU, as its mapped memory begins or ends, for whoever reads ``__cuda_array_interface__``."""

    def __init__(self, size: int, end: bool, gpu: int) -> None:
        here = _Location(_ON_DEVICE, gpu)
        kind = _Allocation(_PINNED, 0, here)
        step, reserved, memory = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        _asked("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(kind), 0)
        self._mapped = -(-size // step.value) * step.value
        self._whole = self._mapped + 2 * step.value
        _asked("cuMemAddressReserve", ctypes.byref(reserved), *map(ctypes.c_size_t, (self._whole, 0)), None, None)
        self._reserved, self._at = reserved.value, reserved.value + step.value
        _asked("cuMemCreate", ctypes.byref(memory), ctypes.c_size_t(self._mapped), ctypes.byref(kind), None)
        place = ctypes.c_uint64(self._at), ctypes.c_size_t(self._mapped)
        _asked("cuMemMap", *place, ctypes.c_size_t(0), memory, None)
        _asked("cuMemRelease", memory)  # it stays until it is mapped no more
        _asked("cuMemSetAccess", *place, ctypes.byref(_Access(here, _READ_AND_WRITE)), ctypes.c_size_t(1))
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._at + _start(size, self._mapped, end), False),
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_at"):  # whatever was launched on it is done: calls wait for it
            _cuda().cuMemUnmap(ctypes.c_uint64(self._at), ctypes.c_size_t(self._mapped))
            _cuda().cuMemAddressFree(ctypes.c_uint64(self._reserved), ctypes.c_size_t(self._whole))
