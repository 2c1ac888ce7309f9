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
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds. The counters may have shapes that broadcast: the first rounds then cost a row or a column only."""
    for _ in tl.static_range(10):
        high, low = _wide(c0, 0xD2511F53)
        high2, low2 = _wide(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ k0
        c2 = high ^ c3 ^ k1
        c1 = low2
        c3 = low
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def kept(b, h, i, first, seed_low, seed_high, threshold, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights of a tile (ROWS, KEYS) stay, its keys dealt as ``tile.columns`` says; ``h`` and ``i`` are (ROWS, 1).

    ``first`` is the first key of the tile, a multiple of 4.
    """
    block = (first // 4 + tl.arange(0, KEYS // 4))[None, :].to(tl.uint32)
    w0, w1, w2, w3 = philox(block, i.to(tl.uint32), h.to(tl.uint32), b.to(tl.uint32), seed_low, seed_high)
    shape: tl.constexpr = (ROWS, KEYS // 4)
    w0, w1 = tl.broadcast_to(w0, shape), tl.broadcast_to(w1, shape)
    w2, w3 = tl.broadcast_to(w2, shape), tl.broadcast_to(w3, shape)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(words, (0, 2, 3, 1)), (ROWS, KEYS)) >= threshold
