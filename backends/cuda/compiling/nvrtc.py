"""CUDA C++ to a cubin by NVRTC, through CuPy's binding: kept on disk, and no GPU nor toolkit is needed.

The sources include nothing but one another, so that no header has to be found. A build is known by its sources (all of
``src`` that GPUs see), options, architecture and NVRTC's version. What NVRTC says of itself is kept as well: with that
a process that finds all its kernels compiled does not load NVRTC, which takes CuPy along and 0.2 to 0.5 seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from attnswitch import files
from attnswitch.errors import CompileError

from . import cache, sources
from .variant import Variant

__all__ = [
    "architecture",
    "architectures",
    "compiled",
    "cubin",
    "digest",
    "full_name",
    "headers",
    "honours",
    "known",
    "unavailable",
    "version",
]

_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
#: What a log ends with.
_BLANK = "\n\0 "
#: What sm_90a alone does not have.
_HOPPER_ONLY = 'extern "C" __global__ void probe() { asm volatile("wgmma.fence.sync.aligned;"); }'
#: Variables that say where libraries are.
_PATHS = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")


class Facts(NamedTuple):
    """What NVRTC says of itself: its version, the architectures that it compiles for, and whether sm_90a is whole."""

    version: tuple[int, int]
    architectures: tuple[int, ...]
    hopper: bool


def _library() -> Any:
    files.house_cupy()
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@functools.cache
def _facts() -> Facts:
    facts = _remembered()
    if facts is None:
        facts = _asked()
        _keep(_kept(), facts)
    return facts


@functools.cache
def _remembered() -> Facts | None:
    return _read(_kept())


def _kept() -> Path:
    return cache.folder() / "nvrtc.json"


def _asked() -> Facts:
    library = _library()
    major, minor = library.getVersion()
    architectures = tuple(library.getSupportedArchs())
    try:
        hopper = 90 in architectures and bool(
            _compile(_HOPPER_ONLY, ("-arch=sm_90a", *_OPTIONS), "probe.cu", "a probe")
        )
    except CompileError:
        hopper = False
    return Facts((major, minor), architectures, hopper)


def _read(path: Path) -> Facts | None:
    """What was kept, if the library is still the same, as far as can be seen without loading it."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["surroundings"] != _surroundings(kept["file"]):
            return None
        version, architectures, hopper = kept["facts"]
        return Facts((int(version[0]), int(version[1])), tuple(architectures), bool(hopper))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _keep(path: Path, facts: Facts) -> None:
    try:
        mapped = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
        loaded = next(line.split()[-1] for line in mapped if "/libnvrtc.so" in line)
        kept = {"file": loaded, "surroundings": _surroundings(loaded), "facts": facts}
        files.replace(path, json.dumps(kept).encode(), durable=False, private=True)
    except (OSError, StopIteration, ValueError):  # it is asked again next time
        pass


def _surroundings(library: str) -> list[str]:
    """Where CuPy and libraries are looked for, and when the library's file and CuPy's were last modified."""
    cupy = util.find_spec("cupy")
    written = [f"{path}:{os.stat(path).st_mtime_ns}" for path in (library, cupy.origin if cupy else None) if path]
    return [sys.prefix, *written, *(os.environ.get(name, "") for name in _PATHS)]


def known() -> bool:
    """Whether NVRTC is known to be there without loading it."""
    return bool(_facts.cache_info().currsize) or _remembered() is not None


def version() -> tuple[int, int]:
    """NVRTC's version."""
    return _facts().version


def full_name() -> str:
    """NVRTC with its version, as messages call it."""
    return _named(version())


def _named(version: tuple[int, int]) -> str:
    return "NVRTC " + ".".join(map(str, version))


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


def honours(arch: str) -> bool:
    """Whether NVRTC compiles for ``arch``, such as "sm_80" or "sm_90a", with the instructions that only it has."""
    facts = _facts()
    return int(arch.strip("sm_a")) in facts.architectures and (arch != "sm_90a" or facts.hopper)


@functools.cache
def architecture(capability: tuple[int, int]) -> str | None:
    """What to compile for a GPU of ``capability``: its own architecture, or the nearest before it whose cubins it runs.

    None where NVRTC knows none.
    """
    return next((arch for arch in architectures(capability) if honours(arch)), None)


def architectures(capability: tuple[int, int]) -> tuple[str, ...]:
    """Those whose cubins a GPU of ``capability`` runs, its own first: sm_86 and sm_80; sm_90a and sm_90."""
    major, minor = capability
    own = (f"sm_{major}{minor}a",) if major >= 9 else ()
    return *own, *(f"sm_{major}{lower}" for lower in range(minor, -1, -1))


def cubin(variant: Variant, arch: str) -> bytes:
    """The kernel of ``variant`` for ``arch``. Raises ``CompileError`` with the compiler's log."""
    return compiled(sources.of_gpus()[variant.source], arch, _macros(variant), variant.source, str(variant))


def digest(variant: Variant, arch: str) -> str:
    """By what the kernel of ``variant`` for ``arch`` is known, whatever compiles it."""
    said = (sources.of_gpus()[variant.source], f"-arch={arch}", *_OPTIONS, *_macros(variant), headers())
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


def _macros(variant: Variant) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in {**variant.sizes, **dict(variant.flags)}.items())


@functools.cache
def headers() -> str:
    """A digest of all that a source may include."""
    texts = (text for pair in sources.of_gpus().items() for text in pair)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def compiled(source: str, arch: str, options: tuple[str, ...] = (), name: str = "kernel.cu", what: str = "") -> bytes:
    """``source`` as a cubin. Raises ``CompileError`` with the compiler's log."""
    headers = sources.of_gpus()
    options = (f"-arch={arch}", *_OPTIONS, *options)
    parts = (source, *options, "nvrtc", *map(str, version()), *(text for pair in headers.items() for text in pair))
    return cache.kept(parts, ".cubin", lambda: _compile(source, options, name, what or name))


def _compile(source: str, options: tuple[str, ...], name: str, what: str) -> bytes:
    headers = sources.of_gpus()
    texts, names = (tuple(text.encode() for text in part) for part in (headers.values(), headers))
    try:
        nvrtc = _library()
        program = nvrtc.createProgram(source, name, texts, names)
    except Exception as error:  # it was there when it was last asked
        raise CompileError(f"NVRTC, which is to compile {what}, cannot be loaded: {error}") from error
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(
                f"{_named(nvrtc.getVersion())} could not compile {what} with {' '.join(options)}:"
                f" {error}\n{nvrtc.getProgramLog(program).rstrip(_BLANK)}"
            ) from None
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin + b"\0"  # CuPy takes the last byte for the end of a string, and tools refuse a file without it
    finally:
        nvrtc.destroyProgram(program)
