"""Where the cubin of a kernel comes from: a pack, what this machine compiled before, or NVRTC, in that order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from attnswitch.errors import CompileError

from . import nvrtc, packs
from .variant import Variant

__all__ = ["cubins", "missing", "obtainable", "packed"]

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
