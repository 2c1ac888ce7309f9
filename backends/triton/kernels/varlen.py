"""Sequences one after another, without padding: where each of them lies, and the rows past the last one.

The grid has an entry for each sequence and one more, ``batch``, whose rows are those that belong to none. Its programs
clear what would be computed there. Nothing of these rows is loaded, nor is what lies next to a sequence.
"""

import triton
import triton.language as tl

from ...own.arithmetic import PADDING
from .tile import store_rows

_PADDING = tl.constexpr(PADDING)


@triton.jit
def sequence(CU, words, b, batch, rows):
    """The first row of entry ``b``, in 64 bits, and how many it has. ``rows`` are those of all entries.

    An offset is ``words`` of 32 bits, of which the first says it.
    """
    begin = tl.load(CU + b * words).to(tl.int64)
    end = tl.load(CU + tl.minimum(b + 1, batch) * words).to(tl.int64)
    end = tl.where(b == batch, rows, end)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def padded_rows(length):
    """Rows of a sequence in what the backward reads row by row: whole tiles."""
    return tl.cdiv(length, _PADDING) * _PADDING


@triton.jit
def padded_begin(begin, b):
    """Where those rows begin: each sequence has room for its padding, of which lengths before it need not be known."""
    return (begin + b * _PADDING) // _PADDING * _PADDING


@triton.jit
def clear(
    ARRAY, by_h, by_l, head, pack, first, rows, leap, dim,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Zeros in rows ``first`` to ``first + BLOCK``, and in as many after every ``leap``, up to ``rows``.

    Row r is position ``r // pack`` of head ``head + r % pack``.
    """
    zeros = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in range(first, rows, leap):
        r = start + tl.arange(0, BLOCK)
        at = (head + r % pack).to(tl.int64) * by_h + (r // pack).to(tl.int64) * by_l
        store_rows(ARRAY + at[:, None], zeros, r < rows, 1, dim, BLOCK_D, EVEN_D)
