"""The way of a call with sinks, slopes, offsets or pages, which ``headwise``, ``varlen`` and ``paged`` read.

What is asked -> who is chosen, and the kernel, once for equal problems -> results. Calls that are like one before take
the way that ``alike`` knows; those of dense operands go by ``attend`` and ``launch``.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call import recording, sinks
from attnswitch.call.measuring import at_sight
from attnswitch.call.options import no_name
from attnswitch.call.run import to_caller, to_native
from attnswitch.call.seeds import drawn_seed
from attnswitch.machine.backend import Backend, Gradients, GradientsWithSinks, Inputs, Kernel, Order
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy, effective
from attnswitch.problem import Problem
from attnswitch.wisdom import view

__all__ = ["Asked", "Call", "called", "gradients", "planned", "results", "run"]


class Asked(NamedTuple):
    """What a call asks: its problem, where, and its arrays as kernels take them, (B, H, L, D)."""

    problem: Problem
    device: Device
    inputs: Inputs
    #: The library of the arrays, and one of the caller's where DLPack tells alone.
    library: str
    caller: Array | None
    #: Facts of the caller's query.
    query: Facts
    #: How the caller has the results.
    order: Order
    #: Whether the caller wants the lse.
    returns_lse: bool
    #: The sinks in the caller's dtype, and whether torch is to give their gradient: then the problem asks for the lse.
    sinks: Array | None = None
    sinks_grad: bool = False


class Call(NamedTuple):
    """What is asked, and who computes it, in arrays of ``native``."""

    asked: Asked
    backend: Backend
    kernel: Kernel
    inputs: Inputs
    native: str
    #: Whether nothing is left that could be measured at another time.
    lasting: bool = True

    def back(self, array: Array | None, native: str | None = None) -> Array | None:
        """A result as the caller's."""
        return None if array is None else self.plain(self.asked.order.like(array, self.inputs.query), native)

    def plain(self, array: Array, native: str | None = None) -> Array:
        """The same of an array that lies as the caller's do."""
        return to_caller(array, native or self.native, self.asked.library, self.asked.caller)


def called(asked: Asked, backend: str | None, policy: Policy | str | None, *, restarts: bool = False) -> Call:
    """The call by ``backend``, or the one that ``planner.build`` chooses. Raises what ``attention`` raises."""
    if backend is not None and not isinstance(backend, str):
        raise no_name(backend)
    key = asked.problem, asked.device, backend, effective(policy)
    try:
        return _by(asked, *_built(*key, view.generation, restarts))
    except _NotNow:
        pass
    return _by(asked, *planner.build(*key, restarts=restarts))._replace(lasting=False)


def planned(asked: Asked, plan: Plan) -> Call:
    """The call by what ``plan`` chose. Raises what ``Plan.check`` raises."""
    if plan.problem.nonfinite:  # which takes other operands too
        asked = asked._replace(problem=asked.problem.replace(nonfinite=True))
    problem = asked.problem
    plan.check(problem.replace(lse=plan.problem.lse) if asked.sinks_grad else problem)
    if problem != plan.problem:  # the lse, for the gradient of sinks
        return called(asked, plan.taker(), None)
    return _by(asked, *planner.compiled(plan))


def _by(asked: Asked, backend: Backend, kernel: Kernel) -> Call:
    problem, inputs = asked.problem, asked.inputs
    if problem.dropout and inputs.seed is None and backend.wants_seed:
        inputs = inputs._replace(seed=drawn_seed(inputs.query))
    if asked.sinks_grad and not backend.autograd:  # which nobody but ``run`` is to know of
        inputs = inputs._replace(sinks=inputs.sinks.detach())  # type: ignore[union-attr]
    recording.note(problem)
    return Call(asked, backend, kernel, inputs, backend.native(asked.library))


class _NotNow(Exception):
    """What the choice lacks is measured at another time."""


@functools.lru_cache(maxsize=1024)
def _built(
    problem: Problem, device: Device, backend: str | None, policy: Policy, generation: int, restarts: bool
) -> tuple[Backend, Kernel]:
    if not at_sight(problem, device, backend, policy):
        raise _NotNow
    return planner.build(problem, device, backend, policy, restarts=restarts)


def run(call: Call) -> Any:
    """The output, or output and lse, as the caller's; of torch with gradients."""
    asked, native, order = call.asked, call.native, call.asked.order
    if asked.problem.grads and not call.backend.autograd:
        autograd = import_module("attnswitch.call.autograd")
        out, lse = autograd.differentiable_form(asked.problem, call.kernel, call.inputs, native, order)
        native = "torch"
    else:
        out, lse = call.kernel.forward(to_native(call.inputs, asked.library, native))
        out, lse = order.like(out, call.inputs.query), None if lse is None else order.of(lse)
    if asked.sinks_grad and not call.backend.autograd:
        out, lse = (arrays.passage(array, native, "torch") for array in (out, lse))
        out, lse = import_module("attnswitch.call.autograd").with_sinks(out, lse, asked.sinks, order)
        native = "torch"
    out = call.plain(out, native)
    return (out, call.plain(lse, native)) if asked.returns_lse else out


def results(call: Call) -> tuple[Array, Array]:
    """Output and lse for ``gradients``, as the caller's."""
    out, lse = call.kernel.results(to_native(call.inputs, call.asked.library, call.native))
    return call.back(out), call.back(lse)


def gradients(
    call: Call,
    grad_out: Array,
    grad_lse: Array | None,
    out: Array | None,
    lse: Array | None,
    *,
    of_sinks: bool,
    mask_axes: int = 4,
) -> Gradients:
    """Gradients of the operands, and if ``of_sinks`` of these, from arrays as ``result_beside`` returns them.

    The caller's attn_mask has ``mask_axes``.
    """
    kernel, inputs = call.kernel, to_native(call.inputs, call.asked.library, call.native)
    if out is None or lse is None:
        # What torch differentiates runs the forward again with its backward.
        out = lse = None
        if of_sinks or not call.backend.autograd:
            out, lse = kernel.results(inputs)
    grads = kernel.backward(inputs, out, lse, grad_out, grad_lse)
    mask = None if grads.attn_mask is None else call.plain(grads.attn_mask[(0,) * (4 - mask_axes)])
    query, key, value = map(call.back, grads[:3])
    found = Gradients(query, key, value, mask)
    if not of_sinks:
        return found
    given = arrays.passage(call.asked.sinks, call.asked.library, call.native)
    return GradientsWithSinks.of(found, call.plain(sinks.gradient(given, out, lse, grad_out, grad_lse)))
