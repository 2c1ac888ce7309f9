"""Builds ahead of time: the kernels of a problem, compiled for a GPU that need not be here, and what each takes of it.

The launches of a problem are recorded with stand-ins for its arrays, which have strides and types but no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnswitch.errors import CompileError
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Memory, Problem

from . import config, cubin, nvrtc, run
from .config import CudaConfig
from .kernel import CudaKernel
from .tiles import Tile
from .variant import Variant

__all__ = ["Build", "build", "builds", "variants"]


@dataclass(frozen=True, slots=True)
class Build:
    """One compiled kernel: registers and bytes of local memory (spills) of a thread, shared memory of a block in bytes.

    ``failure`` says why there is no kernel.
    """

    kernel: str
    arch: str
    problem: str
    tile: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    failure: str = ""


def variants(problem: Problem, device: Device) -> list[Variant]:
    """What forward and backward of ``problem`` launch on ``device``, in that order.

    It is that of the first configuration of each family.
    """
    found: dict[Variant, None] = {}

    def record(variant: Variant, *_: Any, **__: Any) -> None:
        found[variant] = None

    start, run.start = run.start, record
    try:
        for chosen in _firsts(problem, device):
            _launch(CudaKernel(problem, chosen, device))
    finally:
        run.start = start
    return list(found)


def _firsts(problem: Problem, device: Device) -> Iterator[CudaConfig]:
    families = set()
    for chosen in config.configs(problem, device):
        if type(chosen.forward) not in families:
            yield chosen
        families.add(type(chosen.forward))
        if Tile in families:  # the last one
            return


def _launch(kernel: CudaKernel) -> None:
    """Forward and backward, on stand-ins."""
    import torch

    p = kernel.problem
    inputs = _inputs(p)
    out, lse = kernel.forward(inputs)
    if p.grads:
        grad_out = _stand_in((p.batch, p.heads_q, p.seq_q, p.dim_v), p.dtype)
        kernel.backward(inputs, out, lse, grad_out, torch.empty_like(lse) if p.lse else None)


def builds(problem: Problem, device: Device, arch: str) -> Iterator[Build]:
    """Every kernel of ``problem`` with the tiles of ``device``, compiled for ``arch``."""
    for variant in variants(problem, device):
        size = f"{variant.rows}x{variant.columns} " if variant.rows else ""
        tile = f"{size}w{variant.warps} s{variant.stages}"
        gradients = {"10": " key", "01": " value"}.get(
            "".join(str(value) for name, value in variant.flags if name.startswith("WITH_")), ""
        )
        family = "" if variant.family == "portable" else f"{variant.family} "
        named = (family + variant.kernel + gradients, arch, str(problem), tile)
        try:
            used = cubin.usage(nvrtc.cubin(variant, arch))
            yield Build(*named, used.registers, used.local, variant.shared)
        except CompileError as error:
            yield Build(*named, failure=str(error))


def build(problem: str, device: str, arch: str) -> list[Build]:
    """``builds`` for names in place of values: what another process is asked for."""
    return list(builds(Problem.parse(problem), Device.named(device), arch))


def _inputs(p: Problem) -> Inputs:
    import torch

    return Inputs(
        _stand_in((p.batch, p.heads_q, p.seq_q, p.dim_qk), p.dtype, p.query),
        _stand_in((p.batch, p.heads_kv, p.seq_k, p.dim_qk), p.dtype, p.key),
        _stand_in((p.batch, p.heads_kv, p.seq_k, p.dim_v), p.dtype, p.value),
        _stand_in(p.mask_shape, p.mask.dtype, p.attn_mask) if p.mask and p.mask_shape else None,
        torch.empty(p.batch, dtype=torch.int32, device="meta") if p.key_lengths else None,
        seed=1 if p.dropout else None,
    )


def _stand_in(shape: tuple[int, ...], dtype: str, memory: Memory | None = None) -> Any:
    """A tensor without memory that lies as ``memory`` says."""
    import torch

    memory = memory or Memory()
    row = shape[3]
    if memory.align < 16:  # an odd number of the least step
        row += -row % 16 + max(1, memory.align // DTYPES.get(dtype, 1))
    strides = [shape[1] * shape[2] * row, shape[2] * row, row, 1]
    if memory.strided:
        strides = [2 * stride for stride in strides]
    if memory.expanded:
        strides[0] = strides[1] = 0
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
