"""Where the cubin of a kernel comes from: a pack, what this machine compiled before, or NVRTC, in that order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from attnswitch.errors import CompileError

from . import nvrtc, packs
from .variant import Variant

__all__ = ["compiler", "cubins", "missing", "obtainable", "packed"]

Capability = tuple[int, int]


def cubins(variant: Variant, capability: Capability) -> Iterator[bytes]:
    """The kernel for a GPU of ``capability``, best first: a driver may be older than the compiler of a pack.

    Raises ``CompileError`` where nothing more can be had.
    """
    for family in nvrtc.architectures(capability):
        if packs.there(family):
            found = packs.kernel(family, nvrtc.digest(variant, family))
            if found is not None:
                yield found
    if why := nvrtc.unavailable():
        raise CompileError(f"{variant}: {why}")
    arch = nvrtc.architecture(capability)
    if arch is None:
        raise CompileError(
            f"{variant} for compute capability {capability[0]}.{capability[1]}: {nvrtc.full_name()} compiles for none"
            " that it runs; install a CuPy for the CUDA of the driver, with its NVRTC"
        )
    yield nvrtc.cubin(variant, arch)


def compiler(capability: Capability) -> str | None:
    """Whose the kernels for a GPU of ``capability`` are: by the packs of these sources, else NVRTC; None without any.

    Kernels of the same sources and options by the same compiler are the same, wherever they come from: a pack that
    grows, or comes where NVRTC had compiled its kernels, changes nothing. Beside a pack NVRTC is not asked, which would
    load it: its package's version is known anyway.
    """
    found = [packs.compilers(arch, nvrtc.headers()) for arch in nvrtc.architectures(capability)]
    packed = dict.fromkeys(name for each in found for name in each)
    if packed:
        return ", ".join(packed)
    return None if nvrtc.unavailable() else nvrtc.full_name()


def obtainable(arch: str) -> bool:
    """Whether kernels for ``arch`` can be had here: by NVRTC where it is known, or as far as a pack goes."""
    if not nvrtc.known() and packs.there(arch):
        return True
    return nvrtc.unavailable() is None and nvrtc.honours(arch)


def missing(variants: Iterable[Variant], capability: Capability) -> str | None:
    """Why one of ``variants`` cannot be had; None if all can. NVRTC is loaded if a pack lacks one, and not before."""
    if nvrtc.known() or all(packed(variant, capability) for variant in variants):
        return None
    return nvrtc.unavailable()


@functools.cache
def packed(variant: Variant, capability: Capability) -> bool:
    """Whether a pack has it."""
    return any(
        packs.there(arch) and packs.has(arch, nvrtc.digest(variant, arch)) for arch in nvrtc.architectures(capability)
    )
