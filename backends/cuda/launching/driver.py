"""NVIDIA's driver by ctypes: what launches ask of it, field for field as ``cuda.h`` has it.

CuPy's binding brings all of CuPy along at its first call, 0.1 s and more, and ``cuda.bindings`` takes 0.04 s to import;
a first call has neither to spare.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

__all__ = ["DriverError", "Launcher", "Parameters", "encode", "function", "load"]

#: Bytes of a CUtensorMap, and of which multiple its address is.
_MAP_BYTES, _ALIGNED = 128, 64
#: Of CUresult.
_INVALID_CONTEXT = 201
#: Of CUfunction_attribute.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
#: Of CUlaunchAttributeID.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
#: Of CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion and CUtensorMapFloatOOBfill: none, 128 bytes,
#: 256 bytes, and 0 for what lies outside.
_INTERLEAVE, _SWIZZLE, _PROMOTION, _FILL = 0, 3, 3, 0
#: Of CUtensorMapDataType.
_TYPES = {"float16": 6, "bfloat16": 9}


class DriverError(RuntimeError):
    """What the driver refused, by the name of its error."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_: ClassVar = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


#: Addresses of a kernel's parameters: five tensor maps at most, and the arguments.
Parameters = ctypes.c_void_p * 6
#: Streams whose configs a launch remembers; beyond, it forgets them all.
_STREAMS = 64
_OVERLAPS = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
_POINTER, _UINT = ctypes.c_void_p, ctypes.c_uint


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuModuleLoadData.argtypes = _POINTER, ctypes.c_char_p
    library.cuModuleGetFunction.argtypes = _POINTER, _POINTER, ctypes.c_char_p
    library.cuFuncSetAttribute.argtypes = _POINTER, ctypes.c_int, ctypes.c_int
    library.cuLaunchKernelEx.argtypes = _POINTER, _POINTER, _POINTER, _POINTER
    if hasattr(library, "cuTensorMapEncodeTiled"):  # from CUDA 12 on
        arrays = _POINTER, _POINTER, _POINTER, _POINTER
        library.cuTensorMapEncodeTiled.argtypes = _POINTER, ctypes.c_int, _UINT, _POINTER, *arrays, *[ctypes.c_int] * 4
    return library


def load(cubin: bytes) -> int:
    """The module of a cubin, on the current GPU. Raises ``DriverError``."""
    module = ctypes.c_void_p()
    _do("cuModuleLoadData", ctypes.addressof(module), cubin)
    return module.value or 0


def function(module: int, name: str, shared: int) -> int:
    """A kernel of a module, whose blocks may have ``shared`` bytes of shared memory. Raises ``DriverError``."""
    found = ctypes.c_void_p()
    _do("cuModuleGetFunction", ctypes.addressof(found), module, name.encode())
    _do("cuFuncSetAttribute", found.value, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    return found.value or 0


class Launcher(dict[int, Callable[[int, None], int]]):
    """By stream, what launches ``blocks`` blocks on it.

    Given the address of ``Parameters``, which it has copied by its end, and None, that returns a CUresult; one that is
    not 0 is for ``check``. A call of the launcher does both, with a frame of Python's, which takes a microsecond in the
    thread of torch's engine. Before the first launch it is empty, and so false. ``beside``: without waiting for the end
    of the launch before, which is programmatic dependent launch.
    """

    def __init__(self, function: int, blocks: int, threads: int, shared: int, *, beside: bool = False) -> None:
        super().__init__()
        self._function = function
        self._config = (blocks, 1, 1), (threads, 1, 1), shared
        self._attributes = ctypes.pointer(_OVERLAPS), int(beside)

    def __missing__(self, stream: int) -> Callable[[int, None], int]:
        if len(self) >= _STREAMS:
            self.clear()
        config = _Config(*self._config, stream, *self._attributes)
        launch: Any = functools.partial(_library().cuLaunchKernelEx, ctypes.addressof(config), self._function)
        launch.config = config  # for as long as there is somebody who launches by it
        self[stream] = launch
        return launch  # type: ignore[no-any-return]

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch it on ``stream`` with parameters at these addresses. Raises ``DriverError``."""
        passed = Parameters(*pointers)
        if result := self[stream](ctypes.addressof(passed), None):
            self.check(result, stream, passed)

    def check(self, result: int, stream: int, passed: Any) -> None:
        """What a launch on ``stream`` with ``Parameters`` returned. Raises ``DriverError`` where it was refused."""
        launch: Any = self[stream]
        _do("cuLaunchKernelEx", *launch.args, ctypes.addressof(passed), None, result=result)


def encode(
    dtype: str, address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> tuple[int, Any]:
    """The address of a CUtensorMap of rows of 128 bytes, and what it is in; shape and box from the last axis on.

    ``strides`` are bytes, of all axes but the last, in the same order. Raises ``DriverError``.
    """
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _ALIGNED)
    at = -(-ctypes.addressof(buffer) // _ALIGNED) * _ALIGNED
    rank = len(shape)
    sizes = (ctypes.c_uint64 * rank)(*shape), (ctypes.c_uint64 * rank)(*strides)
    boxes = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
    arrays = [ctypes.addressof(array) for array in (*sizes, *boxes)]
    _do("cuTensorMapEncodeTiled", at, _TYPES[dtype], rank, address, *arrays, _INTERLEAVE, _SWIZZLE, _PROMOTION, _FILL)
    return at, buffer


def _do(name: str, *passed: Any, result: int | None = None) -> None:
    """Call ``name``, whose first ``result`` may be known already. Raises ``DriverError``."""
    call = getattr(_library(), name)
    if result is None:
        result = call(*passed)
    if result == _INVALID_CONTEXT:  # a thread that has not called CUDA yet
        from cupy_backends.cuda.api import runtime

        runtime.free(0)
        result = call(*passed)
    if result:
        said = ctypes.c_char_p()
        _library().cuGetErrorName(result, ctypes.byref(said))
        raise DriverError(f"{name}: {said.value.decode() if said.value else result}")
