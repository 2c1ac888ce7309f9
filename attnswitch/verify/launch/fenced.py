"""Arrays that begin, or end, where memory does: what reads beside them has its process ended, or its GPU's context.

On the CPU a million bytes on either side are such that nobody may touch them; on an NVIDIA GPU nothing is mapped there.
An array begins at a multiple of 16 bytes, so that all of a load of so many stays inside; up to 15 are left behind its
end, which hold junk. Numbers that are read one at a time, lengths and offsets, end at the fence itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from typing import Any

import numpy as np

from attnswitch.arrays import Array, address, passage

__all__ = ["NoFence", "beside_fence", "lacking"]

#: Bytes that operands are loaded by, and a byte of NaN in every float type, as of an index out of every range.
_STEP, _JUNK = 16, 0xFF
#: Bytes that nobody may touch on either side, on the CPU.
_GUARD = 2**20
_UNTOUCHABLE = 0  # PROT_NONE


class NoFence(Exception):
    """There was no memory for a fence, or the system gave none: no fault of a kernel's."""


def lacking(device: str) -> str:
    """Why there are no fences on ``device`` (cpu, cuda:0); empty if there are."""
    if os.name != "posix":
        return "pages that nobody may touch are asked for as POSIX has it"
    return "" if device == "cpu" or _cuda() is not None else "no driver that maps memory"


def beside_fence(values: Array, end: bool, library: str, device: str) -> Array:
    """``values``, of NumPy, as an array of ``library`` that begins where memory does, or at its ``end``.

    Raises:
        NoFence: the system gave no memory for it.
    """
    if device == "cpu":
        placed = _of_host(values, end).view(values.dtype).reshape(values.shape)
        placed[...] = values
        return passage(placed, "numpy", library)
    near = passage(np.ascontiguousarray(values), "numpy", "torch")
    torch: Any = sys.modules["torch"]
    torch.cuda.init()  # which the driver waits for
    if not values.size:  # it has no place
        return passage(near.to(device), "torch", library)
    index = torch.device(device).index
    memory = _OfGpu(values.nbytes, _step(values), end, torch.cuda.current_device() if index is None else index)
    whole = torch.as_tensor(memory, device=device)
    if whole.data_ptr() != memory.begins:
        raise NoFence(f"torch copied an array of {device}")
    whole.fill_(_JUNK)
    tensor = whole[memory.start :][: values.nbytes].view(near.dtype).view(near.shape)
    return passage(tensor.copy_(near), "torch", library)


def _step(values: Array) -> int:
    return values.itemsize if values.dtype.kind in "iu" and values.itemsize > 1 else _STEP


def _start(size: int, step: int, mapped: int, end: bool) -> int:
    """Where an array of ``size`` bytes begins in as many as are ``mapped``."""
    return (mapped - size) // step * step if end else 0


def _of_host(values: Array, end: bool) -> Any:
    """Bytes for ``values`` between those that nobody may touch."""
    inner = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, inner + 2 * _GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoFence(str(error)) from error
    whole = np.frombuffer(memory, np.uint8)
    for guard in (address(whole), address(whole) + _GUARD + inner):
        if _libc().mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_GUARD), _UNTOUCHABLE):
            raise NoFence(os.strerror(ctypes.get_errno()))
    inside = whole[_GUARD : _GUARD + inner]
    inside.fill(_JUNK)
    start = _start(values.nbytes, _step(values), inner, end)
    return inside[start : start + values.nbytes]


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


def _ask(function: str, *given: Any) -> None:
    if code := getattr(_cuda(), function)(*given):
        raise NoFence(f"{function}: CUDA error {code}")


class _OfGpu:
    """Mapped memory of a GPU, for whoever reads ``__cuda_array_interface__``, with ``size`` bytes at ``start``."""

    def __init__(self, size: int, step: int, end: bool, gpu: int) -> None:
        self._gpu, here = gpu, _Location(_ON_DEVICE, gpu)
        kind = _Allocation(_PINNED, 0, here)
        granule, reserved, memory = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        _ask("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(kind), 0)
        self._mapped = -(-size // granule.value) * granule.value
        self._whole = self._mapped + 2 * granule.value
        self.start = _start(size, step, self._mapped, end)
        _ask("cuMemAddressReserve", ctypes.byref(reserved), *map(ctypes.c_size_t, (self._whole, 0)), None, None)
        self._reserved, self.begins = reserved.value, reserved.value + granule.value
        _ask("cuMemCreate", ctypes.byref(memory), ctypes.c_size_t(self._mapped), ctypes.byref(kind), None)
        try:
            _ask("cuMemMap", *self._place(), ctypes.c_size_t(0), memory, None)
        finally:
            _cuda().cuMemRelease(memory)  # it stays until it is mapped no more
        access = _Access(here, _READ_AND_WRITE)
        _ask("cuMemSetAccess", *self._place(), ctypes.byref(access), ctypes.c_size_t(1))
        self.__cuda_array_interface__ = {
            "shape": (self._mapped,),
            "typestr": "|u1",
            "data": (self.begins, False),
            "version": 3,
        }

    def _place(self) -> tuple[Any, Any]:
        return ctypes.c_uint64(self.begins), ctypes.c_size_t(self._mapped)

    def __del__(self) -> None:
        if hasattr(self, "begins"):  # a call that raised may have left a kernel that reads it
            with contextlib.suppress(Exception):
                sys.modules["torch"].cuda.synchronize(self._gpu)
            _cuda().cuMemUnmap(*self._place())
            _cuda().cuMemAddressFree(ctypes.c_uint64(self._reserved), ctypes.c_size_t(self._whole))
