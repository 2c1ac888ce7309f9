"""``triton``: the project's own kernels in Triton, for GPUs, and for the CPU in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import ClassVar

from attnswitch.machine.backend import Backend, Kernel, Precision, Regime, Tile
from attnswitch.machine.device import Device, release
from attnswitch.problem import CACHES, Problem

from ..own import regimes, requirements
from ..own.through_torch import readable
from . import config as configs
from .config import TritonConfig
from .operands import uneven

__all__ = ["TritonBackend"]

_INTERPRETER = "TRITON_INTERPRET"
#: The oldest Triton that these kernels were verified with. Several before it miscompile such kernels on Hopper
#: (triton#9433, triton#11047 and their kin).
_OLDEST = (3, 6)
#: How many times as long as over padded keys it takes over pages, with up to so many queries and with more: an H200,
#: 0.78 to 0.94 of 64 and 128 sequences, 1.2 and 1.3 of 16 and 4 (h200/bench-pages.json, h200/bench-serving.json); so
#: that it stands to ``cuda`` as it was measured to.
_DRAFT, _PAGED = 8, (0.88, 1.1)


class TritonBackend(Backend):
    """Every feature of the contract in float16, bfloat16 and float32, with memory linear in the sequence length."""

    name: ClassVar[str] = "triton"
    library: ClassVar[str] = "torch"
    builds_per_shape: ClassVar[bool] = True
    wants_seed: ClassVar[bool] = True
    varlen: ClassVar[bool] = True
    sinks: ClassVar[bool] = True
    alibi: ClassVar[bool] = True
    paged: ClassVar[bool] = True
    caches: ClassVar[tuple[str, ...]] = CACHES
    trees: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    emulation: ClassVar[Mapping[str, str]] = {_INTERPRETER: "1"}

    def unavailable(self) -> str | None:
        """For want of Triton, of a GPU that torch sees, or of an interpreter that works where that is asked for."""
        return _unavailable(_interpreted())

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """GPUs from compute capability 8.0 on; not float64, nor head dimensions past 576."""
        return _reasons(problem, device)

    def configs(self, problem: Problem, device: Device) -> Iterator[TritonConfig]:
        """See ``config``."""
        return configs.configs(problem, device)

    def regimes(self, device: Device) -> tuple[Regime, ...]:
        """Problems that are not tiny, which share no generic kernels; the interpreter would take minutes for one."""
        return () if device.kind == "cpu" else (regimes.large(("bfloat16", "float16", "float32")),)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """float32 sums; weights rounded to a 16-bit type before their products; IEEE products of float32."""
        return Precision(weights="storage", statistics="lse")

    def repeats(self, problem: Problem, device: Device) -> float:
        """See ``Backend.repeats``: what was measured has no pages, and keys padded to one length."""
        return _PAGED[problem.seq_q > _DRAFT] if problem.page else 1.0

    def compile(self, problem: Problem, device: Device, config: TritonConfig) -> Kernel:
        """The kernels for ``problem``; Triton compiles each at its first launch."""
        from .kernel import TritonKernel

        return TritonKernel(problem, device, config)

    def tiles(self, problem: Problem, device: Device, config: TritonConfig) -> tuple[Tile, ...]:
        """Of the forward, and of the gradients that are asked for; ``config.shared`` says how near the bytes are."""
        chosen = {"forward": config.forward}
        if "q" in problem.grads:
            chosen["query_gradient"] = config.query_gradient
        if "k" in problem.grads or "v" in problem.grads:
            chosen["key_gradients"] = config.key_gradients
        return tuple(
            Tile(kernel, tile.queries, tile.keys, tile.stages, configs.shared(problem, device, kernel, tile))
            for kernel, tile in chosen.items()
        )


def _reasons(problem: Problem, device: Device) -> Iterator[str]:
    if device.kind == "cpu":
        if not _interpreted():
            yield f"it runs on GPUs, and the arrays are on the CPU; {_INTERPRETER}=1 interprets it there, slowly"
            return
    elif device.kind != "cuda":
        yield f"it is written for NVIDIA GPUs, and the arrays are on {device.kind}"
        return
    elif device.capability is not None and device.capability < (8, 0):
        yield f"{device}: needs compute capability 8.0 or later"
    elif "+cpu" in (pytorch := dict(device.versions).get("torch", "")):
        yield f"torch {pytorch} was built without CUDA; install a CUDA build"
    if problem.cache == "float8_e4m3fn" and device.capability is not None and device.capability < (8, 9):
        yield f"cache={problem.cache} on {device}: Triton reads it from compute capability 8.9 on; int8 goes anywhere"
    if problem.dtype == "float64":
        yield "dtype float64: the kernels exist for float16, bfloat16 and float32"
    for name in ("dim_qk", "dim_v"):
        if (dim := getattr(problem, name)) > configs.MOST_COLUMNS:
            yield f"{name}={dim}: head dimensions are tried up to {configs.MOST_COLUMNS}"
    yield from readable(problem)
    if problem.page and (roles := set(uneven(problem)) - {"query"}):
        yield (
            f"page={problem.page}: rows of {' and '.join(sorted(roles))} do not lie in steps of 16 bytes, and a copy of"
            " the whole cache would be needed"
        )
    for reason in (requirements.countable(problem), requirements.divisible(problem), requirements.sealed(problem)):
        if reason:
            yield reason


def _interpreted() -> bool:
    """Whether Triton is to interpret the kernels in this process."""
    return os.environ.get(_INTERPRETER) == "1"


def _version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # under another name, as on Windows
        return None


@functools.cache
def _unavailable(interpreted: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install triton, which comes with torch for Linux"
    if (found := _version()) and release(found) < _OLDEST:
        return f"Triton {found}: the kernels were verified from 3.6 on; torch brings it from 2.10 on"
    if interpreted:
        return _not_interpreted()
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        return f"torch finds no NVIDIA GPU; {_INTERPRETER}=1 interprets the kernels on the CPU, to check them"
    return None


def _not_interpreted() -> str | None:
    from .kernels.probe import interpreter_fault  # of Triton, which is there

    if (fault := interpreter_fault()) is None:
        return None
    versions = f"Triton {_version()} with NumPy {metadata.version('numpy')}"
    return f"the interpreter of {versions} fails ({fault}); install an earlier NumPy or a later Triton"
