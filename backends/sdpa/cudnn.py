"""``sdpa-cudnn``: cuDNN's fused attention, the fastest of torch's own on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Forward
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.through_torch import fits_grid
from . import biased, memory
from .backward import Given
from .base import Compose, Fit, Launch, SdpaBackend
from .operands import copied_if_expanded, padded
from .reasons import mask_loses_bits, needs_cuda, needs_half, version

__all__ = ["CudnnBackend"]


#: The cuDNN whose backward on Hopper was tried with all head dimensions to 256, from torch 2.11 on, and is right; torch
#: itself gives it none but 192/128 and 256/256 from 9.22.1 on (``check_cudnn_d256_bprop_head_dim`` in its sources).
_TRAINS_ALL = (9, 19)


class CudnnBackend(SdpaBackend):
    """cuDNN through torch; a plan is built for each new shape, which takes tenths of a second."""

    name: ClassVar[str] = "sdpa-cudnn"
    builds_per_shape: ClassVar[bool] = True

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What cuDNN in torch does not do."""
        if elsewhere := needs_cuda(device, (8, 0)):
            yield elsewhere
            return
        yield from needs_half(problem)
        yield from fits_grid(problem)
        yield from mask_loses_bits(problem)
        if "m" in problem.grads:
            yield "a gradient of attn_mask: cuDNN's operator has none"
        if problem.deterministic and problem.grads:
            yield "deterministic=True: its backward does not repeat its bits"
        yield from _size_limits(problem, device)

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """The bias; and sums of the query's gradient, and all that key heads share written out, with its gradients."""
        extra = super().extra_bytes(problem, device) + memory.with_bias(problem)
        return extra + memory.with_sums(problem)

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The operator."""
        return biased.launcher(problem, torch._scaled_dot_product_cudnn_attention)

    def composer(self, problem: Problem, device: Device) -> Compose:
        """By one kernel, where there is Triton."""
        return biased.composer(problem, device)

    def direct(self, problem: Problem, device: Device, compose: Compose) -> Forward | None:
        """A mask, the operator, and zeros over the rows that see nothing."""
        return biased.direct(problem, torch._scaled_dot_product_cudnn_attention, compose)

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """Multiples of 8, aligned, and nothing expanded."""
        return _fitted

    def gradients(self, problem: Problem, device: Device, given: Given) -> tuple[Any, ...]:
        """The operator's backward, whose lse has a last axis of length 1."""
        return biased.gradients(problem, given, torch._scaled_dot_product_cudnn_attention, _backward)


def _backward(problem: Problem, given: Given, added: Any, lse: Any, state: tuple[Any, Any]) -> tuple[Any, ...]:
    operands = given.grad_out, given.query, given.key, given.value, given.out, lse[..., None]
    lengths = None, None, problem.seq_q, problem.seq_k
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    scale = problem.softmax_scale
    return *back(*operands, *state, added, *lengths, 0.0, given.hiding.causal, scale=scale), None


def _size_limits(problem: Problem, device: Device) -> Iterator[str]:
    cudnn, pytorch = version(device, "cudnn"), version(device, "torch")
    hopper = device.capability == (9, 0)
    blackwell = (device.capability or (0, 0))[0] == 10
    largest = max(problem.dim_qk, problem.dim_v)
    limit = 256 if (hopper and cudnn >= (9, 10)) or (blackwell and cudnn > (9, 22) and pytorch >= (2, 15)) else 128
    if largest > limit:
        yield f"head dimension {largest}: at most {limit} on {device.name} with cuDNN {'.'.join(map(str, cudnn))}"
    dims = problem.dim_qk, problem.dim_v
    all_dims = largest <= 128 or (hopper and cudnn[:2] == _TRAINS_ALL and pytorch >= (2, 11))
    if problem.grads and not all_dims and dims not in ((192, 128), (256, 256)):
        yield f"gradients with head dimensions {dims[0]} and {dims[1]}: above 128 only 192/128 and 256/256"
    if problem.seq_k == 1:
        yield "one key: torch does not give it to cuDNN"
    if problem.seq_q == 1 and (problem.dropout or pytorch < (2, 9)):
        yield "one query: torch does not give it to cuDNN with dropout, nor at all before 2.9"
    if problem.dropout and not (problem.dropout * 16).is_integer():
        yield f"dropout_p={problem.dropout}: cuDNN rounds it to a multiple of 1/16"


def _fitted(operand: Any) -> Any:
    return copied_if_expanded(padded(operand, 8))
