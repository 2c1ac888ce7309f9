"""What the backends of installed libraries share: when they are chosen, how operands and results are adapted."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from attnswitch.errors import CompileError, Unsupported
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel, Precision, Standing
from attnswitch.machine.device import Device
from attnswitch.machine.differentiated import gradients, leaf, leaves
from attnswitch.problem import Problem

from ..own.through_torch import no_gpu
from . import takes
from .package import Package
from .takes import Takes

__all__ = ["Attend", "InstalledBackend", "InstalledKernel", "called", "edges_of", "of_rows", "rows_of", "turned"]

#: Output (B, Hq, Lq, Dv), and lse (B, Hq, Lq) where it is asked for, of inputs that fit.
Attend = Callable[[Inputs, bool], tuple[Any, Any]]


class InstalledBackend(Backend):
    """A library on NVIDIA GPUs that torch differentiates. It is chosen once this machine has verified and timed it."""

    library: ClassVar[str] = "torch"
    autograd: ClassVar[bool] = True
    restarts: ClassVar[bool] = False
    package: ClassVar[Package]
    takes: ClassVar[Takes]

    def unavailable(self) -> str | None:
        """What is not installed, with the command; or for want of a GPU."""
        return self.package.missing() or no_gpu()

    def standing(self, device: Device) -> Standing:
        """Nothing shipped says how fast it is, nor has it been verified on every machine."""
        return Standing.NAMED if self.approximate else Standing.TIMED

    def toolchain(self, device: Device) -> Mapping[str, str]:
        """The library's version: what was measured, or found right, holds for that alone."""
        found = self.package.version
        return {} if found is None else {self.package.distribution: found}

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """Those that follow from what it takes, then its own."""
        yield from takes.reasons(self.takes, problem, device)
        yield from self.limits(problem, device)

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What ``takes`` cannot say."""
        return iter(())

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Scores in float32, weights rounded to the storage type, gradients of shared heads summed in it."""
        return Precision(weights="storage", group_sum="storage", statistics="lse")

    def compile(self, problem: Problem, device: Device, config: Config) -> Kernel:
        """The library's call. Raises ``CompileError`` where it cannot be imported."""
        return InstalledKernel(self, problem, device, self.attend(problem, device))

    def attend(self, problem: Problem, device: Device) -> Attend:
        """The call for ``problem``; whatever follows from that is worked out here."""
        raise NotImplementedError


