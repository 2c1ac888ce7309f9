"""Calls of dense operands as they come in, and plans of any form.

They go by ``attend``, or by the operators where torch looks at them before their tensors do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Intercepted
from attnswitch.call import options as read
from attnswitch.call.attend import attend
from attnswitch.call.options import Options, seed_of
from attnswitch.call.per_head import PerHead
from attnswitch.machine.backend import Gradients
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem

__all__ = ["call", "check_plain", "compiled_gradients", "is_traced", "run_plan", "traced"]


def call(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    key_lengths: Any,
    seed: Any,
    backend: str | None,
    policy: Policy | str | None,
    *given: Any,
) -> Any:
    """What ``attention`` returns; ``given`` are the options in the order of ``Options``."""
    if hasattr(query, "is_cuda"):  # is_traced, without a call more
        import torch

        if torch.compiler.is_dynamo_compiling():
            return traced(query, key, value, attn_mask, key_lengths, seed, backend, policy, *given)
    options = read.of_call(*given)
    if seed is not None:
        seed = seed_of(seed)
    try:
        out, lse = attend(query, key, value, attn_mask, key_lengths, seed, options, backend, policy)
    except Intercepted:
        pass
    else:
        return (out, lse) if options.return_lse else out
    return traced(query, key, value, attn_mask, key_lengths, seed, backend, policy, *given)


def traced(*call: Any, alibi_slopes: Any = None) -> Any:
    """What ``call`` returns, where torch looks at it before its tensors do; with slopes of ALiBi if there are some."""
    query = call[0]
    if not is_traced(query):
        return _intercepted(*call, alibi_slopes=alibi_slopes)
    way = _by_parts if type(query).__name__ == "DTensor" else _compiled
    return way(*call, alibi_slopes=alibi_slopes)


def run_plan(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    key_lengths: Any,
    seed: Any,
    layout: str,
    cu_seqlens: tuple[Any, Any],
    cache: tuple[Any, ...],
    heads: tuple[Any, Any],
) -> Any:
    """What calling ``plan`` does; raises as ``Plan.__call__`` says. In a graph a plan fixes the backend alone."""
    if plan.problem.page:
        from attnswitch.call import entry_paged
        from attnswitch.call.paged import Beside

        table, lengths, tree, *scales = cache
        beside = Beside._make((table, lengths, cu_seqlens[0], None, None, tree, *scales, PerHead(*heads)))
        return entry_paged.run_plan(plan, (query, key, value), beside)
    if plan.problem.varlen:
        from attnswitch.call import entry_varlen  # which programs without such calls do not wait for

        return entry_varlen.run_plan(plan, (query, key, value), cu_seqlens, seed, PerHead(*heads))
    if any(given is not None for given in heads):
        from attnswitch.call import headwise

        return headwise.run_plan(plan, query, key, value, attn_mask, key_lengths, seed, layout, PerHead(*heads))
    if not is_traced(query):
        seed = seed_of(seed)
        options = _options_of(plan.problem, layout)
        try:
            out, lse = attend(query, key, value, attn_mask, key_lengths, seed, options, None, Policy.ESTIMATE, plan)
        except Intercepted:
            pass
        else:
            return (out, lse) if plan.problem.lse else out
    given = read.said_by(plan.problem, layout)
    return traced(query, key, value, attn_mask, key_lengths, seed, plan.taker(), None, *given)


def _compiling() -> bool:
    """Whether torch.compile is looking at the code that runs; asked of torch's tensors alone, so that torch is there.

    torch.compile would make a guard of every module in ``sys.modules``.
    """
    import torch

    return torch.compiler.is_dynamo_compiling()


def is_traced(query: Any) -> bool:
    """Whether torch.compile is looking at a call with ``query``."""
    return hasattr(query, "is_cuda") and _compiling()


def check_plain(roles: tuple[str, ...], operands: Any, refuse: Callable[[], None], *beside: Any) -> None:
    """Refuse operands of an operator that knows no transform, no DTensor and no nested tensor, where they are such.

    And what stands ``beside`` them, where a transform looks at it.
    """
    from attnswitch.call import transforms

    if _compiling():
        if transforms.active() or any(type(x).__name__ == "DTensor" or x.is_nested for x in operands):
            refuse()
        return
    for role, tensor in zip(roles, operands, strict=False):
        arrays.check_dense(tensor, role)
    if _are_sharded(operands) or transforms.looks(*operands, *beside):
        refuse()


def _compiled(*call: Any, alibi_slopes: Any) -> Any:
    import torch

    from attnswitch.call import transforms  # which tells torch how the operators are mapped by vmap

    if transforms.differentiates():
        transforms.refuse()
    results = _operated(*call, alibi_slopes=alibi_slopes)
    if isinstance(call[0], torch.Tensor):
        return results
    return tuple([x.numpy() for x in results]) if isinstance(results, tuple) else results.numpy()


def compiled_gradients(
    upstream: tuple[Any, Any],
    saved: tuple[Any, Any],
    wanted: str,
    operands: tuple[Any, ...],
    seed: Any,
    backend: str | None,
    policy: Policy | str | None,
    *given: Any,
    heads: PerHead,
    sinks_grad: bool,
) -> Gradients:
    """What ``attention_backward`` returns in a graph, given pairs for output and lse; the rest is as in ``traced``."""
    from attnswitch.call import operators, transforms

    read.check_remembered("attention", given[0], seed)
    if transforms.active() or type(operands[0]).__name__ == "DTensor":
        transforms.refuse_gradients()
    said = seed, backend, policy, *given
    if heads.sinks is not None:
        from attnswitch.call import composed

        saved = composed.saved(saved, *operands, *said, **heads._asdict())
    found: Gradients = operators.attention_backward(
        upstream, saved, wanted, operands, *said, alibi_slopes=heads.alibi_slopes
    )
    if not sinks_grad:
        return found
    return composed.with_gradient(found, heads.sinks, upstream, saved, operands[0], heads_last=given[-2] == "BLHD")


def _operated(*call: Any, alibi_slopes: Any) -> Any:
    from attnswitch.call import operators  # of torch, which is there by now

    return operators.attention(*call, alibi_slopes=alibi_slopes)


def _intercepted(*given: Any, alibi_slopes: Any) -> Any:
    from attnswitch.call import transforms

    for role, tensor in zip(arrays.ROLES, given, strict=False):
        if tensor is not None:
            arrays.check_dense(tensor, role)
    if _are_sharded((*given[:5], alibi_slopes)):
        return _by_parts(*given, alibi_slopes=alibi_slopes)
    way = transforms.attention if transforms.looks(*given[:4], alibi_slopes) else _operated
    return way(*given, alibi_slopes=alibi_slopes)


def _by_parts(*given: Any, alibi_slopes: Any) -> Any:
    """Of DTensors: the call that this process makes of the parts it has."""
    from attnswitch.call import sharded

    part, slopes, whole = sharded.parts(*given, alibi_slopes=alibi_slopes)
    if slopes is None:
        return whole(call(*part))
    from attnswitch.call import headwise

    return whole(headwise.attend(*part, heads=PerHead(None, slopes)))


def _are_sharded(tensors: Any) -> bool:
    """Whether one is a DTensor, of which a program without torch.distributed has none."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(x, distributed.DTensor) for x in tensors)


def _options_of(problem: Problem, layout: Any) -> Options:
    try:
        return _known_options(problem, layout)
    except TypeError:  # no text, and nothing that can be looked up
        return read.of_problem(problem, layout)


_known_options = functools.lru_cache(maxsize=1024)(read.of_problem)
