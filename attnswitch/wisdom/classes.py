"""Which problems a record holds for. It is decided here alone, for times and for faults."""

from __future__ import annotations

import math
from typing import NamedTuple

from attnswitch.problem import CONTIGUOUS, DTYPES, Problem, Window
from attnswitch.problem.cost import kv_bytes
from attnswitch.problem.problem import MOST

__all__ = [
    "HOPELESS",
    "NEAR",
    "NEIGHBOURS",
    "TIE",
    "TILE",
    "SpeedClass",
    "Traits",
    "covers",
    "doublings",
    "representative",
    "speed_class",
    "traits",
    "weight",
]

#: Doublings up to which a time serves a problem of another class (``fixtures/measure_classes.py``).
NEAR = 12.0
#: How many of the nearest classes are asked: kernels have steps in size, and one class alone may lie on either side.
NEIGHBOURS = 3
#: Keys of a tile. Where the number of keys is no multiple of it, kernels mask the last tile or take one more. Two
#: problems of which one is so and the other is not are as far apart as by this many doublings.
TILE, _RAGGED = 128, 2.0
#: A candidate that is so many times slower than the fastest when it is tried out is not timed again.
HOPELESS = 4.0
#: How many times as long as the fastest a backend may take on another class and still count as equally fast.
TIE = 1.02

#: What a fault needs of a problem, if the case that it was seen on has it.
_NEEDED = (
    *("window", "key_lengths", "varlen", "page", "splits", "tree", "sinks", "alibi"),
    *("softcap", "dropout", "seeded", "lse", "deterministic", "nonfinite"),
)

#: A class of problems as a key: two problems are of one class where these are equal.
SpeedClass = tuple[object, ...]


def speed_class(problem: Problem) -> SpeedClass:
    """The class of ``problem``: a time that was measured on one problem of a class holds for all of it.

    Batch, lengths and window are rounded to powers of two, so a time serves lengths from 0.7 to 1.4 times its own.
    Which of two kernels is faster depends on whether the device is full, on the share of tiles that a mask leaves, and
    on what fits a cache; all of these move with the logarithm of a size. Lengths 0 and 1 are classes of their own: a
    single query takes another kernel. Lengths divisible by 128 form their own class; single-query calls ignore this.
    (On an H200 cuDNN takes a tenth longer where they are not.) Head counts, head dimensions, dtype, the rows of a page,
    num_splits, and whether each option is used choose the kernel, so they stay. The values of scale, softcap and
    dropout, and how the operands lie in memory, do not count.
    """
    p, mask, window, alignment = problem, problem.mask, problem.window, problem.alignment
    seq_q, seq_k = _length(p.seq_q), _keys(p)
    if window is not None:  # a window that holds all the rounded keys is none
        window = _rounded_window(window, seq_q + seq_k)
        if window is None and not (p.causal or p.alibi or p.tree):
            alignment = "top_left"
    return (
        _rounded(p.batch),
        p.heads_q,
        p.heads_kv,
        seq_q,
        seq_k,
        p.dim_qk,
        p.dim_v,
        p.dtype,
        p.causal,
        alignment,
        window,
        None if mask is None else (mask.dtype, mask.axes),
        p.key_lengths,
        p.softcap > 0,
        p.dropout > 0,
        p.seeded,
        p.lse,
        p.grads,
        p.deterministic,
        p.varlen,
        p.page,
        p.splits,
        p.cache,
        p.tree,
        p.sinks,
        p.alibi,
    )


