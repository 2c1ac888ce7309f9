"""Builds ahead of time: the kernels of a problem, compiled for a GPU that need not be here, and what each takes of it.

Nothing here knows a kernel's signature. The launches of a problem are recorded with stand-ins for its arrays, which
have strides and types but no memory, and Triton specialises and compiles them as it would at the first launch.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Memory, Problem

__all__ = ["Build", "Launch", "build", "builds", "launches", "pool"]

#: Matrix instructions of PTX, by the names that they go by.
_PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
#: Elements from row to row that take the offsets of a tile past 32 bits.
_FAR = 2**26


class Launch(NamedTuple):
    """One launch as the backend asks for it."""

    kernel: Any
    arguments: tuple[Any, ...]
    flags: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Build:
    """One compiled kernel: registers and spilled bytes are of a thread, shared memory is of a block, in bytes.

    ``tensor_memory`` is in columns, of the 512 that sm_100 has. ``failure`` says why there is no kernel.
    """

    kernel: str
    arch: str
    problem: str
    tile: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    tensor_memory: int = 0
    products: str = ""
    failure: str = ""


def launches(problem: Problem, device: Device, *, far: bool = False) -> list[Launch]:
    """What forward and backward of ``problem`` launch on ``device`` in the first configuration.

    ``far``: the rows of every operand lie so far apart that offsets take 64 bits.
    """
    import torch

    from . import config, run
    from .kernel import TritonKernel

    kernel = TritonKernel(problem, device, next(config.configs(problem, device)))
    inputs = _inputs(problem, far)
    found: list[Launch] = []

    def record(kernel: Any, programs: int, *arguments: Any, **flags: Any) -> None:
        found.append(Launch(kernel, arguments, flags))

    start, run.start = run.start, record
    try:
        out, lse = kernel.forward(inputs)
        if problem.grads:
            shape = (problem.batch, problem.heads_q, problem.seq_q, problem.dim_v)
            grad_out = _stand_in(shape, problem.dtype, problem.query, far)
            kernel.backward(inputs, out, lse, grad_out, torch.empty_like(lse) if problem.lse else None)
    finally:
        run.start = start
    return found


def builds(problem: Problem, device: Device, *, far: bool = False) -> Iterator[Build]:
    """Every kernel of ``problem``, compiled for ``device``; one that is launched twice is built once."""
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton interprets kernels in this process, so it compiles none; unset TRITON_INTERPRET")
    seen = set()
    with _target(device) as arch:
        for launch in launches(problem, device, far=far):
            built = _build(launch, arch, f"{problem}{' far' * far}")
            if built not in seen:
                seen.add(built)
                yield built


def build(problem: str, device: str, far: bool = False) -> list[Build]:
    """``builds`` for names in place of values: what a process of ``pool`` is asked for."""
    return list(builds(Problem.parse(problem), Device.named(device), far=far))


@contextlib.contextmanager
def pool(processes: int = 2) -> Iterator[ProcessPoolExecutor]:
    """Processes to ``build`` in, which compile everything afresh and leave nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        # Spawned, not forked: a process in which torch has begun threads does not survive a fork.
        workers = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (folder,))
        try:
            yield workers
        finally:
            workers.shutdown(cancel_futures=True)


def _begin(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ.pop("TRITON_INTERPRET", None)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def _inputs(p: Problem, far: bool) -> Inputs:
    import torch

    return Inputs(
        _stand_in((p.batch, p.heads_q, p.seq_q, p.dim_qk), p.dtype, p.query, far),
        _stand_in((p.batch, p.heads_kv, p.seq_k, p.dim_qk), p.dtype, p.key, far),
        _stand_in((p.batch, p.heads_kv, p.seq_k, p.dim_v), p.dtype, p.value, far),
        _stand_in(p.mask_shape, p.mask.dtype, p.attn_mask, far) if p.mask and p.mask_shape else None,
        torch.empty(p.batch, dtype=torch.int32, device="meta") if p.key_lengths else None,
        seed=1 if p.dropout else None,
    )


def _stand_in(shape: tuple[int, ...], dtype: str, memory: Memory, far: bool) -> Any:
    """A tensor without memory that lies as ``memory`` says."""
    import torch

    row = shape[3]
    if memory.align < 16:  # an odd number of the least step
        row += -row % 16 + max(1, memory.align // DTYPES.get(dtype, 1))
    strides = [shape[1] * shape[2] * row, shape[2] * row, row, 1]
    if far:  # the heads of all batches between one row and the next, as where the sequence is the first axis
        strides = [shape[1] * row, row, _FAR, 1]
    if memory.strided:
        strides = [2 * stride for stride in strides]
    if memory.expanded:
        strides[0] = strides[1] = 0
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")


# -- Triton ------------------------------------------------------------------------------------------------------------


class _Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return f"sm_{self.target.arch}"  # what Triton keeps a device's kernels under

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def _target(device: Device) -> Iterator[str]:
    """``device`` as the one that Triton compiles for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if device.capability is None:
        raise ValueError(f"{device}: Triton compiles for NVIDIA GPUs")
    major, minor = device.capability
    stand_in = _Driver(GPUTarget("cuda", 10 * major + minor, 32))
    before = driver._active  # ``active`` would look for a GPU
    driver.set_active(stand_in)
    try:
        yield stand_in.get_current_device()
    finally:
        driver.set_active(before)


def _build(launch: Launch, arch: str, problem: str) -> Build:
    name, tile = launch.kernel.__name__, _tile(launch.flags)
    try:
        # ptxas failing prints all of its input.
        with contextlib.redirect_stdout(io.StringIO()):
            compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.flags)
    except Exception as error:  # whatever the compiler raises is the finding
        return Build(name, arch, problem, tile, failure=f"{type(error).__name__}: {error}")
    registers, spilled = _usage(compiled.asm["cubin"])
    counts = {name: compiled.asm["ptx"].count(text) for name, text in _PRODUCTS.items()}
    return Build(
        name,
        arch,
        problem,
        tile,
        registers,
        spilled,
        compiled.metadata.shared,
        getattr(compiled.metadata, "tmem_size", 0) or 0,
        " ".join(f"{count} {name}" for name, count in counts.items() if count),
    )


def _tile(flags: dict[str, Any]) -> str:
    how = flags.get("how")
    sizes = f"{how.block_m}x{how.block_n} " if how else f"{flags['BLOCK_M']} " if "BLOCK_M" in flags else ""
    return f"{sizes}w{flags['num_warps']} s{flags.get('num_stages', 3)}"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, which is where registers spill to."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(number) for number in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", text)[:3])
    return registers, stack + local
