"""``attention`` with sinks or alibi_slopes: what such a call asks, and its way."""

from __future__ import annotations

import functools
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Intercepted
from attnswitch.call import alike, entry, finite, forms, per_head
from attnswitch.call import options as read
from attnswitch.call.describe import describe, lengths_beside, result_beside
from attnswitch.call.forms import Asked, Call
from attnswitch.call.launch import straight
from attnswitch.call.options import Options
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients, Order
from attnswitch.machine.device import Device
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem

__all__ = ["attend", "attend_by", "gradients", "problem_of", "results", "run_plan"]


def attend(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    key_lengths: Any,
    seed: Any,
    backend: str | None,
    policy: Policy | str | None,
    *given: Any,
    heads: PerHead,
) -> Any:
    """What ``attention`` returns; ``given`` are the options in the order of ``Options``."""
    if not entry.is_traced(query):
        options = read.of_call(*given)
        seed = read.seed_of(seed)
        try:
            return attend_by(query, key, value, attn_mask, key_lengths, seed, options, backend, policy, heads)
        except Intercepted:
            pass
    return _composed(query, key, value, attn_mask, key_lengths, seed, backend, policy, *given, heads=heads)


def attend_by(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    heads: PerHead,
) -> Any:
    """The same, of options that were read. Raises ``Intercepted``."""

    def general() -> Call:
        asked = _ask(_operands(query, key, value, attn_mask), key_lengths, seed, options, heads)
        return forms.called(asked, backend, policy)

    if seed is not None:
        return forms.run(general())
    sinks, slopes = heads
    given = query, key, value, attn_mask, key_lengths, None, None, None, sinks, slopes, None, None, None, None
    lacks = attn_mask is None, key_lengths is None, sinks is None, slopes is None
    return alike.run(given, ("headwise", options, backend, policy, *lacks), general)


def run_plan(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    key_lengths: Any,
    seed: Any,
    layout: str,
    heads: PerHead,
) -> Any:
    """The same by what ``plan`` chose, which in a graph is the backend alone."""
    if not entry.is_traced(query):
        seed = read.seed_of(seed)
        options = read.of_problem(plan.problem, layout)
        try:
            asked = _ask(_operands(query, key, value, attn_mask), key_lengths, seed, options, heads)
        except Intercepted:
            pass
        else:
            return forms.run(forms.planned(asked, plan))
    said = read.said_by(plan.problem, layout)
    return _composed(query, key, value, attn_mask, key_lengths, seed, plan.taker(), None, *said, heads=heads)


def problem_of(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    key_lengths: Any,
    options: Options,
    seed: int | None,
    heads: PerHead,
) -> tuple[Problem, Device]:
    """The problem that a call is, and its device."""
    try:
        asked = _ask(_operands(query, key, value, attn_mask), key_lengths, seed, options, heads)
    except Intercepted:
        raise InvalidProblem(
            "sinks or alibi_slopes beside tensors that only torch can read (of a mode, torch.func, or a subclass): a"
            " plan needs tensors with memory, or a described problem"
        ) from None
    return asked.problem, asked.device


def results(
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    wanted: str,
    heads: PerHead,
) -> tuple[Array, Array]:
    """Output and lse for ``gradients`` of the same call, by the backend that these are computed by."""
    call = forms.called(_ask(operands, key_lengths, seed, options, heads, wanted), backend, policy, restarts=True)
    return forms.results(call)


def gradients(
    grad_out: Array,
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    *,
    out: Array | None,
    lse: Array | None,
    grad_lse: Array | None,
    wanted: str,
    heads: PerHead,
    sinks_grad: bool,
) -> Gradients:
    """Gradients of ``operands`` that ``wanted`` asks for, and of the sinks if ``sinks_grad``.

    Raises what ``attention_backward`` raises, and ``Intercepted``.
    """
    call = forms.called(_ask(operands, key_lengths, seed, options, heads, wanted), backend, policy, restarts=True)
    p = call.asked.problem
    rows = p.batch, p.heads_q, p.seq_q

    beside = functools.partial(result_beside, query=call.asked.query, native=call.native, layout=options.layout)
    upstream = beside(grad_out, "grad_out", (*rows, p.dim_v)), beside(grad_lse, "grad_lse", rows)
    saved = beside(out, "out", (*rows, p.dim_v)), beside(lse, "lse", rows)
    axes = len(operands[3].shape) if len(operands) > 3 else 4
    return forms.gradients(call, *upstream, *saved, of_sinks=sinks_grad, mask_axes=axes)


def _operands(query: Array, key: Array, value: Array, attn_mask: Any) -> tuple[Array, ...]:
    return (query, key, value) if attn_mask is None else (query, key, value, attn_mask)


def _ask(
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    heads: PerHead,
    grads: str | None = None,
) -> Asked:
    """``grads`` None means: what torch's autograd would ask for."""
    given, facts = arrays.take_all(operands)
    query, turned = facts[0], options.layout == "BLHD"
    whole = facts if len(facts) == 4 else (*facts, None)
    problem = describe(whole, options, lengths=key_lengths is not None, seeded=seed is not None, grads=grads)
    beside = per_head.read(heads, query, problem.heads_q, problem.batch, autograd=grads is None)
    problem = problem.replace(
        sinks=beside.sinks is not None,
        alibi=beside.alibi_slopes is not None,
        alignment=options.causal_alignment,  # by which alibi counts distances, causal or not
        lse=options.return_lse or beside.grad,
    )
    lengths = None if key_lengths is None else lengths_beside(key_lengths, query, problem.seq_k)
    inputs = straight(given, turned)._replace(
        key_lengths=lengths, seed=seed, sinks=beside.sinks, alibi_slopes=beside.alibi_slopes
    )
    kind = query.device[0]
    if finite.looked_for(finite.when(), kind) and not finite.finite(problem, kind, tuple(given[:3])):
        problem = problem.replace(nonfinite=True)
    caller = operands[0] if query.by_dlpack else None
    where = Device.of(*query.device), inputs, arrays.library_of(given[0]), caller, query
    return Asked(problem, *where, Order(turned), options.return_lse, beside.given, beside.grad)


def _composed(*call: Any, heads: PerHead) -> Any:
    """Where torch looks at a call before its tensors do: by the operators, which know slopes, and no sinks."""
    if heads.sinks is None:
        return entry.traced(*call, alibi_slopes=heads.alibi_slopes)
    from attnswitch.call import composed

    return composed.attention(*call, **heads._asdict())