class InstalledKernel(Kernel):
    """Fit, call, and give rows that see nothing, and rows past the last sequence, what the contract says."""

    def __init__(self, backend: InstalledBackend, problem: Problem, device: Device, attend: Attend) -> None:
        self.backend, self.problem, self.device, self._attend = backend, problem, device, attend

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output, differentiable by torch, and the lse where the problem asks for it."""
        return self._run(inputs, self.problem.lse)

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse. Raises ``Unsupported`` where the library returns none."""
        if not self.backend.takes.lse:
            raise Unsupported(f"lse: {self.backend.takes.call} returns none")
        import torch

        with torch.no_grad():
            return self._run(inputs, True)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients by the library's autograd, which runs the forward again.

        Output and lse may be given if they are those of these operands: nothing here starts from others.
        """
        import torch

        differentiable = self.backend.takes.lse_grads
        if grad_lse is not None and not differentiable:
            raise Unsupported(f"grad_lse: the lse of {self.backend.takes.call} has no gradient")
        if self.problem.dropout and lse is not None:
            raise Unsupported(f"dropout_p={self.problem.dropout}: the library keeps its generator's state to itself")
        with torch.inference_mode(mode=False), torch.enable_grad():
            again = leaves(inputs, self.problem.grads)
            result, own = self._run(again, lse is not None or grad_lse is not None)
            if lse is not None and not torch.equal(own.detach(), lse.to(own.dtype)):
                raise Unsupported(
                    f"out and lse are those of other keys, or of another backend: {self.backend.takes.call} starts its"
                    " backward from its own; leave them out"
                )
            ends, upstream = [result], [leaf(grad_out).to(result.dtype)]
            if grad_lse is not None:
                ends, upstream = [*ends, own], [*upstream, leaf(grad_lse).to(own.dtype)]
            return gradients(again, self.problem.grads, ends, upstream)

    def _run(self, inputs: Inputs, stated: bool) -> tuple[Any, Any]:
        import torch

        kind = inputs.query.device.type
        if torch.is_autocast_enabled(kind):  # it would cast the operands, and so the result
            with torch.autocast(kind, enabled=False):
                return self._run(inputs, stated)
        if not (inputs.query.numel() and inputs.key.numel() and inputs.value.numel()):
            return _empty(self.problem, inputs, stated)
        query, key, value = (self.fit(operand) for operand in inputs[:3])
        past: Any = None
        if inputs.offsets is not None:
            past, behind = (_past(x, edges) for x, edges in zip((query, key), inputs.offsets, strict=True))
            if self.problem.grads:
                query, key, value = _kept(query, past), _kept(key, behind), _kept(value, behind)
        out, lse = self._attend(inputs._replace(query=query, key=key, value=value), stated)
        if past is not None:
            out = out.masked_fill(past[:, None], 0.0)
        if not stated:
            return out, None
        lse = lse.masked_fill(lse == math.inf, -math.inf)  # which some have where a row sees nothing
        return out, lse if past is None else lse.masked_fill(past, -math.inf)

    def fit(self, operand: Any) -> Any:
        """``operand``, or a copy where a 16-byte load from it could be misaligned."""
        step = 16 // operand.element_size()
        strides = operand.stride()
        dense = strides[-1] == 1 and operand.data_ptr() % 16 == 0
        if dense and all(stride % step == 0 and stride for stride in strides[:-1]):
            return operand
        import torch

        return operand.clone(memory_format=torch.contiguous_format)


def called(module: str, *names: str) -> list[Any]:
    """Functions of a library's module. Raises ``CompileError`` where it cannot be imported."""
    try:
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        raise CompileError(f"{module} cannot be used here: {type(error).__name__}: {error}") from error


def edges_of(inputs: Inputs) -> tuple[Any, Any]:
    """Offsets of queries and keys, beside the operands, int32; one tensor where both are one."""
    import torch

    assert inputs.offsets is not None
    first, second = inputs.offsets
    query = first.to(inputs.query.device, torch.int32).contiguous()
    return query, query if second is first else second.to(query.device, torch.int32).contiguous()


def turned(array: Any) -> Any:
    """(B, H, L, D) as (B, L, H, D), or the reverse."""
    return array.transpose(1, 2)


def rows_of(array: Any) -> Any:
    """(1, H, T, D) as (T, H, D)."""
    return array[0].transpose(0, 1)


def of_rows(array: Any) -> Any:
    """(T, H, D) as (1, H, T, D), or (T, H) as (1, H, T)."""
    return array.transpose(0, 1)[None]


def _past(operand: Any, edges: Any) -> Any:
    """Which rows of (1, H, T, D) lie past the last sequence, (T,)."""
    import torch

    return torch.arange(operand.shape[2], device=operand.device) >= edges[-1].to(operand.device)


def _kept(operand: Any, past: Any) -> Any:
    """``operand``, whose gradient is 0 in the rows that no sequence has: no kernel writes there."""
    if not operand.requires_grad:
        return operand
    view = operand.view_as(operand)
    view.register_hook(lambda grad: grad.masked_fill(past[:, None], 0.0))
    return view


def _empty(problem: Problem, inputs: Inputs, stated: bool) -> tuple[Any, Any]:
    """Nothing to attend from or to: zeros that are still a function of the operands, and lse -inf, or the sinks."""
    import torch

    query = inputs.query
    shape = query.shape[:3]
    out = query.new_zeros((*shape, problem.dim_v))
    if problem.grads:
        out = out + sum(operand[..., :0].sum() for operand in inputs[:3])
    if not stated:
        return out, None
    if inputs.sinks is None:
        return out, query.new_full(shape, -math.inf, dtype=torch.float32)
    return out, inputs.sinks.to(query.device, torch.float32)[:, None].expand(shape).contiguous()
