"""What the three packages of FlashAttention have in common: rows first, then heads; two calls, dense and packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .base import Attend, edges_of, rows_of, turned

__all__ = ["Call", "dense_or_packed"]

#: From operands as the library lays them out, and keywords, to output and lse, (B, H, L) or (H, T).
Call = Callable[..., tuple[Any, Any]]


def dense_or_packed(
    problem: Problem, dense: Call, packed: Call, beside: Callable[[Inputs, bool], dict[str, Any]]
) -> Attend:
    """The call for ``problem``; ``beside`` makes its keywords, from inputs and whether the lse is asked for."""
    if not problem.varlen:

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
            out, lse = dense(*map(turned, inputs[:3]), **beside(inputs, stated))
            return turned(out), lse

        return attend

    def attend_packed(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
        query_edges, key_edges = edges_of(inputs)
        out, lse = packed(
            *map(rows_of, inputs[:3]),
            cu_seqlens_q=query_edges,
            cu_seqlens_k=key_edges,
            max_seqlen_q=problem.seq_q,
            max_seqlen_k=problem.seq_k,
            **beside(inputs, stated),
        )
        return out.transpose(0, 1)[None], None if lse is None else lse[None]

    return attend_packed
