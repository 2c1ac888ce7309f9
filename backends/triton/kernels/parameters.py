"""What kernels are passed beside arrays, by name: the host fills these tuples, and kernels read their fields.

Triton looks at every integer that it is passed to compile for it, those in tuples included. Here that is done for
``Steps`` and ``Dims`` alone (see ``run``), and a kernel serves every size of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "Dims",
    "PagedSizes",
    "Random",
    "Reach",
    "Rows",
    "Scores",
    "Sizes",
    "SlopedScores",
    "Splits",
    "Steps",
    "Strides",
    "VarlenSizes",
    "Visits",
]

#: A number on the host, and a scalar or a constant in a kernel.
Number = Any


class Steps(NamedTuple):
    """Elements from one batch entry, head, row and column of an array to the next."""

    b: Number
    h: Number
    l: Number  # noqa: E741
    d: Number


class Strides(NamedTuple):
    """Of query, key, value, mask, and of the output or its gradient."""

    q: Steps
    k: Steps
    v: Steps
    o: Steps
    m: Steps


class Rows(NamedTuple):
    """Rows of a gradient from one head to the next, and from one position."""

    h: Number
    l: Number  # noqa: E741


class Sizes(NamedTuple):
    """Batch entries, query heads, query heads that share a key head, queries, the same in whole tiles, keys."""

    batch: Number
    heads_q: Number
    group: Number
    seq_q: Number
    padded: Number
    seq_k: Number


class VarlenSizes(NamedTuple):
    """The same of sequences one after another, whose lengths are the most of any; and the rows of all of them.

    ``padded`` are all rows in whole tiles for each sequence, ``rows_q`` and ``rows_k`` count those past the last one.
    Offsets of queries and of keys are ``cu_q`` and ``cu_k`` words of 32 bits each.
    """

    batch: Number
    heads_q: Number
    group: Number
    seq_q: Number
    padded: Number
    seq_k: Number
    rows_q: Number
    rows_k: Number
    cu_q: Number
    cu_k: Number


class PagedSizes(NamedTuple):
    """The same of keys in pages: rows of a page, and entries from one sequence's table to the next.

    Queries may lie in sequences one after another, whose rows ``rows_q`` counts, and ``cu_q`` the words of an offset.
    Scales of keys and of values lie apart by page and by head, and are all the same one where that is 0. Bits of a tree
    lie apart by sequence and by row.
    """

    batch: Number
    heads_q: Number
    group: Number
    seq_q: Number
    padded: Number
    seq_k: Number
    rows_q: Number
    cu_q: Number
    page: Number
    table: Number
    k_page: Number = 0
    k_head: Number = 0
    v_page: Number = 0
    v_head: Number = 0
    tree_b: Number = 0
    tree_l: Number = 0


class Dims(NamedTuple):
    """Head dimensions of query and key, and of value."""

    qk: Number
    v: Number


class Reach(NamedTuple):
    """Alignment of the diagonal (1 for bottom right), and how far to the left and right of it a query sees.

    Key lengths are ``words`` of 32 bits each: 1, or 2, of which the first says it.
    """

    bottom_right: Number
    left: Number
    right: Number
    words: Number


class Splits(NamedTuple):
    """Programs that share the keys of a row, and how many keys each takes."""

    count: Number
    chunk: Number


class Scores(NamedTuple):
    """The softmax's scale, what the products q . k are multiplied by first, and the cap."""

    scale: Number
    factor: Number
    cap: Number


class SlopedScores(NamedTuple):
    """The same, and elements from one batch entry's slopes to the next, and from one head's."""

    scale: Number
    factor: Number
    cap: Number
    slope_b: Number
    slope_h: Number


class Random(NamedTuple):
    """Two words of the seed, the threshold below which a weight is dropped, and the factor of those that are kept."""

    seed_low: Number
    seed_high: Number
    threshold: Number
    keep_scale: Number


class Visits(NamedTuple):
    """Lists of tiles from one batch entry, head and tile to the next; 0 where they share one."""

    b: Number
    h: Number
    t: Number
