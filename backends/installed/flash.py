"""What the three packages of FlashAttention have in common: rows first, then heads; two calls, dense and packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .base import Attend, edges_of, of_rows, rows_of, turned

__all__ = ["Call", "dense_or_packed"]

#: From operands as the library lays them out, and keywords, to the output, or a tuple of it, the lse, (B, H, L) or
#: (H, T), and maybe more.
Call = Callable[..., Any]


def dense_or_packed(
    problem: Problem, dense: Call, packed: Call, beside: Callable[[Inputs, bool], dict[str, Any]]
) -> Attend:
    """The call for ``problem``; ``beside`` makes its keywords, from inputs and whether the lse is asked for."""
    if not problem.varlen:

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
            out, lse = _first_two(dense(*map(turned, inputs[:3]), **beside(inputs, stated)))
            return turned(out), lse

        return attend

    def attend_packed(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
        query_edges, key_edges = edges_of(inputs)
        found = packed(
            *map(rows_of, inputs[:3]),
            cu_seqlens_q=query_edges,
            cu_seqlens_k=key_edges,
            max_seqlen_q=problem.seq_q,
            max_seqlen_k=problem.seq_k,
            **beside(inputs, stated),
        )
        out, lse = _first_two(found)
        return of_rows(out), None if lse is None else lse[None]

    return attend_packed


def _first_two(found: Any) -> tuple[Any, Any]:
    """Output and lse, None where there is none, of what a call returned."""
    return (found[0], found[1]) if isinstance(found, tuple) else (found, None)