def representative(problem: Problem) -> Problem:
    """A problem of the same class, equal for all problems of the class. It is slower to make than the class itself."""
    window = problem.window
    return problem.replace(
        batch=_rounded(problem.batch),
        seq_q=_length(problem.seq_q),
        seq_k=_keys(problem),
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
    """The power of two that is nearest by ratio, and no size that is too large; 0 and 1 are themselves."""
    if size < 2:
        return size
    exponent = size.bit_length() - 1
    up = size * size >> (2 * exponent + 1) and 2 << exponent <= MOST
    return 2 << exponent if up else 1 << exponent


def _length(size: int) -> int:
    """``_rounded``, less one where that is a multiple of the tile and ``size`` is not."""
    near = _rounded(size)
    return near - 1 if size % TILE and near >= TILE else near


def _keys(problem: Problem) -> int:
    """The number of keys rounded; of keys in pages, that of pages: sequences end anywhere in them."""
    p = problem
    if p.page:
        pages = _rounded(p.seq_k // p.page)
        return p.page * (pages if p.page * pages <= MOST else pages // 2)
    return _rounded(p.seq_k) if p.seq_q == 1 else _length(p.seq_k)


def _rounded_window(window: Window, reach: int) -> Window | None:
    """``window`` rounded. A side of ``reach`` keys or more, which is all of them, is unlimited."""
    left, right = (None if side is None or (near := _rounded(side)) >= reach else near for side in window)
    return None if left is None and right is None else (left, right)


class Traits(NamedTuple):
    """What two problems are compared by: ``doublings`` says how far apart they are."""

    #: Problems of unlike kind say nothing of each other: other kernels run, or the same ones do much more.
    kind: tuple[object, ...]
    #: Most devices have enough of these.
    heads: tuple[int, ...]
    sizes: tuple[int, ...]
    #: Which ways to hide positions are used.
    hidden: tuple[bool, ...]
    #: Whether the number of keys is no multiple of a tile, where that matters.
    ragged: bool


def traits(problem: Problem) -> Traits:
    """The traits of ``problem``. A single query is bound by reading keys and values: these bytes are its size."""
    p, decode = problem, problem.seq_q == 1
    mask = None if p.mask is None else p.mask.is_bool
    forms = p.varlen, p.page > 0, p.tree, p.alibi
    features = mask, p.irregular, *forms, bool(p.grads), bool(p.dropout), bool(p.softcap)
    return Traits(
        kind=(DTYPES[p.dtype], *features, decode, p.is_empty),
        heads=(p.group,) if decode else (p.batch * p.heads_q, p.group),
        sizes=(kv_bytes(p),) if decode else (p.seq_q, p.seq_k, p.dim_qk, p.dim_v),
        hidden=(p.causal, p.window is not None, p.key_lengths),
        ragged=p.seq_q > 1 and not p.page and p.seq_k % TILE != 0,
    )


def doublings(seen: Traits, asked: Traits) -> float:
    """How far apart two problems are: by how many doublings their sizes differ, added up; inf for unlike kinds.

    Doublings of heads count half. A way to hide positions that only one of them uses counts as one doubling, and a last
    tile that only one of them fills as two.
    """
    if seen.kind != asked.kind:
        return math.inf
    heads, sizes = _added_up(seen.heads, asked.heads), _added_up(seen.sizes, asked.sizes)
    hidden = sum(a != b for a, b in zip(seen.hidden, asked.hidden, strict=True))
    return 0.5 * heads + sizes + hidden + _RAGGED * (seen.ragged != asked.ragged)


def weight(away: float) -> float:
    """How much a class counts that is ``away`` doublings from a problem."""
    return 1 / (0.25 + away) ** 2


def _added_up(some: tuple[int, ...], others: tuple[int, ...]) -> float:
    return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in zip(some, others, strict=True))


def covers(seen: Problem, problem: Problem) -> bool:
    """Whether a fault that was seen on ``seen`` has to be expected on ``problem``.

    A case is reduced before it is remembered, so the fault needs all that is left in it. It is expected wherever all of
    that is there and no size is smaller. An empty problem, and a scale of 0 or less, fail in ways of their own. Another
    dtype is another kernel.
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
    return all(bool(getattr(problem, fact)) for fact in _NEEDED if getattr(seen, fact))
