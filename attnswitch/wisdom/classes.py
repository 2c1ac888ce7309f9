"""Which problems a record holds for: the one place where that is decided, for times and for faults."""

from __future__ import annotations

import math

from attnswitch.problem import CONTIGUOUS, DTYPES, Problem
from attnswitch.problem.cost import kv_bytes

__all__ = ["HOPELESS", "NEAR", "NEIGHBOURS", "TIE", "TILE", "covers", "doublings", "speed_class", "weight"]

#: Doublings up to which a time serves a problem of another class (``fixtures/measure_classes.py``).
NEAR = 12.0
#: How many of the nearest classes are asked: kernels have steps in size, and one class alone may lie on either side.
NEIGHBOURS = 3
#: Keys of a tile: where they are no whole number of these, kernels mask the last tile or take one more. Among doublings
#: a problem of such keys is so far from one of whole tiles.
TILE, _RAGGED = 128, 2.0
#: A candidate that is so many times slower than the fastest when it is tried out is not timed again.
HOPELESS = 4.0
#: How many times as long a backend may take there and still be no slower on that problem, as far as can be told.
TIE = 1.02


def speed_class(problem: Problem) -> Problem:
    """The problem that stands for all that a time holds for.

    Batch, lengths and window are rounded to powers of two, so that what is measured there serves every length from
    0.7 to 1.4 times it: which of two kernels is the faster turns on whether the device is full, on the share of the
    tiles that a mask leaves, and on what fits a cache, and each of these moves with the logarithm of a size. Lengths 0
    and 1 stay apart: one query is another kernel. So do whole tiles: 1,023 stands for lengths near 1,024 that are none,
    on which cuDNN takes a tenth longer on an H200. Head counts, head dimensions and dtype choose the kernel, so they
    stay, and so does everything that is there or not. What is only a number in the kernel (scale, softcap, dropout) is
    dropped, and so is how the operands lie in memory, which every candidate pays for alike.
    """
    window = problem.window
    return problem.replace(
        batch=_rounded(problem.batch),
        seq_q=_length(problem.seq_q),
        seq_k=_rounded(problem.seq_k) if problem.seq_q == 1 else _length(problem.seq_k),
        window=None if window is None else tuple(None if side is None else _rounded(side) for side in window),
        scale=None,
        softcap=1.0 if problem.softcap else 0.0,
        dropout=0.5 if problem.dropout else 0.0,
        query=CONTIGUOUS,
        key=CONTIGUOUS,
        value=CONTIGUOUS,
        attn_mask=CONTIGUOUS,
        nonfinite=False,
    )


def _rounded(size: int) -> int:
    """The power of two that is nearest by ratio; 0 and 1 are themselves."""
    return size if size < 2 else 2 ** round(math.log2(size))


def _length(size: int) -> int:
    """``_rounded``, less one where it is whole tiles and ``size`` is not."""
    near = _rounded(size)
    return near - 1 if size % TILE and near >= TILE else near


def doublings(seen: Problem, problem: Problem) -> float:
    """How far apart two problems are, where none of the class of ``problem`` was measured: inf for another kind.

    By how many doublings their sizes differ, added up; those of heads, of which most devices have enough, count half. A
    position that only one of them hides counts as one, and keys that fill their last tile in one of them as two. One
    query is bound by reading keys and values, whichever of their sizes makes them so many: those bytes are its size.
    Problems of unlike kind say nothing of each other: other kernels run, or the same with much more to do.
    """
    if _kind(seen) != _kind(problem):
        return math.inf
    heads, sizes = (_added_up(of(seen), of(problem)) for of in (_heads, _sizes))
    hidden = sum(a != b for a, b in zip(_hidden(seen), _hidden(problem), strict=True))
    return 0.5 * heads + sizes + hidden + _RAGGED * (_ragged(seen) != _ragged(problem))


def weight(away: float) -> float:
    """What a class counts that is ``away`` doublings from a problem, beside others."""
    return 1 / (0.25 + away) ** 2


def _added_up(some: tuple[int, ...], others: tuple[int, ...]) -> float:
    return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in zip(some, others, strict=True))


def _kind(p: Problem) -> tuple[object, ...]:
    mask = None if p.mask is None else p.mask.is_bool
    features = mask, p.irregular, bool(p.grads), bool(p.dropout), bool(p.softcap)
    return DTYPES[p.dtype], *features, p.seq_q == 1, p.is_empty


def _heads(p: Problem) -> tuple[int, ...]:
    return (p.group,) if p.seq_q == 1 else (p.batch * p.heads_q, p.group)


def _sizes(p: Problem) -> tuple[int, ...]:
    return (kv_bytes(p),) if p.seq_q == 1 else (p.seq_q, p.seq_k, p.dim_qk, p.dim_v)


def _ragged(p: Problem) -> bool:
    return p.seq_q > 1 and p.seq_k % TILE != 0


def _hidden(p: Problem) -> tuple[bool, ...]:
    return p.causal, p.window is not None, p.key_lengths


def covers(seen: Problem, problem: Problem) -> bool:
    """Whether a fault that was seen on ``seen`` has to be expected on ``problem``.

    A case is made small before it is remembered: what it still has is what the fault needs. So the fault is expected
    wherever all of that is there and no size is smaller. What is empty, and a scale of 0 or less, are faults of their
    own kind, and another dtype is another kernel.
    """
    empty, same = (seen.is_empty or not seen.seq_k), seen.dtype == problem.dtype
    if not same or empty != (problem.is_empty or not problem.seq_k):
        return False
    sizes = ("batch", "heads_q", "group", "seq_q", "seq_k", "dim_qk", "dim_v")
    if not empty and any(getattr(problem, size) < getattr(seen, size) for size in sizes):
        return False
    if seen.softmax_scale <= 0 < problem.softmax_scale:
        return False
    if seen.dim_qk != seen.dim_v and problem.dim_qk == problem.dim_v:
        return False
    if not set(seen.grads) <= set(problem.grads):
        return False
    if (seen.causal and not problem.causal) or (seen.bottom_right and not problem.bottom_right):
        return False
    if seen.mask is not None and (problem.mask is None or seen.mask.is_bool != problem.mask.is_bool):
        return False
    needed = ("window", "key_lengths", "softcap", "dropout", "seeded", "lse", "deterministic", "nonfinite")
    return all(bool(getattr(problem, fact)) for fact in needed if getattr(seen, fact))
