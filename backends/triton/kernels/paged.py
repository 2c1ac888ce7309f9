"""Keys in pages: where the rows of a tile are, by the table of their sequence.

Neither entries of the table past the length are read, nor rows of a page past it.
"""

import triton
import triton.language as tl


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
