"""The dropout mask of a seed, as ``attnswitch.philox`` defines it, for one tile.

Element (b, h, i, j) is word ``j % 4`` of Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011) at (j // 4, i, h, b).
"""

import triton
import triton.language as tl


@triton.jit
def _wide(word, FACTOR: tl.constexpr):
    """High and low half of a 32 x 32 bit product."""
    full = word.to(tl.uint64) * FACTOR
    return (full >> 32).to(tl.uint32), full.to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, zero):
    """Ten rounds. The counters may have shapes that broadcast: the first two rounds then cost a row or a column only.

    ``zero`` is 0 in the full shape. The rounds that follow are computed where its elements lie.
    """
    for turn in tl.static_range(10):
        high, low = _wide(c0, 0xD2511F53)
        high2, low2 = _wide(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ k0
        c2 = high ^ c3 ^ k1
        c1 = low2
        c3 = low
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
        if turn == 1:
            c2 = c2 ^ zero
    return c0, c1, c2, c3


@triton.jit
def drop(p, b, h, i, first, seed_low, seed_high, threshold, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """``p`` (ROWS, KEYS), its keys dealt as ``tile.columns`` says, with 0 where the weight is dropped.

    ``h`` and ``i`` are (ROWS, 1); ``first``, the first key of the tile, is a multiple of 4. The four quarters of a row
    are the four words of the same counters, which are made where the first quarter lies: nothing is exchanged.
    """
    quarters = tl.permute(tl.reshape(p, (ROWS, 4, KEYS // 4)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(quarters, (ROWS, KEYS // 4, 2, 2)))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    block = (first // 4 + tl.arange(0, KEYS // 4))[None, :].to(tl.uint32)
    zero = (p0 < -1.0).to(tl.uint32)  # weights are not negative, which the compiler does not know
    w0, w1, w2, w3 = philox(block, i.to(tl.uint32), h.to(tl.uint32), b.to(tl.uint32), seed_low, seed_high, zero)
    p0 = tl.where(w0 >= threshold, p0, 0.0)
    p1 = tl.where(w1 >= threshold, p1, 0.0)
    p2 = tl.where(w2 >= threshold, p2, 0.0)
    p3 = tl.where(w3 >= threshold, p3, 0.0)
    whole = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(tl.permute(whole, (0, 2, 3, 1)), (ROWS, KEYS))


@triton.jit
def kept(b, h, i, first, seed_low, seed_high, threshold, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights of a tile (ROWS, KEYS) stay, in the order of ``drop``: for tiles that lie otherwise."""
    block = (first // 4 + tl.arange(0, KEYS // 4))[None, :].to(tl.uint32)
    w0, w1, w2, w3 = philox(block, i.to(tl.uint32), h.to(tl.uint32), b.to(tl.uint32), seed_low, seed_high, 0)
    shape: tl.constexpr = (ROWS, KEYS // 4)
    w0, w1 = tl.broadcast_to(w0, shape), tl.broadcast_to(w1, shape)
    w2, w3 = tl.broadcast_to(w2, shape), tl.broadcast_to(w3, shape)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(words, (0, 2, 3, 1)), (ROWS, KEYS)) >= threshold
