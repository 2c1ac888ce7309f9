"""Keys in pages: where the rows of a tile are, by the table of their sequence, and by what those of 8 bits are scaled.

Neither entries of the table past the length are read, nor rows of a page past it.
"""

import triton
import triton.language as tl

from .tile import product, rounded, widened


@triton.jit
def share(lo, hi, split, count, BLOCK_N: tl.constexpr):
    """Keys of this split: of those that are seen, whole tiles alike, so that no other sequence has a say in them."""
    chunk = tl.cdiv(tl.maximum(hi - lo, 0), count * BLOCK_N) * BLOCK_N
    lo += split * chunk
    return lo, tl.minimum(hi, lo + chunk)


@triton.jit
def places(paging, start, end, EDGE: tl.constexpr, how: tl.constexpr):
    """Of the keys from ``start`` on, (BLOCK_N, 1) each: the number of its page, in 64 bits, and its row there.

    ``paging`` is the sequence's table, and the rows of a page. EDGE: keys may end within the tile.
    """
    table, page = paging
    j = start + tl.arange(0, how.block_n)
    at = j // page
    row = j - at * page
    if EDGE:
        number = tl.load(table + at, mask=j < end, other=0)
    else:
        number = tl.load(table + at)
    if how.wide:
        row = row.to(tl.int64)
    return number.to(tl.int64)[:, None], row[:, None]


@triton.jit
def scales_of(paging, at, start, end, EDGE: tl.constexpr, how: tl.constexpr):
    """The scales of the pages of these keys, (BLOCK_N,), 0 past the end.

    ``at`` are those of the head, and the step from page to page.
    """
    table, page = paging
    array, step = at
    j = start + tl.arange(0, how.block_n)
    if EDGE:
        number = tl.load(table + j // page, mask=j < end, other=0)
        scales = tl.load(array + number.to(tl.int64) * step, mask=j < end, other=0.0)
    else:
        scales = tl.load(array + tl.load(table + j // page).to(tl.int64) * step)
    return scales


@triton.jit
def add_scaled(acc, p, v, scales, dtype: tl.constexpr):
    """``acc`` and the product of weights ``p`` and values ``v`` of 8 bits, which stand for themselves times ``scales``.

    The weights take the scales over the largest of them, so that they stay within what ``dtype`` has.
    """
    largest = tl.max(tl.abs(scales))
    largest = tl.where(largest == 0.0, 1.0, largest)
    return acc + product(rounded(p * (scales / largest)[None, :], dtype), widened(v, dtype)) * largest
