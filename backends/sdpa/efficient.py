"""``sdpa-efficient``: torch's memory-efficient kernel (CUTLASS), which takes an additive bias and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from attnswitch.backend import Backend, Inputs
from attnswitch.device import Device
from attnswitch.problem import Problem

from .base import Fit, Launch, SdpaBackend
from .masks import Hiding
from .operands import bias, padded, with_aligned_gradient
from .reasons import ATOMIC, fits_grid, mask_loses_bits, needs_cuda, version

__all__ = ["EfficientBackend"]


class EfficientBackend(SdpaBackend):
    """Any head dimension, unequal ones too, and any mask, in 16-bit types and float32."""

    name: ClassVar[str] = "sdpa-efficient"

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What the CUTLASS kernel in torch does not do."""
        if elsewhere := needs_cuda(device, (5, 0)):
            yield elsewhere
            return
        allowed = (
            ("float16", "bfloat16", "float32") if (device.capability or (0, 0)) >= (8, 0) else ("float16", "float32")
        )
        if problem.dtype not in allowed:
            yield f"dtype {problem.dtype}: the kernel exists for {', '.join(allowed)} on {device.name}"
        yield from fits_grid(problem)
        yield from mask_loses_bits(problem)
        if problem.group > 1 and version(device, "torch") < (2, 15):
            yield (
                f"{problem.heads_q} query heads share {problem.heads_kv} key heads: before torch 2.15 the kernel has no"
                " grouped heads; repeat key and value"
            )
        if problem.grads and problem.deterministic:
            yield ATOMIC

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The operator."""
        return _launch

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """Rows of multiples of 16 bytes, aligned."""
        return functools.partial(padded, multiple=4 if problem.dtype == "float32" else 8)


def _launch(problem: Problem, inputs: Inputs, hiding: Hiding) -> tuple[Any, Any]:
    query, key, value = inputs[:3]
    scores = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)
    added = None if hiding.mask is None else bias(hiding.mask, query, scores)
    # The lse is always asked for: the backward needs it even where only the mask has a gradient, and without it the
    # kernel of torch before 2.15 misreads keys whose head axis is expanded (pytorch#191937).
    out, lse, *_ = torch._scaled_dot_product_efficient_attention(
        query, key, value, added, True, problem.dropout, hiding.causal, scale=problem.softmax_scale
    )
    return with_aligned_gradient(out), lse[..., : problem.seq_q] if problem.lse else None


_: type[Backend] = EfficientBackend
