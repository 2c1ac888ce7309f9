"""``sdpa-flash``: FlashAttention-2 on CUDA, and torch's tiled kernel on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Forward, Kernel, Precision, Shows
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.through_torch import fits_grid
from . import memory, raised
from .arguments import told
from .backward import Given, no_state, relative
from .base import Compose, Fit, Launch, SdpaBackend, comes_to
from .hooks import once_differentiable, with_aligned_gradient
from .kept import kept
from .masks import Hiding, added, compose_plain, ends, unsaturated
from .operands import dense_rows, padded
from .reasons import ATOMIC, needs_cuda, needs_half, stands_aside

__all__ = ["FlashBackend"]

#: Most keys that torch's CPU kernel takes at once.
_CPU_VECTOR = 16


class FlashBackend(SdpaBackend):
    """torch's FlashAttention: no mask on CUDA, equal head dimensions."""

    name: ClassVar[str] = "sdpa-flash"
    on_cpu: ClassVar[bool] = True

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What FlashAttention-2 in torch, or torch's CPU kernel, does not do."""
        on_cpu = device.kind == "cpu"
        if not on_cpu and (elsewhere := needs_cuda(device, (8, 0))):
            yield elsewhere
            return
        if not on_cpu and (other := stands_aside()):
            yield other
        if problem.dim_qk != problem.dim_v:
            yield f"head dimensions {problem.dim_qk} and {problem.dim_v} differ: the kernel has one for both"
        yield from _cpu_limits(problem) if on_cpu else _cuda_limits(problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """On the CPU, 16-bit types go through a faster exponential, unless they are raised to float32.

        A caller without autograd asks for gradients apart from the output, which may then be of another kernel.
        """
        both = problem, problem.replace(grads="")
        if all(raised.is_raised(comes_to(each, device), device) for each in both):
            return Precision(statistics="lse")
        precision = super().precision(problem, device)
        if device.kind == "cpu" and problem.dtype in ("float16", "bfloat16"):
            return replace(precision, exp=2.0**-13)  # 1.17e-4 measured with torch 2.11 and 2.15
        return precision

    def kernel(self, problem: Problem, device: Device) -> Kernel:
        """The kernel for ``problem``, or that of the same one in float32."""
        if not raised.is_raised(problem, device):
            return super().kernel(problem, device)
        return raised.RaisedKernel(super().kernel(problem.replace(dtype="float32"), device), problem)

    def plain(self, problem: Problem, device: Device) -> Hiding:
        """With a mask of zeros, one number of memory, where the CPU kernel would pass NaN by without.

        Its maximum over a row is blind to NaN in the last few keys of a tile, fewer than a vector, and a tile whose
        maximum is -inf is left out. What comes through a mask goes by another maximum, which sees it.
        """
        hiding = compose_plain(problem)
        blind = problem.seq_k % _CPU_VECTOR or hiding.causal
        if device.kind == "cpu" and problem.seq_k > raised.KEYS and blind and not problem.grads:
            zero = ends(_type(problem))[0]
            return hiding._replace(mask=zero.expand(1, 1, problem.seq_q, problem.seq_k))
        return hiding

    def composer(self, problem: Problem, device: Device) -> Compose:
        """The CPU kernel adds a mask of the operands' type or of float32; beside float64 it misreads that."""
        return kept(problem, functools.partial(added, problem, _mask_types(problem)))

    def shown(self, problem: Problem, device: Device) -> Shows:
        """On the CPU the lse shows what is lost, and what leaks from a hidden key; the output, from a hidden value."""
        if device.kind != "cpu":
            return Shows.NOWHERE
        return Shows.EITHER if problem.needs_mask or (problem.causal and not problem.sees_all) else Shows.LSE

    def direct(self, problem: Problem, device: Device, compose: Compose) -> Forward | None:
        """A mask of the CPU kernel's, with nothing beside it."""
        p = problem
        if device.kind != "cpu" or p.mask is None or p.irregular or p.lse or (p.causal and not p.sees_all):
            return None
        call = told(torch._scaled_dot_product_flash_attention_for_cpu, problem, False)
        if p.mask.is_bool:
            zero, hidden = ends(_type(problem))

            def launched(query: Any, key: Any, value: Any, attn_mask: Any) -> tuple[Any, Any]:
                found: tuple[Any, Any] = call(query, key, value, attn_mask=torch.where(attn_mask, zero, hidden))
                return found

            return _once(launched) if p.grads else launched
        if p.grads or getattr(torch, p.mask.dtype) not in _mask_types(problem):
            return None
        end = _mask_types(problem)[-1]
        return lambda query, key, value, attn_mask: call(query, key, value, attn_mask=unsaturated(attn_mask, end))

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """The mask that is made of what hides, and operands that are raised."""
        problem = comes_to(problem, device)
        if raised.is_raised(problem, device):
            return self.extra_bytes(problem.replace(dtype="float32"), device) + raised.extra_bytes(problem)
        kinds = (problem.dtype,) if problem.dtype == "float64" else (problem.dtype, "float32")
        return super().extra_bytes(problem, device) + (memory.composed(problem, kinds) if device.kind == "cpu" else 0)

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The operator of the device."""
        return _on_cpu(problem) if device.kind == "cpu" else _on_cuda(problem)

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """Dense rows on the CPU; multiples of 8, aligned, on CUDA."""
        return dense_rows if device.kind == "cpu" else functools.partial(padded, multiple=8)

    def gradients(self, problem: Problem, device: Device, given: Given) -> tuple[Any, ...]:
        """The operator's backward."""
        query, key, value, hiding, out, _, grad_out, _ = given
        if hiding.share is not None:
            grad_out = _scaled(grad_out, hiding.share)
        operands = grad_out, query, key, value, out, relative(given, renewed=problem.adds_mask)
        scale, aten = problem.softmax_scale, torch.ops.aten
        if device.kind == "cpu":
            back = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return *back(*operands, 0.0, hiding.causal, attn_mask=hiding.mask, scale=scale), None
        lengths = None, None, problem.seq_q, problem.seq_k
        back = aten._scaled_dot_product_flash_attention_backward
        return *back(*operands, *lengths, 0.0, hiding.causal, *no_state(query.device), scale=scale), None


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


def _type(problem: Problem) -> torch.dtype:
    return getattr(torch, problem.dtype)  # type: ignore[no-any-return]


def _mask_types(problem: Problem) -> tuple[torch.dtype, ...]:
    return (torch.float64,) if problem.dtype == "float64" else (_type(problem), torch.float32)


def _on_cpu(problem: Problem) -> Launch:
    def launch(hiding: Hiding) -> Forward:
        call = told(torch._scaled_dot_product_flash_attention_for_cpu, problem, hiding.causal)
        if hiding.mask is not None:
            call = functools.partial(call, attn_mask=hiding.mask)
        return _once(call, hiding.share) if problem.grads else call

    return launch


def _once(call: Forward, share: Any = None) -> Forward:
    """``call``, whose output has first derivatives only, and gradients scaled by ``Hiding.share``."""

    def launched(*operands: Any) -> tuple[Any, Any]:
        results = call(*operands)
        once_differentiable(results[0])
        node = results[0].grad_fn
        if share is not None and node is not None:  # within the operator: the output's own gradient stays as it is
            node.register_prehook(lambda grads: (_scaled(grads[0], share), *grads[1:]))
        return results

    return launched


def _scaled(grad: Any, share: Any) -> Any:
    return None if grad is None else (grad * share).to(grad.dtype)


def _on_cuda(problem: Problem) -> Launch:
    def launch(hiding: Hiding) -> Forward:
        call = told(torch._scaled_dot_product_flash_attention, problem, hiding.causal)
        if not problem.grads:
            return lambda query, key, value: call(query, key, value)[:2]

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            results = call(query, key, value)
            return with_aligned_gradient(results[0]), results[1]

        return launched

    return launch
