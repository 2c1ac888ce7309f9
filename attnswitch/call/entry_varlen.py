"""Calls of sequences one after another as they come in: by themselves, or by the operators, as ``entry`` has others."""

from __future__ import annotations

from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Intercepted
from attnswitch.call import options as read
from attnswitch.call import per_head, varlen
from attnswitch.call.entry import check_plain, is_traced
from attnswitch.call.options import seed_of
from attnswitch.call.per_head import PerHead
from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Gradients
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy

__all__ = ["call", "gradients", "run_plan"]

_Operands = tuple[Array, Array, Array]
_Pair = tuple[Any, Any]


def call(
    operands: _Operands,
    cu_seqlens: _Pair,
    longest: _Pair,
    seed: Any,
    backend: str | None,
    policy: Policy | str | None,
    *given: Any,
    heads: PerHead = per_head.NONE,
) -> Any:
    """What ``attention_varlen`` returns; ``given`` are the options in the order of ``Options``."""
    if not is_traced(operands[0]):
        options = read.of_call(*given)
        seed = seed_of(seed)
        try:
            return varlen.attend(operands, cu_seqlens, longest, seed, options, backend, policy, heads)
        except Intercepted:
            pass
    return _operated(operands, cu_seqlens, longest, seed, backend, policy, *given, heads=heads)


def run_plan(plan: Plan, operands: _Operands, cu_seqlens: _Pair, seed: Any, heads: PerHead) -> Any:
    """What calling ``plan`` does. In a graph a plan fixes the backend and the longest alone."""
    if not is_traced(operands[0]):
        seed = seed_of(seed)
        try:
            return varlen.run_plan(plan, operands, cu_seqlens, seed, heads)
        except Intercepted:
            pass
    p = plan.problem
    given = read.said_by(p, "BHLD")
    return _operated(operands, cu_seqlens, (p.seq_q, p.seq_k), seed, plan.taker(), None, *given, heads=heads)


def gradients(
    upstream: _Pair,
    saved: _Pair,
    operands: _Operands,
    cu_seqlens: _Pair,
    longest: _Pair,
    seed: Any,
    backend: str | None,
    policy: Policy | str | None,
    *given: Any,
    heads: PerHead,
    sinks_grad: bool,
) -> Gradients:
    """What ``attention_varlen_backward`` returns, given pairs for output and lse; the rest is as in ``call``."""
    read.check_remembered("attention_varlen", given[0], seed)
    call = operands, cu_seqlens, longest
    if not is_traced(operands[0]):
        options = read.of_call(*given)
        seed = seed_of(seed)
        try:
            return varlen.gradients(
                upstream, saved, *call, seed, options, backend, policy, "qkv", heads, sinks_grad=sinks_grad
            )
        except Intercepted:
            if sinks_grad:
                raise Unsupported(
                    "attention_varlen_backward with sinks_grad, of tensors that only torch can read (of a mode, on the"
                    " meta device, of a subclass): pass tensors with memory of their own"
                ) from None
    from attnswitch.call import operators

    _check(operands, *upstream, *saved, *heads)
    rest: tuple[Any, ...] = *call, seed, backend, policy, *given
    if heads.sinks is not None:
        from attnswitch.call import composed

        saved = composed.saved_varlen(saved, *rest, **heads._asdict())
    found = operators.attention_varlen_backward(upstream, saved, *rest, alibi_slopes=heads.alibi_slopes)
    if not sinks_grad:
        return found
    return composed.with_gradient(found, heads.sinks, upstream, saved, operands[0], heads_last=True)


def _operated(operands: _Operands, *rest: Any, heads: PerHead) -> Any:
    """By the operators, which take sequences without sinks: these are composed with what they give."""
    _check(operands, heads.alibi_slopes)
    if heads.sinks is not None:
        from attnswitch.call import composed

        return composed.attention_varlen(operands, *rest, **heads._asdict())
    from attnswitch.call import operators  # of torch, which is there by now

    return operators.attention_varlen(operands, *rest, alibi_slopes=heads.alibi_slopes)


def _check(operands: _Operands, *beside: Any) -> None:
    """Raises ``Unsupported`` where the operators do not know what looks at tensors."""
    from attnswitch.call import transforms

    check_plain(arrays.ROLES, operands, transforms.refuse_varlen, *beside)
