"""What torch's four attention operators have in common: when they are refused, and the steps around a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Backend, Config, Forward, Gradients, Inputs, Kernel, Precision, Shows
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from . import autocast, masks
from .reasons import no_gpu

__all__ = ["Fit", "Launch", "SdpaBackend", "SdpaKernel"]

#: How an operator is launched where that hides (see ``masks``): from query, key and value to out and lse, which may be
#: None where the problem does not ask for it.
Launch = Callable[[masks.Hiding], Forward]
#: An operand as an operator wants it: itself, or a copy.
Fit = Callable[[Any], Any]


class SdpaBackend(Backend):
    """Base of the four: torch arrays, torch's own autograd, one config."""

    library: ClassVar[str] = "torch"
    autograd: ClassVar[bool] = True
    #: Whether there is a CPU form of it.
    on_cpu: ClassVar[bool] = False
    #: Whether the operator returns its lse.
    has_lse: ClassVar[bool] = True
    divergences: ClassVar[str] = "attnswitch.backends.sdpa:divergences.toml"

    def unavailable(self) -> str | None:
        """Only for want of a GPU, where it has no CPU form."""
        return None if self.on_cpu else no_gpu()

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """Those of all four, then the operator's own."""
        yield from self._common(problem)
        yield from self.limits(problem, device)

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """The operator's own reasons not to take ``problem`` on ``device``."""
        raise NotImplementedError

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Scores in the accumulator, weights rounded to the storage type, shared heads and masks summed in it."""
        wide = problem.dtype == "float64"
        return Precision("float64" if wide else "float32", weights="storage", group_sum="storage", statistics="lse")

    def compile(self, problem: Problem, device: Device, config: Config) -> Kernel:
        """The kernel for ``problem``."""
        raised = torch.float64 if problem.dtype == "float64" else torch.float32
        mask_dtype = raised if self.raises_mask(device) else None
        empty = problem.is_empty or problem.seq_k == 0
        plain = None if problem.needs_mask or empty else masks.compose_plain(problem)
        launch, fit = self.launcher(problem, device), self.fitting(problem, device)
        shows = Shows.LSE if plain is not None and self.lse_shows(problem, device) else Shows.NOWHERE
        return SdpaKernel(problem, launch, fit, mask_dtype, plain, autocast.available(device.kind), shows)

    def raises_mask(self, device: Device) -> bool:
        """Whether a float mask is raised to the accumulator's type, rather than given in the operands'."""
        return False

    def lse_shows(self, problem: Problem, device: Device) -> bool:
        """Whether the operator's lse shows what ``Shows`` says, in a problem that needs no mask."""
        return False

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The function that calls the operator, on operands that fit."""
        raise NotImplementedError

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """The function that makes query, key and value fit the operator."""
        return _as_it_is

    def _common(self, problem: Problem) -> Iterator[str]:
        if problem.softcap:
            yield f"softcap={problem.softcap}: torch's attention has none"
        if problem.dropout and problem.seeded:
            yield "a dropout seed was given: torch draws from its own generator only; leave seed out"
        if problem.lse and not self.has_lse:
            yield "return_lse: this operator returns none"
        if problem.lse and problem.grads and self.has_lse:
            yield f"return_lse with gradients (grad={problem.grads}): the operator's lse is not differentiable"
        for role in ("query", "key", "value", "attn_mask"):
            memory = getattr(problem, role)
            if memory.negative:
                yield f"{role} runs backwards in memory: torch has no negative strides; pass a copy"
            elif memory.align < 8 and memory.align < _itemsize(problem, role):
                yield f"{role} is aligned to {memory.align} bytes only, less than one element; pass a copy"


def _as_it_is(operand: Any) -> Any:
    return operand


def _itemsize(problem: Problem, role: str) -> int:
    if role == "attn_mask":
        return 0 if problem.mask is None else DTYPES.get(problem.mask.dtype, 1)
    return DTYPES[problem.dtype]


@dataclass(frozen=True)
class SdpaKernel(Kernel):
    """Hide, launch, and give rows that see nothing what the contract says."""

    problem: Problem
    launch: Launch
    fit: Fit
    mask_dtype: torch.dtype | None
    #: What hides where no mask is needed, which is the same in every call; None where one is, or nothing is attended.
    plain: masks.Hiding | None = None
    #: Kind of device, where that has autocast regions.
    autocasts: str | None = None
    shows: Shows = Shows.NOWHERE

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output, differentiable by torch, and lse where the problem asks for it."""
        kind = self.autocasts
        if kind is not None and torch.is_autocast_enabled(kind):  # it would cast the operands, and so the result
            return autocast.shielded(kind, self.forward, inputs)
        p = self.problem
        if self.plain is not None:
            return self._launched(inputs, self.plain)
        if p.is_empty or p.seq_k == 0:
            return _empty(p, inputs)
        if p.key_lengths and inputs.query.device.type != "cpu":
            inputs = _without_padding(inputs)
        hiding = masks.compose(p, inputs, self.mask_dtype)
        out, lse = self._launched(inputs, hiding)
        if hiding.alive is not None:
            out = out.masked_fill(~hiding.alive[..., None], 0.0)
            if lse is not None:
                lse = lse if hiding.shift is None else lse + hiding.shift.to(lse.dtype)
                lse = lse.masked_fill(~hiding.alive, -torch.inf)
        return out, lse

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward``; the operator alone, where these fit it as they are and there is no autocast now."""
        plain, kind = self.plain, self.autocasts
        if plain is None or any(self.fit(operand) is not operand for operand in inputs[:3]):
            return super().prepared(inputs)
        if kind is not None and torch.is_autocast_enabled(kind):
            return super().prepared(inputs)
        return self.launch(plain)

    def _launched(self, inputs: Inputs, hiding: masks.Hiding) -> tuple[Any, Any]:
        """The operator's answer, without what makes the operands fit, and without an lse that nobody asked for."""
        p = self.problem
        query, key, value = (self.fit(operand) for operand in inputs[:3])
        out, lse = self.launch(hiding)(query, key, value)
        if out.shape[-1] != p.dim_v:
            out = out[..., : p.dim_v]
        return out, lse if p.lse else None

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients through torch's autograd, for callers without it; the forward runs again."""
        kind = self.autocasts
        if kind is not None and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.backward(inputs, out, lse, grad_out, grad_lse)
        with torch.inference_mode(mode=False), torch.enable_grad():
            operands = {letter: _leaf(x) for letter, x in zip("qkvm", inputs[:4], strict=True)}
            leaves = {letter: operands[letter].requires_grad_() for letter in self.problem.grads}
            q, k, v, mask = operands.values()
            again = Inputs(q, k, v, mask, inputs.key_lengths, inputs.seed)
            result, _ = self.forward(again)
            grads = torch.autograd.grad(result, list(leaves.values()), _leaf(grad_out), materialize_grads=True)
        found = dict(zip(leaves, grads, strict=True))
        return Gradients(*(found.get(letter) for letter in "qkvm"))


def _leaf(operand: Any) -> Any:
    """``operand`` as autograd takes it: without a graph, and none of inference mode's, which it never takes."""
    if operand is None:
        return None
    return operand.clone() if operand.is_inference() else operand.detach()


def _empty(problem: Problem, inputs: Inputs) -> tuple[Any, Any]:
    """Nothing to attend from or to: zeros that are still a function of the operands, and lse -inf."""
    q, k, v = inputs[:3]
    if problem.group > 1:
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    out = (q @ k.mT) @ v
    if "m" in problem.grads:
        out = out + inputs.attn_mask.flatten()[:0].sum()  # type: ignore[union-attr]
    lse_dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype) if problem.lse else None


def _without_padding(inputs: Inputs) -> Inputs:
    """Keys and values past the lengths zeroed in a copy: what lies there does not exist, NaN included."""
    past = torch.arange(inputs.key.shape[2], device=inputs.key.device) >= inputs.key_lengths[:, None]  # type: ignore[index]
    past = past[:, None, :, None]
    return inputs._replace(key=inputs.key.masked_fill(past, 0.0), value=inputs.value.masked_fill(past, 0.0))
