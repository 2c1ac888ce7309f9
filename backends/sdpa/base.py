"""What torch's four attention operators have in common: when they are refused, and the steps around a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Backend, Backward, Config, Forward, Gradients, Inputs, Kernel, Precision, Shows
from attnswitch.machine.device import Device
from attnswitch.machine.differentiated import gradients, leaf, leaves
from attnswitch.problem import Problem

from ..own import autocast
from ..own.through_torch import no_gpu, without_padding
from . import masks
from .backward import Given
from .grouped import GroupedKernel, grouped
from .reasons import common, usual
from .trimmed import TrimmedKernel, trimmed

__all__ = ["Compose", "Fit", "Launch", "SdpaBackend", "SdpaKernel", "comes_to"]

#: How an operator is launched where that hides (see ``masks``): from query, key and value to out and lse, which may be
#: None where the problem does not ask for it.
Launch = Callable[[masks.Hiding], Forward]
#: What hides in a call, from its inputs and whether the lift is asked for.
Compose = Callable[..., masks.Hiding]
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
        """The operator's own, of which those of the device come first, then those of all four."""
        yield from self.limits(problem, device)
        if not usual(problem):
            yield from common(problem, has_lse=self.has_lse)

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """The operator's own reasons not to take ``problem`` on ``device``."""
        raise NotImplementedError

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Scores in the accumulator, weights rounded to the storage type, shared heads and masks summed in it."""
        wide = problem.dtype == "float64"
        return Precision("float64" if wide else "float32", weights="storage", group_sum="storage", statistics="lse")

    def compile(self, problem: Problem, device: Device, config: Config) -> Kernel:
        """The kernel for ``problem``, or around that of the one that it comes to (``comes_to``)."""
        fewer = trimmed(problem, device)
        if fewer is not None:
            return TrimmedKernel(self.compile(fewer, device, config), fewer.seq_k)
        as_queries = grouped(problem, device)
        if as_queries is not None:
            return GroupedKernel(self.compile(as_queries, device, config), problem)
        return self.kernel(problem, device)

    def kernel(self, problem: Problem, device: Device) -> Kernel:
        """The kernel for a problem that comes to no other."""
        return SdpaKernel(self, problem, device)

    def plain(self, problem: Problem, device: Device) -> masks.Hiding:
        """What hides in a problem that needs no mask, which is the same in every call."""
        return masks.compose_plain(problem)

    def composer(self, problem: Problem, device: Device) -> Compose:
        """What hides in a call of a problem that needs a mask; ``lifted`` asks for the lift, lse or not."""
        return functools.partial(masks.compose, problem)

    def shown(self, problem: Problem, device: Device) -> Shows:
        """What the operator's results show of NaN and inf, in a problem without gradients."""
        return Shows.NOWHERE

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The function that calls the operator, on operands that fit."""
        raise NotImplementedError

    def direct(self, problem: Problem, device: Device, compose: Compose) -> Forward | None:
        """The operator on operands that fit and a mask, where that is all that there is to do; None where it is not."""
        return None

    def fitting(self, problem: Problem, device: Device) -> Fit:
        """The function that makes query, key and value fit the operator."""
        return _as_it_is

    def lse(self, problem: Problem, inputs: Inputs) -> Any:
        """The lse, where the operator returns none."""
        raise NotImplementedError

    def gradients(self, problem: Problem, device: Device, given: Given) -> tuple[Any, ...]:
        """Gradients of query, key, value and mask, by the operator's backward or what stands in for it."""
        raise NotImplementedError


def comes_to(problem: Problem, device: Device) -> Problem:
    """What ``problem`` is computed as: with fewer keys, with query heads as queries, or as it is."""
    other = trimmed(problem, device) or grouped(problem, device)
    return problem if other is None else comes_to(other, device)


def _as_it_is(operand: Any) -> Any:
    return operand


