"""Operators on sequences one after another: what they do when a graph runs, and what they return without elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnswitch import arrays
from attnswitch.call import per_head, varlen
from attnswitch.call.describe import check_beside
from attnswitch.call.operators.memory import lse_of
from attnswitch.call.operators.run import as_without_graph, kept, seed_for, unsigned
from attnswitch.call.operators.schema import read_said
from attnswitch.call.per_head import PerHead

__all__ = ["backward", "fake_backward", "fake_forward", "fake_plain", "forward", "plain"]


@as_without_graph
def plain(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    drawn: Any = None,
    *,
    seed: int | None = None,
    **said: Any,
) -> Any:
    """Output."""
    backend, policy, options = read_said(said)
    seed = seed_for(seed, drawn, options, query, backend)
    call = (query, key, value), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), unsigned(seed), options
    return varlen.attend(*call, backend, policy, PerHead(None, alibi_slopes)).contiguous()


@as_without_graph
def forward(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    drawn: Any = None,
    *,
    grads: str = "",
    seed: int | None = None,
    **said: Any,
) -> tuple[Any, Any, Any]:
    """Output, lse, and the seed of a dropout mask that is made again."""
    backend, policy, options = read_said(said)
    seed = seed_for(seed, drawn, options, query, None if grads else backend)
    if not grads:  # lse is an output of the operator, whether or not the call wants it
        options = replace(options, return_lse=True)
    call = (query, key, value), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), unsigned(seed), options
    heads = PerHead(None, alibi_slopes)
    if grads:
        out, lse = varlen.results(*call, backend, policy, grads, heads)
    else:
        out, lse = varlen.attend(*call, backend, policy, heads)
    state = kept(seed, query, keeps=bool(grads) and options.dropout_p > 0.0)
    return out.contiguous(), lse.contiguous(), state


@as_without_graph
def backward(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    out: Any,
    lse: Any,
    state: Any,
    *,
    grads: str,
    **said: Any,
) -> list[Any]:
    """Gradients of what ``grads`` names, in that order."""
    backend, policy, options = read_said(said)
    seed = unsigned(int(state[0])) if options.dropout_p > 0.0 else None
    call = (query, key, value), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), seed, options
    heads = PerHead(None, alibi_slopes)
    found = varlen.gradients((grad_out, grad_lse), (out, lse), *call, backend, policy, grads, heads)
    return [grad.contiguous() for name, grad in zip("qkv", found, strict=False) if grad is not None and name in grads]


# -- without elements --------------------------------------------------------------------------------------------------


def fake_plain(query: Any, key: Any, value: Any, *where: Any, seed: int | None = None, **said: Any) -> Any:
    """The output."""
    _check(query, key, value, where, said)
    return query.new_empty((*query.shape[:2], value.shape[2]))


def fake_forward(
    query: Any, key: Any, value: Any, *where: Any, grads: str = "", seed: int | None = None, **said: Any
) -> tuple[Any, Any, Any]:
    """Output, lse, and a seed on the CPU where one is kept."""
    _check(query, key, value, where, said)
    rows, heads, _ = query.shape
    draws = bool(grads) and said.get("dropout_p", 0.0) > 0.0
    state = torch.empty(1, dtype=torch.int64, device="cpu") if draws else query.new_empty(0, dtype=torch.float32)
    return query.new_empty((rows, heads, value.shape[2])), lse_of(query, (heads, rows)), state


def fake_backward(
    grad_out: Any, _: Any, query: Any, key: Any, value: Any, *__: Any, grads: str, **___: Any
) -> list[Any]:
    """The gradients."""
    check_beside(arrays.outline(grad_out), "grad_out", arrays.outline(query))
    return [x.new_empty(x.shape) for name, x in zip("qkv", (query, key, value), strict=True) if name in grads]


def _check(query: Any, key: Any, value: Any, where: tuple[Any, ...], said: dict[str, Any]) -> None:
    *_, options = read_said(said)
    q, k, _ = varlen.fitting_rows([arrays.outline(x) for x in (query, key, value)], options)
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, *_ = where
    counts = []
    for role, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None:
            facts = arrays.outline(offsets)
            varlen.check_offsets(facts, role, q)
            counts.append(facts.shape[0] - 1)
    if cu_seqlens_k is None:
        varlen.check_left_out(q, k)
    varlen.check_counts(counts[0], counts[-1])
    if alibi_slopes is not None:
        check_beside(arrays.outline(alibi_slopes), "alibi_slopes", q)
        per_head.check_slopes(tuple(alibi_slopes.shape), query.shape[1], counts[0])
