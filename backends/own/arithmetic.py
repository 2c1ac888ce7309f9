"""What the project's own kernels reckon alike from a problem: factors, tiles, heads to a section."""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

__all__ = [
    "LOG2E",
    "PADDING",
    "TINY_PRODUCTS",
    "capped",
    "dim_class",
    "factors",
    "folds",
    "generic",
    "heads_a_section",
    "keep_scale",
    "padded",
    "seen",
    "tiles",
]

LOG2E = 1.4426950408889634
#: A softcap from here on changes no score that float32 can hold next to it, and would overflow.
_NO_CAP = 1e30
#: Rows of the largest tile.
PADDING = 128
#: Bytes of keys and values that the programs running at one time may share in the L2.
_SECTION = 16 * 2**20

#: Queries or keys of a tiny problem, and its multiplications, at most; and the same where queries are few.
_TINY, TINY_PRODUCTS = 512, 2**24
_FEW, _FEW_KEYS = 16, 128
#: Classes of head dimensions of generic kernels.
_CLASSES = (32, 64, 128, 256)


def generic(problem: Problem, *, emulated: bool = False) -> bool:
    """Whether generic kernels serve ``problem``, which read at run time much of what others are compiled for.

    They do where it is tiny, so that a launch takes the host longer than the GPU, and has anything besides: there are
    many such problems, in the tests of any program if nowhere else, and none of them is worth kernels of its own. Where
    kernels are ``emulated``, these take turns with others, so that both are checked.
    """
    p = problem
    if (emulated and p.seq_k % 2) or max(p.dim_qk, p.dim_v) > _CLASSES[-1]:
        return False
    products = p.batch * p.heads_q * p.seq_q * p.seq_k * (p.dim_qk + p.dim_v)
    keys = _FEW_KEYS if p.seq_q * p.group <= _FEW else _TINY  # keys of few queries are split among blocks
    return p.seq_k <= keys and p.seq_q <= _TINY and products <= TINY_PRODUCTS and not _plain(p)


def _plain(p: Problem) -> bool:
    """Whether it has a usual head dimension, lies as wide copies want it, and has no mask, softcap or dropout."""
    whole = all(memory.align >= 16 and not memory.strided for memory in (p.query, p.key, p.value))
    featured = p.mask is not None or capped(p) or p.dropout > 0.0 or p.softmax_scale <= 0.0
    return whole and not featured and p.dim_qk in _CLASSES and p.dim_v in _CLASSES


def dim_class(problem: Problem) -> int:
    """The head dimension that generic kernels have for ``problem``, of key and value alike."""
    return min(dim for dim in _CLASSES if dim >= max(problem.dim_qk, problem.dim_v))


def capped(problem: Problem) -> bool:
    """Whether the softcap changes any score."""
    return 0.0 < problem.softcap < _NO_CAP


def folds(problem: Problem) -> bool:
    """Whether a score is q . k times a positive factor, which then becomes a part of the exponential."""
    adds = problem.adds_mask or problem.alibi
    return not adds and not capped(problem) and problem.softmax_scale > 0.0


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


def seen(problem: Problem, rows: int) -> int:
    """How many keys lie from the first to the last that ``rows`` queries in succession see by position, at most."""
    p, (left, right) = problem, problem.reach
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    first = 0 if left is None else max(0, offset - left)
    end = p.seq_k if right is None else min(p.seq_k, offset + p.seq_q + right)
    if left is not None and right is not None:
        end = min(end, first + left + right + rows)
    return max(0, end - first)


def bare(problem: Problem) -> bool:
    """Whether positions alone hide keys, and scores and weights are as the products give them."""
    p = problem
    return not (p.mask or p.key_lengths or p.varlen or p.page or p.dropout or p.softcap or p.alibi or p.sinks)


def padded(problem: Problem) -> int:
    """Length of what the backward reads row by row (lse, D): whole tiles, so that no load of it is tested."""
    return tiles(problem.seq_q, PADDING) * PADDING


def heads_a_section(problem: Problem, *, queries: bool = False, packed: bool = False) -> int:
    """How many heads run side by side before the next begin: as many as leave their keys and values in the L2.

    ``queries``: the programs of a section share queries and their gradients instead. ``packed``: the query heads that
    share a key head count as one.
    """
    length = problem.seq_q if queries else problem.seq_k
    each = max(1, length * (problem.dim_qk + problem.dim_v) * DTYPES[problem.dtype])
    together = max(1, _SECTION // each)
    return together if queries or packed else together * problem.group
