"""``cuda``: the project's own kernels in CUDA C++, for NVIDIA GPUs, and for the CPU in an emulator."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from attnswitch import files
from attnswitch.machine.backend import Backend, Packed, Precision, Progress, Regime
from attnswitch.machine.backend import Tile as OnChip
from attnswitch.machine.device import Device
from attnswitch.problem import CACHES, DTYPES, Problem
from attnswitch.problem.cost import STATISTIC

from ..own import requirements
from . import config, families
from .config import CudaConfig
from .families import WIDEST, against_hopper, against_hopper_backward, against_latent, beside_hopper, is_hopper
from .fused import tiles as fused_tiles
from .fused.tiles import FusedTile
from .hopper import choice as hopper_choice
from .hopper import tiles as hopper_tiles
from .hopper.tiles import HopperGradients, HopperTile, LatentTile
from .launching import emulator
from .portable import sequences
from .portable import tiles as portable_tiles
from .portable.tiles import Tile

if TYPE_CHECKING:
    from .compiling.variant import Variant
    from .kernel import CudaKernel

__all__ = ["CudaBackend"]

#: Positions and their differences are held in 32 bits.
_MOST_POSITIONS = 2**29


class CudaBackend(Backend):
    """Every feature of the contract in every type, with memory linear in the sequence length."""

    name: ClassVar[str] = "cuda"
    library: ClassVar[str] = "torch"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "cupy", "numpy")
    builds_per_shape: ClassVar[bool] = True
    wants_seed: ClassVar[bool] = True
    varlen: ClassVar[bool] = True
    sinks: ClassVar[bool] = True
    alibi: ClassVar[bool] = True
    paged: ClassVar[bool] = True
    caches: ClassVar[tuple[str, ...]] = CACHES
    trees: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    emulation: ClassVar[Mapping[str, str]] = {emulator.VARIABLE: "1"}

    def unavailable(self) -> str | None:
        """For want of CuPy, or of a GPU that it sees; or of a compiler where it is to be emulated."""
        return emulator.unavailable() if emulator.is_wanted() else _unavailable()

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """GPUs from compute capability 7.5 on, for 16-bit types from 8.0 on; head dimensions to 256, on 9.0 to 576."""
        return _reasons(problem, device)

    def configs(self, problem: Problem, device: Device) -> Iterator[CudaConfig]:
        """See ``config``."""
        return config.configs(problem, device)

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """Of Hopper's kernels, sums of gradients, and a copy of a float mask that they do not read as it is."""
        p, extra = problem, super().extra_bytes(problem, device)
        if p.grads and not against_hopper_backward(p, device):
            extra = max(extra, hopper_choice.most_saved(sequences.launched(p), device) * STATISTIC)
        if not hopper_tiles.copies_mask(p) or against_hopper(p, device):
            return extra
        b, h, q, k = p.mask_shape or (0, 0, 0, 0)
        return extra + b * h * q * -(-k // 8) * 16

    def tiles(self, problem: Problem, device: Device, config: CudaConfig) -> tuple[OnChip, ...]:
        """Of the forward, and of those gradients that ``problem`` asks for; "key_gradients" are also of values."""
        asked = {"key_gradients": "kv", "query_gradient": "q", "mask_gradient": "m"}
        if config.backward is not None:
            asked = {"backward": "qkv"}
        roles = ["forward", *(role for role, letters in asked.items() if set(letters) & set(problem.grads))]
        tiles = ((role, getattr(config, role)) for role in roles)
        return tuple(
            OnChip(role, tile.queries, tile.keys, tile.stages, _shared(role, tile, problem)) for role, tile in tiles
        )

    def remarks(self, problem: Problem, device: Device, config: str) -> tuple[str, ...]:
        """Which families' kernels these are, and why they are not Hopper's; or that they are generic."""
        if device.kind != "cuda":
            return ()
        configs = self.configs(problem, device)
        first = next(configs)
        chosen = next((c for c in (first, *configs) if str(c) == config), first) if config else first
        if isinstance(chosen.forward, Tile) and chosen.forward.generic:
            return (f"forward by generic kernels, which tiny problems share, {chosen.forward}",)
        tiles = {"forward": chosen.forward, "backward": chosen.backward or chosen.key_gradients}
        reasons = {"forward": against_hopper, "backward": against_hopper_backward}
        roles = ("forward", *(("backward",) if problem.grads else ()))
        said = [_remark(role, tiles[role], reasons[role](problem, device), is_hopper(device)) for role in roles]
        if problem.grads and chosen.backward is not None and hopper_tiles.ordered(problem):
            said[-1] += "; blocks add to dQ in turn, so that gradients repeat their bits"
        return tuple(said)

    def regimes(self, device: Device) -> tuple[Regime, ...]:
        """See ``families``."""
        return families.regimes(device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Sums in float32, float64 for float64; weights rounded to a 16-bit type before their products; no TF32."""
        wide = problem.dtype == "float64"
        return Precision("float64" if wide else "float32", weights="storage", statistics="lse")

    def repeats(self, problem: Problem, device: Device) -> float:
        """What was measured is of Hopper's kernels where those take a problem, and they refuse some forms of it.

        Nor had it pages: those that hold no whole tile of keys come on top.
        """
        times = beside_hopper(problem, device)
        if not problem.page:
            return times
        tile = next(self.configs(problem, device)).forward
        if not isinstance(tile, Tile):
            return 1.0
        return (portable_tiles.BESIDE_PADDED if times == 1.0 else times) * portable_tiles.scattered(problem, tile)

    def compile(self, problem: Problem, device: Device, config: CudaConfig) -> CudaKernel:
        """The kernels for ``problem``; NVRTC compiles those of a first call side by side, if the cache has none."""
        from .kernel import CudaKernel

        return CudaKernel(problem, config, device)

    def toolchain(self, device: Device) -> Mapping[str, str]:
        """See ``compiling.cubins``; nothing of an emulator, nor of a GPU that is not here."""
        from .compiling import cubins

        if device.kind != "cuda" or device.capability is None or not device.present:
            return {}
        compiler = cubins.compiler(device.capability)
        return {} if compiler is None else {"kernels": compiler}

    def pack(self, devices: Sequence[Device], folder: Path | None, progress: Progress) -> Iterator[Packed]:
        """See ``compiling.ahead``."""
        from .compiling import ahead

        yield from ahead.pack(ahead.variants(devices, _refused, _launched), folder, progress)


_AnyTile: TypeAlias = Tile | HopperTile | LatentTile | HopperGradients | FusedTile


def _shared(role: str, tile: _AnyTile, problem: Problem) -> int:
    """Bytes of shared memory that a block of the kernel with that role takes."""
    if isinstance(tile, HopperTile):
        return hopper_tiles.shared(tile, problem)
    if isinstance(tile, LatentTile):
        return hopper_tiles.latent_shared(problem, tile)
    if isinstance(tile, HopperGradients):
        return hopper_tiles.gradients_shared(tile, problem)
    if isinstance(tile, FusedTile):
        return fused_tiles.shared(tile, problem)
    return portable_tiles.shared(role, tile, problem)


def _remark(role: str, tile: _AnyTile, reasons: tuple[str, ...], hopper: bool) -> str:
    """Which family's kernel has that role, and on a Hopper why it is not Hopper's."""
    if isinstance(tile, FusedTile):
        return f"{role} in one pass, {tile}"
    if not isinstance(tile, Tile):
        return f"{role} by Hopper's kernel, {tile}"
    if not hopper:
        return f"{role} by a portable kernel, {tile}"
    why = "; ".join(reasons or (f"{tile} was faster here",))
    return f"{role} by the portable kernels, not by Hopper's ({why})"


def _reasons(problem: Problem, device: Device) -> Iterator[str]:
    taken = True
    for reason in _refused(problem, device):
        taken = False
        yield reason
    if taken and device.kind == "cuda" and device.present and (why := _uncompiled(problem, device)):
        yield why


def _refused(problem: Problem, device: Device) -> Iterator[str]:
    if device.kind == "cpu":
        if not emulator.is_wanted():
            yield f"it runs on GPUs, and the arrays are on the CPU; {emulator.VARIABLE}=1 emulates it there, slowly"
            return
    elif device.kind != "cuda":
        yield f"it is written for NVIDIA GPUs, and the arrays are on {device.kind}"
        return
    elif device.capability is not None and device.capability < (7, 5):
        yield f"{device}: needs compute capability 7.5 or later"
    elif device.capability is not None and device.capability < (8, 0) and DTYPES[problem.dtype] == 2:
        yield f"{device}: {problem.dtype} is multiplied by instructions of compute capability 8.0 and later"
    for name in ("dim_qk", "dim_v"):
        if (dim := getattr(problem, name)) > WIDEST and (why := against_latent(problem, device)):
            yield f"{name}={dim}: a head dimension of at most {WIDEST} fits a tile; Hopper's of wide heads: {why[0]}"
            break
    if (positions := problem.seq_q + problem.seq_k) > _MOST_POSITIONS:
        yield f"{positions} queries and keys: positions are counted to {_MOST_POSITIONS}"
    for role in ("query", "key", "value", "attn_mask"):
        if reason := requirements.aligned(problem, role):
            yield reason
    launched = sequences.launched(problem)
    for reason in (requirements.countable(launched), requirements.divisible(problem), requirements.sealed(problem)):
        if reason:
            yield reason


def _uncompiled(problem: Problem, device: Device) -> str | None:
    """Why there is no kernel where nothing can be compiled: packs hold those of usual problems."""
    from .compiling import cubins, nvrtc

    if nvrtc.known() or device.capability is None or _unavailable() is not None:
        return None
    why = cubins.missing(_launched(problem, device), device.capability)
    return why and f"no pack has its kernels: {why}"


def _launched(problem: Problem, device: Device) -> tuple[Variant, ...]:
    """The kernels of its first config."""
    from .kernel import CudaKernel

    return CudaKernel(problem, next(config.configs(problem, device)), device).variants()


@functools.cache
def _unavailable() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed; pip install attnswitch[cuda13], or attnswitch[cuda12] for drivers of CUDA 12"
    if why := _no_gpu():
        return f"{why}; {emulator.VARIABLE}=1 emulates the kernels on the CPU, to check them"
    from .compiling import nvrtc, packs

    return None if packs.any_there() else nvrtc.unavailable()


def _no_gpu() -> str | None:
    """Why neither torch nor CuPy has a GPU."""
    import torch

    if torch.version.cuda is not None:
        return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"
    try:  # CuPy's arrays need no torch with CUDA; without a driver there is no need to import it
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        files.house_cupy()
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # each part of CUDA that is missing or too old has its own way to fail
        return f"CuPy finds no NVIDIA GPU ({error})"
    return None if count else "CuPy finds no NVIDIA GPU"
