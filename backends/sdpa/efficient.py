"""``sdpa-efficient``: torch's memory-efficient kernel (CUTLASS), which takes an additive bias and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by

from attnswitch.machine.backend import Forward
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.through_torch import fits_grid
from . import biased, memory
from .backward import Given
from .base import Compose, Fit, Launch, SdpaBackend
from .operands import padded
from .reasons import ATOMIC, mask_loses_bits, needs_cuda, version

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

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """The bias, and its gradient."""
        return super().extra_bytes(problem, device) + memory.with_bias(problem)

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The operator, which before torch 2.15 misreads expanded head axes unless it computes lse (pytorch#191937)."""
        return biased.launcher(
            problem, torch._scaled_dot_product_efficient_attention, always_lse=_misread(problem, device)
        )

    def composer(self, problem: Problem, device: Device) -> Compose:
        """By one kernel, where there is Triton."""
        return biased.composer(problem, device)

    def direct(self, problem: Problem, device: Device, compose: Compose) -> Forward | None:
        """A mask, the operator, and zeros over the rows that see nothing."""
        return biased.direct(
            problem, torch._scaled_dot_product_efficient_attention, compose, always_lse=_misread(problem, device)
        )

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """Rows of multiples of 16 bytes, aligned."""
        return functools.partial(padded, multiple=4 if problem.dtype == "float32" else 8)

    def gradients(self, problem: Problem, device: Device, given: Given) -> tuple[Any, ...]:
        """The operator's backward, whose lse has room for whole tiles of 32 queries."""
        return biased.gradients(problem, given, torch._scaled_dot_product_efficient_attention, _backward)


def _misread(problem: Problem, device: Device) -> bool:
    return (problem.key.expanded or problem.value.expanded) and version(device, "torch") < (2, 15)


def _backward(problem: Problem, given: Given, added: Any, lse: Any, state: tuple[Any, Any]) -> tuple[Any, ...]:
    lse = F.pad(lse, (0, -problem.seq_q % 32), value=torch.inf)
    wanted = [letter in problem.grads for letter in "qkvm"]
    out = given.out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes it to lie as it writes it
    operands = given.grad_out, given.query, given.key, given.value, added, out, lse
    back = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    found: tuple[Any, ...] = back(*operands, *state, 0.0, wanted, given.hiding.causal, scale=problem.softmax_scale)
    return found
