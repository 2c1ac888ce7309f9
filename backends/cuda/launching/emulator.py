"""The kernels on a CPU: the same sources, compiled by g++ against ``src/emulator``, for checking them without a GPU.

Threads of a block are fibers. Shared memory and copies under way hold NaN until they are written, and an access that no
barrier orders is an error; so is a barrier that some threads never reach.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from attnswitch.errors import CompileError

from ..compiling import cache, sources
from ..compiling.variant import Variant
from .arguments import Arguments
from .tensor_maps import EmulatedMap, TensorMap

__all__ = ["VARIABLE", "Library", "Residents", "build", "is_wanted", "launch", "load", "residents", "unavailable"]

#: The environment variable that has kernels emulated.
VARIABLE = "ATTNSWITCH_CUDA_EMULATE"
_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-DEMULATED",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-fno-stack-protector",
)
#: The emulator runs one launch at a time, and autograd calls from threads of its own.
_ONE_AT_A_TIME = threading.Lock()


class Residents(NamedTuple):
    """How many blocks run side by side, of Hopper's asynchronous kernels alone, and the seed of which one goes on."""

    blocks: int = 1
    seed: int = 0


_ALONE = Residents()
#: Set by tests; else blocks that take turns run side by side, in another way at every launch, and others one by one.
residents: Residents | None = None
_TAKING_TURNS = 3
_seeds = itertools.count()


def is_wanted() -> bool:
    """Whether this process is to emulate the kernels."""
    return os.environ.get(VARIABLE) == "1"


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be emulated here; None if they can."""
    if shutil.which("g++") is None:
        return f"{VARIABLE}=1 emulates the kernels on the CPU, which takes g++; install it"
    return None


def launch(variant: Variant, blocks: int, arguments: Arguments, maps: tuple[TensorMap, ...] = ()) -> None:
    """Run ``blocks`` blocks. Raises ``RuntimeError`` for what a GPU would do at random: races, barriers not met."""
    library = build(variant)
    operands = tuple(operand.emulated for operand in maps)
    flags = () if _fixed(variant) else tuple(value for _, value in variant.flags)
    library.run(variant.threads, blocks, arguments, variant.shared, flags, operands, residents or _residents(variant))


def _residents(variant: Variant) -> Residents:
    return Residents(_TAKING_TURNS, next(_seeds) % 2**32) if variant.kernel == "backward_ordered" else _ALONE


def build(variant: Variant) -> Library:
    """The kernel of ``variant``: a portable one is one build for all values of its flags. Raises ``CompileError``."""
    if _fixed(variant):
        return _loaded(variant, ())
    return _loaded(variant._replace(flags=()), tuple(name for name, _ in variant.flags))


def _fixed(variant: Variant) -> bool:
    """Whether flags are constants here too: Hopper's decide on shared memory and barriers."""
    return variant.family == "hopper"


class Library:
    """A kernel that was compiled for this machine."""

    def __init__(self, content: bytes, kernel: str) -> None:
        with tempfile.TemporaryDirectory() as folder:  # a file that is cut short while it runs ends the process
            path = Path(folder) / "kernel.so"
            path.write_bytes(content)
            library = ctypes.CDLL(str(path))
        self._name = kernel
        self._flags = (ctypes.c_int * 32).in_dll(library, "flags")
        self._emulate = library.emulate
        self._emulate.restype = ctypes.c_char_p

    def run(
        self,
        threads: int,
        blocks: int,
        arguments: Arguments,
        shared: int = 0,
        flags: tuple[int, ...] = (),
        maps: tuple[EmulatedMap, ...] = (),
        residents: Residents = _ALONE,
    ) -> None:
        """Run ``blocks`` blocks of ``threads`` threads with ``shared`` bytes of shared memory. Raises as ``launch``.

        The kernel's parameters are ``maps`` and ``arguments``, in this order.
        """
        parameters = (ctypes.c_void_p * (len(maps) + 1))(*map(ctypes.addressof, (*maps, arguments)))
        with _ONE_AT_A_TIME:
            self._flags[: len(flags)] = list(flags)
            wrong = self._emulate(parameters, blocks, threads, ctypes.c_size_t(shared), *residents)
        if wrong:
            raise RuntimeError(f"{self._name}, emulated: {wrong.decode()}")


@functools.cache
def _loaded(variant: Variant, flags: tuple[str, ...]) -> Library:
    defines = {**variant.sizes, **dict(variant.flags), **{name: f"flags[{n}]" for n, name in enumerate(flags)}}
    return load(variant.source, variant.kernel, defines)


def load(source: str, kernel: str, defines: Mapping[str, str | int]) -> Library:
    """The kernel of that name in the file ``source``, below ``src`` or anywhere. Raises ``CompileError``."""
    macros = (f'-DSOURCE="{source}"', f"-DENTRY={kernel}", *(f"-D{name}={value}" for name, value in defines.items()))
    own = sources.files().get(source) or Path(source).read_text()
    parts = (*_OPTIONS, *macros, own, "g++", _version(), *(text for pair in sources.files().items() for text in pair))
    return Library(cache.kept(parts, ".so", lambda: _compile(macros)), kernel)


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _compile(macros: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.so"
        main = sources.FOLDER / "emulator" / "kernel.cpp"
        ran = subprocess.run(
            ["g++", *_OPTIONS, *macros, "-I", str(sources.FOLDER), str(main), "-o", out], capture_output=True, text=True
        )
        if ran.returncode:
            raise CompileError(f"g++ could not compile for the emulator, {' '.join(macros)}:\n{ran.stderr}")
        return out.read_bytes()
