"""The one place where a CUDA kernel is launched: on the GPU of the arrays, or in the emulator."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from attnswitch.errors import CompileError

from . import emulator, memory
from .arguments import Arguments
from .tensor_maps import TensorMap
from .variant import Variant

__all__ = ["start"]

_BY_VALUE = np.dtype(f"V{ctypes.sizeof(Arguments)}")
#: Of CUfunction_attribute.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
#: Shared memory that a block has without asking.
_UNASKED = 48 * 1024


def start(
    variant: Variant,
    blocks: int,
    arguments: Arguments,
    like: Any,
    maps: tuple[TensorMap, ...] = (),
    counter: Any = None,
) -> None:
    """Launch ``blocks`` blocks on the current stream of ``like``, whose device is the current one, or emulate them.

    ``maps`` come before the arguments. ``counter`` is zeroed first, on that stream.
    """
    if blocks == 0:
        return
    if memory.on_cpu(like):
        emulator.launch(variant, blocks, arguments)
        return
    function = _loaded(variant, _index(like))
    packed = np.frombuffer(memoryview(arguments), _BY_VALUE)  # an array of one element is passed by value
    passed = (*(tensor_map.encoded for tensor_map in maps), packed)
    stream = memory.stream(like)
    if counter is not None:
        _clear(counter, stream)
    function((blocks,), (variant.threads,), passed, shared_mem=variant.shared, stream=stream)


def _clear(array: Any, stream: Any) -> None:
    """Zero ``array`` on ``stream``; a graph that is captured has a node for it."""
    from cupy.cuda import runtime

    runtime.memsetAsync(memory.address(array), 0, array.nbytes, stream.ptr)


def _index(array: Any) -> int:
    device = array.device
    return int(device.id if hasattr(device, "id") else device.index)


@functools.cache
def _loaded(variant: Variant, index: int) -> Any:
    """The kernel on GPU ``index``, which is the current one."""
    from cupy.cuda import function
    from cupy_backends.cuda.api import driver, runtime

    from . import nvrtc

    major, minor = (runtime.deviceGetAttribute(attribute, index) for attribute in (75, 76))  # compute capability
    arch = nvrtc.architecture((major, minor))
    if arch is None:
        found = ".".join(map(str, nvrtc.version()))
        raise CompileError(
            f"{variant} for compute capability {major}.{minor}: NVRTC {found} compiles for none that it runs; install"
            " a CuPy for the CUDA of the driver, with its NVRTC"
        )
    module = function.Module()
    module.load(nvrtc.cubin(variant, arch))
    loaded = module.get_function(variant.kernel)
    if variant.shared > _UNASKED:
        driver.funcSetAttribute(loaded.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.shared)
    return loaded
