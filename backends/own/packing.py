"""Query heads that share a key head in one tile."""

from __future__ import annotations

from attnswitch.problem import Problem

__all__ = ["packs", "rows"]


def packs(problem: Problem, most: int) -> bool:
    """Whether the query heads that share a key head lie in one tile of ``most`` rows: few queries of each fill it."""
    return problem.group > 1 and problem.seq_q * problem.group <= most


def rows(problem: Problem, most: int) -> int:
    """Rows of queries for each head of the grid."""
    return problem.seq_q * (problem.group if packs(problem, most) else 1)
