"""Query heads that share a key head in one tile."""

from __future__ import annotations

from attnswitch.problem import Problem

__all__ = ["packs"]


def packs(problem: Problem, most: int) -> bool:
    """Whether the query heads that share a key head lie in one tile of ``most`` rows: few queries of each fill it."""
    return problem.group > 1 and problem.seq_q * problem.group <= most
