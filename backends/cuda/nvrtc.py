"""CUDA C++ to a cubin by NVRTC, through CuPy's binding: kept on disk, and no GPU nor toolkit is needed.

The sources include nothing but one another, so that no header has to be found. A build is known by its sources (all of
``src`` that GPUs see), options, architecture and NVRTC's version.
"""

from __future__ import annotations

import functools
from typing import Any

from attnswitch.errors import CompileError

from . import cache, sources
from .variant import Variant

__all__ = ["architecture", "compiled", "cubin", "honours", "unavailable", "version"]

_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
#: What a log ends with.
_BLANK = "\n\0 "
#: What sm_90 alone does not have.
_HOPPER_ONLY = 'extern "C" __global__ void probe() { asm volatile("wgmma.fence.sync.aligned;"); }'


def _library() -> Any:
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version."""
    major, minor = _library().getVersion()
    return major, minor


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        version()
    except Exception as error:  # CuPy looks for the library at the first call, and each part of it can be missing
        return (
            f"NVRTC, which compiles the kernels, cannot be loaded ({type(error).__name__}: {error}); pip install"
            " attnswitch[cuda13], or attnswitch[cuda12] for drivers of CUDA 12"
        )
    return None


@functools.cache
def honours(arch: str) -> bool:
    """Whether NVRTC compiles for ``arch``, such as "sm_80" or "sm_90a", with the instructions that only it has."""
    if int(arch.strip("sm_a")) not in _library().getSupportedArchs():
        return False
    try:
        return arch != "sm_90a" or bool(compiled(_HOPPER_ONLY, arch))
    except CompileError:
        return False


@functools.cache
def architecture(capability: tuple[int, int]) -> str | None:
    """What to compile for a GPU of ``capability``: its own architecture, or the nearest before it whose cubins it runs.

    None where NVRTC knows none.
    """
    major, minor = capability
    own = f"sm_{major}{minor}a"
    if major >= 9 and honours(own):
        return own
    known = (f"sm_{major}{lower}" for lower in range(minor, -1, -1))
    return next((arch for arch in known if honours(arch)), None)


def cubin(variant: Variant, arch: str) -> bytes:
    """The kernel of ``variant`` for ``arch``. Raises ``CompileError`` with the compiler's log."""
    defines = {**variant.sizes, **dict(variant.flags)}
    options = tuple(f"-D{name}={value}" for name, value in defines.items())
    source = sources.of_gpus()[variant.source]
    return compiled(source, arch, options, name=variant.source, what=str(variant))


def compiled(source: str, arch: str, options: tuple[str, ...] = (), name: str = "kernel.cu", what: str = "") -> bytes:
    """``source`` as a cubin. Raises ``CompileError`` with the compiler's log."""
    headers = sources.of_gpus()
    options = (f"-arch={arch}", *_OPTIONS, *options)
    parts = (source, *options, "nvrtc", *map(str, version()), *(text for pair in headers.items() for text in pair))
    return cache.kept(parts, ".cubin", lambda: _compile(source, options, name, what or name)).read_bytes()


def _compile(source: str, options: tuple[str, ...], name: str, what: str) -> bytes:
    nvrtc = _library()
    headers = sources.of_gpus()
    texts, names = (tuple(text.encode() for text in part) for part in (headers.values(), headers))
    program = nvrtc.createProgram(source, name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(
                f"NVRTC {'.'.join(map(str, version()))} could not compile {what} with {' '.join(options)}:"
                f" {error}\n{nvrtc.getProgramLog(program).rstrip(_BLANK)}"
            ) from None
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin + b"\0"  # CuPy takes the last byte for the end of a string, and tools refuse a file without it
    finally:
        nvrtc.destroyProgram(program)
