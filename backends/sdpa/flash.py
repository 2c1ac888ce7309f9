"""``sdpa-flash``: FlashAttention-2 on CUDA, and torch's tiled kernel on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Forward, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .arguments import told
from .base import Fit, Launch, SdpaBackend
from .masks import Hiding
from .operands import additive, dense_rows, padded, with_aligned_gradient
from .reasons import ATOMIC, fits_grid, needs_cuda, needs_half

__all__ = ["FlashBackend"]

#: Keys of a tile of torch's CPU kernel.
_CPU_TILE = 512


class FlashBackend(SdpaBackend):
    """torch's FlashAttention: no mask on CUDA, equal head dimensions."""

    name: ClassVar[str] = "sdpa-flash"
    on_cpu: ClassVar[bool] = True

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What FlashAttention-2 in torch, or torch's CPU kernel, does not do."""
        if problem.dim_qk != problem.dim_v:
            yield f"head dimensions {problem.dim_qk} and {problem.dim_v} differ: the kernel has one for both"
        if device.kind == "cpu":
            yield from _cpu_limits(problem)
        elif elsewhere := needs_cuda(device, (8, 0)):
            yield elsewhere
        else:
            yield from _cuda_limits(problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """On the CPU, 16-bit types go through a faster exponential."""
        precision = super().precision(problem, device)
        if device.kind == "cpu" and problem.dtype in ("float16", "bfloat16"):
            return replace(precision, exp=2.0**-13)  # 1.17e-4 measured with torch 2.11 and 2.15
        return precision

    def raises_mask(self, device: Device) -> bool:
        """On the CPU it is; torch misreads a float32 mask beside float64 operands."""
        return device.kind == "cpu"

    def lse_shows(self, problem: Problem, device: Device) -> bool:
        """On the CPU it does where keys are one tile and all are seen; of more, tiles of no number may be passed by."""
        return device.kind == "cpu" and problem.seq_k <= _CPU_TILE and not problem.causal

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The operator of the device."""
        return _on_cpu(problem) if device.kind == "cpu" else _on_cuda(problem)

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """Dense rows on the CPU; multiples of 8, aligned, on CUDA."""
        return dense_rows if device.kind == "cpu" else functools.partial(padded, multiple=8)


def _cpu_limits(problem: Problem) -> Iterator[str]:
    if problem.dropout:
        yield f"dropout_p={problem.dropout}: torch's CPU kernel has none"
    if "m" in problem.grads:
        yield "a gradient of attn_mask: the operator has none"


def _cuda_limits(problem: Problem, device: Device) -> Iterator[str]:
    yield from needs_half(problem)
    yield from fits_grid(problem)
    if problem.needs_mask:
        yield "attn_mask, key_lengths, window or bottom-right causal needs a mask, and the kernel takes none"
    elif problem.causal and problem.seq_q != problem.seq_k and not problem.bottom_right:
        yield f"causal with {problem.seq_q} queries, {problem.seq_k} keys: the kernel aligns the diagonal bottom-right"
    if problem.dim_qk > 256:
        yield f"head dimension {problem.dim_qk}: at most 256"
    if problem.grads:
        small_shared_memory = device.capability in ((8, 6), (8, 9), (12, 0), (12, 1))
        if small_shared_memory and (192 < problem.dim_qk <= 224 or (problem.dim_qk > 192 and problem.dropout)):
            yield f"gradients with head dimension {problem.dim_qk}: no tile fits the shared memory of {device.name}"
        if problem.deterministic:
            yield ATOMIC


def _on_cpu(problem: Problem) -> Launch:
    def launch(hiding: Hiding) -> Forward:
        call = told(torch._scaled_dot_product_flash_attention_for_cpu, problem, hiding.causal)
        if hiding.mask is None:
            return call

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            found: tuple[Any, Any] = call(query, key, value, attn_mask=additive(hiding.mask, query.dtype))
            return found

        return launched

    return launch


def _on_cuda(problem: Problem) -> Launch:
    def launch(hiding: Hiding) -> Forward:
        call = told(torch._scaled_dot_product_flash_attention, problem, hiding.causal)
        if not problem.grads:
            return lambda query, key, value: call(query, key, value)[:2]

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            found = call(query, key, value)
            return with_aligned_gradient(found[0]), found[1]

        return launched

    return launch
