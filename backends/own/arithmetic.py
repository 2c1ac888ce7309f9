"""What the project's own kernels reckon alike from a problem: factors, tiles, heads to a section."""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

__all__ = ["LOG2E", "capped", "factors", "folds", "heads_a_section", "keep_scale", "padded", "tiles"]

LOG2E = 1.4426950408889634
#: A softcap from here on changes no score that float32 can hold next to it, and would overflow.
_NO_CAP = 1e30
#: Rows of the largest tile.
_PADDING = 128
#: Bytes of keys and values that the programs running at one time may share in the L2.
_SECTION = 16 * 2**20


def capped(problem: Problem) -> bool:
    """Whether the softcap changes any score."""
    return 0.0 < problem.softcap < _NO_CAP


def folds(problem: Problem) -> bool:
    """Whether a score is q . k times a positive factor, which then becomes a part of the exponential."""
    plain_mask = problem.mask is None or problem.mask.is_bool
    return plain_mask and not capped(problem) and problem.softmax_scale > 0.0


def factors(problem: Problem) -> tuple[float, float]:
    """What the products q . k are multiplied by before anything else, and the cap, 0 for none."""
    scale = float(problem.softmax_scale)
    return (scale / problem.softcap, float(problem.softcap)) if capped(problem) else (scale, 0.0)


def keep_scale(problem: Problem) -> float:
    """What the weights that dropout keeps are multiplied by; 0 where it keeps none."""
    return 0.0 if problem.dropout == 1.0 else 1.0 / (1.0 - problem.dropout)


def tiles(length: int, size: int) -> int:
    """How many tiles of ``size`` cover ``length``."""
    return -(-length // size)


def padded(problem: Problem) -> int:
    """Length of what the backward reads row by row (lse, D): whole tiles, so that no load of it is tested."""
    return tiles(problem.seq_q, _PADDING) * _PADDING


def heads_a_section(problem: Problem, *, queries: bool = False, packed: bool = False) -> int:
    """How many heads run side by side before the next begin: as many as leave their keys and values in the L2.

    ``queries``: the programs of a section share queries and their gradients instead. ``packed``: the query heads that
    share a key head count as one.
    """
    length = problem.seq_q if queries else problem.seq_k
    each = max(1, length * (problem.dim_qk + problem.dim_v) * DTYPES[problem.dtype])
    together = max(1, _SECTION // each)
    return together if queries or packed else together * problem.group