class SdpaKernel(Kernel):
    """Hide, launch, and give rows that see nothing what the contract says."""

    def __init__(self, backend: SdpaBackend, problem: Problem, device: Device) -> None:
        self.backend, self.problem, self.device = backend, problem, device
        self.launch, self.fit = backend.launcher(problem, device), backend.fitting(problem, device)
        #: Kind of device, where that has autocast regions.
        self.autocasts = autocast.available(device.kind)
        #: Whether nothing is attended from, or to.
        self.nothing = not (problem.batch and problem.seq_q and problem.seq_k)
        #: What hides where no mask is needed; None where one is.
        self.plain: Any = None if self.nothing or problem.needs_mask else backend.plain(problem, device)
        #: The reverse.
        self.compose: Any = None if self.nothing or self.plain is not None else backend.composer(problem, device)
        if not (self.nothing or problem.grads):
            self.shows = backend.shown(problem, device)

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output, differentiable by torch, and lse where the problem asks for it or it shows something."""
        p, kind = self.problem, self.autocasts
        if kind is not None and torch.is_autocast_enabled(kind):  # it would cast the operands, and so the result
            return autocast.shielded(kind, self.forward, inputs)
        if self.nothing:
            return _empty(p, inputs)
        if self.compose is None:
            return self._launched(inputs, self.plain)
        inputs = without_padding(inputs)
        hiding = self.compose(inputs)
        out, lse = self._launched(inputs, hiding)
        if hiding.dead is not None:
            out = out.masked_fill(hiding.dead, 0.0) if p.grads else out.masked_fill_(hiding.dead, 0.0)
        if hiding.lift is not None and lse is not None:
            lse = lse + hiding.lift
        return out, lse

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward``; the operator alone, where these fit it as they are and there is no autocast now."""
        if self.nothing or (self.autocasts is not None and torch.is_autocast_enabled(self.autocasts)):
            return super().prepared(inputs)
        if any(self.fit(operand) is not operand for operand in inputs[:3]):
            return super().prepared(inputs)
        if self.plain is not None:
            return self.launch(self.plain)
        direct = None
        if not self.problem.key_lengths:  # what lies past them is taken out first
            direct = self.backend.direct(self.problem, self.device, self.compose)
        return direct or super().prepared(inputs)

    def _launched(self, inputs: Inputs, hiding: masks.Hiding) -> tuple[Any, Any]:
        """The operator's answer, without what makes the operands fit, and without an lse that nobody asked for."""
        p = self.problem
        query, key, value = (self.fit(operand) for operand in inputs[:3])
        out, lse = self.launch(hiding)(query, key, value)
        if out.shape[-1] != p.dim_v:
            out = out[..., : p.dim_v]
        return out, lse if p.lse or self.shows is not Shows.NOWHERE else None

    @functools.cached_property
    def _stating(self) -> SdpaKernel:
        """The kernel of the same problem that returns its lse, and of which torch keeps no graph."""
        return SdpaKernel(self.backend, self.problem.replace(lse=True, grads=""), self.device)

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse, by the operator that returns both, or by two."""
        with torch.no_grad():
            out, lse = self._stating.forward(inputs)
            if lse is None:
                with torch.autocast(self.device.kind, enabled=False):
                    lse = self.backend.lse(self._stating.problem, inputs)
        return out, lse

    def prepared_results(self, inputs: Inputs) -> Forward:
        """Of the operator that returns both, what it has prepared."""
        if self.backend.has_lse:
            return self._stating.prepared(inputs)
        return lambda query, key, value, attn_mask=None: self.results(Inputs(query, key, value, attn_mask))

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients for callers without autograd: by the operator's backward where output and lse are given.

        They may be of more keys than ``inputs`` has. Else the forward runs again, through torch's autograd. A gradient
        of lse is refused, as no operator takes one.
        """
        if grad_lse is not None:
            raise Unsupported("grad_lse: torch's operators have no gradient of their lse")
        kind = self.autocasts
        if kind is not None and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.backward(inputs, out, lse, grad_out, grad_lse)
        if out is None or lse is None or self.nothing:
            return self._again(inputs, grad_out)
        with torch.no_grad():
            return self._from_results(inputs, out, lse, grad_out)

    def prepared_backward(self, inputs: Inputs) -> Backward:
        """``backward``; the operator's alone, where these fit it as they are, nothing hides and torch takes no note."""
        watched = torch.is_grad_enabled() or (self.autocasts is not None and torch.is_autocast_enabled(self.autocasts))
        if self.plain is None or self.problem.dropout or watched:
            return self.backward
        if any(self.fit(operand) is not operand for operand in inputs[:3]):
            return self.backward

        def backward(inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
            if grad_lse is not None:
                return self.backward(inputs, out, lse, grad_out, grad_lse)
            given = Given(*inputs[:3], self.plain, self.fit(out), lse, self.fit(grad_out), self.launch)
            return self._shaped(self.backend.gradients(self.problem, self.device, given))

        return backward

    def _again(self, inputs: Inputs, grad_out: Any) -> Gradients:
        with torch.inference_mode(mode=False), torch.enable_grad():
            again = leaves(inputs, self.problem.grads)
            result, _ = self.forward(again)
            return gradients(again, self.problem.grads, [result], [leaf(grad_out)])

    def _from_results(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any) -> Gradients:
        p = self.problem
        if p.dropout:
            raise Unsupported(
                f"dropout_p={p.dropout}: torch's operators keep the state of their generator to themselves"
            )
        inputs = without_padding(inputs)
        hiding = self.plain if self.compose is None else self.compose(inputs, lifted=True)
        query, key, value = (self.fit(operand) for operand in inputs[:3])
        out, grad_out = (self.fit(x.to(query.dtype)) for x in (out, grad_out))
        given = Given(query, key, value, hiding, out, lse, grad_out, self.launch)
        return self._shaped(self.backend.gradients(p, self.device, given))

    def _shaped(self, grads: tuple[Any, ...]) -> Gradients:
        """Those that the problem asks for, without what made the operands fit."""
        p = self.problem
        cut = zip(grads[:3], (p.dim_qk, p.dim_qk, p.dim_v), strict=True)
        shaped = (*(x if x.shape[-1] == width else x[..., :width] for x, width in cut), grads[3])
        return Gradients(*(x if letter in p.grads else None for letter, x in zip("qkvm", shaped, strict=True)))


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
