"""The dropout mask of a seed, as ``attnswitch.problem.philox`` defines it, for one tile.

Element (b, h, i, j) is decided by word ``j % 4`` of Philox4x32-7 (Salmon, Moraes, Dror and Shaw 2011) at the counter
(j // 4, i, h, b).
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def seeded(random):
    """The words of the seed without a sign, and the threshold."""
    return random.seed_low.to(tl.uint32, bitcast=True), random.seed_high.to(tl.uint32, bitcast=True), random.threshold


@triton.jit
def _wide(word, FACTOR: tl.constexpr):
    """High and low half of a 32 x 32 bit product."""
    full = word.to(tl.uint64) * FACTOR
    return (full >> 32).to(tl.uint32), full.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1, zero):
    """Four words. The counters may have shapes that broadcast: the first two rounds then cost a row or a column only.

    ``zero`` is 0 in the full shape. The rounds that follow are computed where its elements lie.
    """
    for turn in tl.static_range(ROUNDS):
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
def _keeps(word, threshold):
    """1.0 where the weight is kept, 0.0 where it is dropped: the high 23 bits are those of a number from 1 to 2.

    That number less the threshold, in units of its last place and cut off to (0, 1), needs no comparison; the units
    that compare and shift have the rounds of the generator to do, and those that multiply have time.
    """
    bar = -8388607.0 - threshold.to(tl.float32)
    if _INTERPRETED:
        number = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        return tl.minimum(tl.maximum(number * 8388608.0 + bar, 0.0), 1.0)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 n; mad.hi.u32 n, $1, 0x800000, 0x3F800000; fma.rn.sat.f32 $0, n, 0f4B000000, $2; }",
        "=f,r,f",
        [word, bar],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def origin(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """0 for each counter of a tile, in the threads that hold its weights if ``x`` (ROWS, KEYS) lies as they do."""
    x0, _, _, _ = _quarters(tl.exp2(x), ROWS, KEYS)
    return (x0 < -1.0).to(tl.uint32)  # never, which the compiler does not know


@triton.jit
def keeps(zero, b, h, i, first, random, KEYS: tl.constexpr):
    """1.0 for what is kept of a tile and 0.0 for the rest, as four of (ROWS, KEYS / 4) that lie as ``zero`` does.

    ``h`` and ``i`` are (ROWS, 1); ``first``, the first key of the tile, is a multiple of 4; ``random`` is the two words
    of the seed and the threshold.
    """
    seed_low, seed_high, threshold = random
    block = (first // 4 + tl.arange(0, KEYS // 4))[None, :].to(tl.uint32)
    w0, w1, w2, w3 = _philox(block, i.to(tl.uint32), h.to(tl.uint32), b.to(tl.uint32), seed_low, seed_high, zero)
    return _keeps(w0, threshold), _keeps(w1, threshold), _keeps(w2, threshold), _keeps(w3, threshold)


@triton.jit
def drop(p, k0, k1, k2, k3, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """``p`` (ROWS, KEYS), its keys dealt as ``tile.columns`` says, with 0 for what ``keeps`` drops."""
    p0, p1, p2, p3 = _quarters(p, ROWS, KEYS)
    return _whole(p0 * k0, p1 * k1, p2 * k2, p3 * k3, ROWS, KEYS)


@triton.jit
def kept(b, h, i, first, random, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights of a tile (ROWS, KEYS) stay, its keys dealt: for tiles that lie otherwise."""
    k0, k1, k2, k3 = keeps(0, b, h, i, first, random, KEYS)
    shape: tl.constexpr = (ROWS, KEYS // 4)
    k0, k1 = tl.broadcast_to(k0, shape), tl.broadcast_to(k1, shape)
    k2, k3 = tl.broadcast_to(k2, shape), tl.broadcast_to(k3, shape)
    return _whole(k0, k1, k2, k3, ROWS, KEYS) > 0.0


@triton.jit
def _quarters(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """A dealt tile (ROWS, KEYS) as four of (ROWS, KEYS / 4): element (r, c) of each belongs to the same counter."""
    dealt = tl.permute(tl.reshape(x, (ROWS, 4, KEYS // 4)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(dealt, (ROWS, KEYS // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _whole(x0, x1, x2, x3, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The dealt tile of four quarters."""
    dealt = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(tl.permute(dealt, (0, 2, 3, 1)), (ROWS, KEYS))
