"""The one place where a CUDA kernel is launched: on the GPU of the arrays, or in the emulator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from attnswitch.machine.builds import Build

from ..compiling import cubins
from ..compiling.variant import Variant
from . import driver, emulator, memory, workspace
from .arguments import Arguments
from .tensor_maps import TensorMap

__all__ = ["COUNTER", "builds", "loaded", "sender", "start"]

#: Bytes of a counter.
COUNTER = 4
#: The driver from which on overlapping launches can be captured in a graph: that of CUDA 12.3.
_OVERLAPS = 12030


def start(
    variant: Variant,
    blocks: int,
    arguments: Arguments,
    like: Any,
    maps: tuple[TensorMap, ...] = (),
    counted: bool = False,
    left: int = 0,
    *,
    beside: bool = False,
) -> None:
    """Launch ``blocks`` blocks on the current stream of ``like``, whose device is the current one, or emulate them.

    ``maps`` come before the arguments. ``counted``: its blocks take tiles from ``counter``. ``left`` is how many bytes
    blocks leave to one another, in ``parts``. ``beside``: it may begin before the end of the launch before it, where
    that one lets it, and waits itself for what it needs of it.
    """
    if blocks == 0:
        return
    if memory.on_cpu(like):
        if left:
            parts = _blank(left, like)
            arguments.parts = memory.address(parts)
        if counted:
            counter = _blank(COUNTER, like)
            arguments.counter = memory.address(counter)
        emulator.launch(variant, blocks, arguments, maps)
        return
    send = sender(variant, blocks, memory.index(like), beside=beside)
    stream = memory.stream(like)
    if counted:
        places = workspace.blank(COUNTER, like, stream)
        arguments.counter = places.address
    if left:
        places = workspace.blank(left, like, stream)
        arguments.parts = places.address
    pointers = (*(tensor_map.pointer for tensor_map in maps), ctypes.addressof(arguments))
    send(stream, *pointers)


def _blank(size: int, like: Any) -> Any:
    """``size`` bytes in which every bit is 1, for the emulator."""
    array = memory.empty((size,), like, "uint8")
    array[...] = workspace.BLANK
    return array


def sender(variant: Variant, blocks: int, index: int, *, beside: bool = False) -> driver.Launcher:
    """What launches ``blocks`` blocks on GPU ``index``, the current one.

    ``beside`` is as for ``start``. Raises ``CompileError`` and ``driver.DriverError``.
    """
    overlaps = beside and _overlaps()
    return driver.Launcher(loaded(variant, index), blocks, variant.threads, variant.shared, beside=overlaps)


@functools.cache
def _overlaps() -> bool:
    """Whether the driver lets launches overlap, in a captured graph as well."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.driverGetVersion()) >= _OVERLAPS


#: What was compiled by this process, or found compiled, for a capability; None stands for the emulator.
_built: set[tuple[Variant, tuple[int, int] | None]] = set()


def builds(variants: Sequence[Variant], capability: tuple[int, int] | None) -> list[Build]:
    """What compiles those of ``variants`` that are not known to be compiled; None stands for the emulator."""
    if capability is None:  # which is given the values of flags with a launch
        variants = [variant._replace(flags=tuple((name, 0) for name, _ in variant.flags)) for variant in variants]
    new = [variant for variant in dict.fromkeys(variants) if (variant, capability) not in _built]
    if capability is not None:
        new = [variant for variant in new if not cubins.packed(variant, capability)]
    return [functools.partial(_build, variant, capability) for variant in new]


def _build(variant: Variant, capability: tuple[int, int] | None) -> None:
    if capability is None:
        emulator.build(variant)
    else:
        next(cubins.cubins(variant, capability))
    _built.add((variant, capability))


@functools.cache
def loaded(variant: Variant, index: int) -> int:
    """The kernel on GPU ``index``, which is the current one, as the driver names it.

    Raises ``CompileError`` and ``driver.DriverError``.
    """
    from cupy_backends.cuda.api import runtime

    major, minor = (runtime.deviceGetAttribute(attribute, index) for attribute in (75, 76))  # compute capability
    kernel = driver.function(_module(variant, (major, minor)), variant.kernel, variant.shared)
    _built.add((variant, (major, minor)))
    return kernel


def _module(variant: Variant, capability: tuple[int, int]) -> int:
    """The first cubin that the driver loads: one that is older than the compiler of a pack may not know what it wrote.

    Raises ``CompileError``, and what the driver says of the last.
    """
    refused: Exception | None = None
    for cubin in cubins.cubins(variant, capability):
        try:
            return driver.load(cubin)
        except driver.DriverError as error:
            refused = error
    assert refused is not None
    raise refused
