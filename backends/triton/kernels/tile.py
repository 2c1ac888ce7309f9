"""What all kernels do with one tile of scores: which positions it hides, softcap, and the terms of a mask.

Positions: i counts queries, j keys. A query stands at key ``i + offset`` and sees from ``i + offset - left`` to
``i + offset + right``, before ``end``. ``i`` and ``j`` are index tensors that broadcast against each other, so that the
same functions serve a tile (queries, keys) and its transpose.

What goes together is handed on together: ``span`` is (end, offset, left, right), and ``mask`` (first element, offsets
of its rows, step from key to key, length of the keys). ``how`` is the kernel's ``Variant``.
"""

import triton
import triton.language as tl

#: Kinds of attn_mask, as constexpr arguments of the kernels.
NO_MASK = tl.constexpr(0)
BOOL_MASK = tl.constexpr(1)
FLOAT_MASK = tl.constexpr(2)

#: Which tiles of a loop may hold hidden positions.
NO_EDGE = tl.constexpr(0)
EVERY_EDGE = tl.constexpr(1)
SOME_EDGES = tl.constexpr(2)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

#: The interpreter multiplies the bits of bfloat16 as integers, and cuts them off where it should round (seen in Triton
#: 3.9): there, products take float32, and rounding is done by hand.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def extent(LENGTHS, b, seq_q, seq_k, reach, how: tl.constexpr):
    """Keys of batch entry ``b``, and the offset of its diagonal."""
    end = seq_k
    if how.has_lengths:
        end = tl.minimum(tl.maximum(tl.load(LENGTHS + b * reach.words), 0), seq_k)
    return end, (end - seq_q) * reach.bottom_right


@triton.jit
def key_range(first, last, span, how: tl.constexpr):
    """Keys that queries ``first`` to ``last`` (inclusive) need, and those among them that each of them sees.

    Returns (lo, full_lo, full_hi, hi) with lo <= full_lo <= full_hi; all but hi are multiples of a tile.
    """
    end, offset, left, right = span
    lo = 0
    full_lo = 0
    hi = end
    full_hi = end
    if how.has_left:
        lo = tl.maximum(first + offset - left, 0) // how.block_n * how.block_n
        full_lo = tl.cdiv(tl.maximum(last + offset - left, 0), how.block_n) * how.block_n
    if how.has_right:
        hi = tl.minimum(end, last + offset + right + 1)
        full_hi = tl.minimum(end, first + offset + right + 1)
    if how.tree:
        full_hi = tl.minimum(full_hi, offset)
    hi = tl.maximum(hi, 0)
    full_hi = tl.maximum(full_hi, 0) // how.block_n * how.block_n
    if how.has_left:
        full_lo = tl.minimum(full_lo, tl.cdiv(hi, how.block_n) * how.block_n)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_range(first, last, seq_q, span, how: tl.constexpr):
    """Queries that see any of the keys ``first`` to ``last`` (inclusive), and those among them that see each.

    Returns (lo, full_lo, full_hi, hi) as ``key_range`` does.
    """
    _, offset, left, right = span
    lo = 0
    full_lo = 0
    hi = seq_q
    full_hi = seq_q
    if how.has_right:
        lo = tl.maximum(first - offset - right, 0) // how.block_m * how.block_m
        full_lo = tl.cdiv(tl.maximum(last - offset - right, 0), how.block_m) * how.block_m
    if how.has_left:
        hi = tl.minimum(seq_q, last - offset + left + 1)
        full_hi = tl.minimum(seq_q, first - offset + left + 1)
    hi = tl.maximum(hi, 0)
    full_hi = tl.maximum(full_hi, 0)
    # The last tile of queries may be short: what lies past the end weighs nothing, so it counts as full.
    full_hi = tl.where(
        full_hi >= seq_q, tl.cdiv(seq_q, how.block_m) * how.block_m, full_hi // how.block_m * how.block_m
    )
    if how.has_right:
        full_lo = tl.minimum(full_lo, tl.cdiv(hi, how.block_m) * how.block_m)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def columns(BLOCK: tl.constexpr, DEALT: tl.constexpr):
    """Which key of its tile each column is. DEALT, as dropout wants it: keys 0, 4, 8, ... then 1, 5, 9, ... and so on.

    Philox makes the numbers of four neighbouring keys at once. Dealt like cards, the four lie a quarter of a tile
    apart, where one thread holds them all; the order of keys within a tile changes nothing else.
    """
    n = tl.arange(0, BLOCK)
    if DEALT:
        n = n % (BLOCK // 4) * 4 + n // (BLOCK // 4)
    return n


@triton.jit
def load_rows(rows, inside, step, dim, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """The rows that ``rows`` (n, 1) points at, where ``inside`` (n,); 0 elsewhere and beyond ``dim``."""
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None]
    if not EVEN_D:  # a mask along the row would keep its loads from being wide
        mask = mask & (d < dim)
    return tl.load(rows + d * step, mask=mask, other=0.0)


@triton.jit
def store_rows(rows, tile, inside, step, dim, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """Write ``tile`` (n, BLOCK_D) where ``rows`` (n, 1) points, in its type."""
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None]
    if not EVEN_D:
        mask = mask & (d < dim)
    tl.store(rows + d * step, rounded(tile, rows.dtype.element_ty), mask=mask)


@triton.jit
def tile_of(
    at, b, head, start, end, dim,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    EDGE: tl.constexpr, CLEAN: tl.constexpr, DEALT: tl.constexpr, how: tl.constexpr, where=None,
):  # fmt: skip
    """Rows ``start`` to ``start + BLOCK`` of a (batch, heads, L, dim) array, 0 beyond ``dim``; DEALT as ``columns``.

    ``at`` is the array and its last two strides: a tensor descriptor of all of it (tma), which reads 0 beyond L, or the
    head's first element, and it is read up to ``end`` at an EDGE. CLEAN: what lies beyond ``end`` is 0 either way, be
    it NaN in memory. Of a paged array ``at`` has the step from page to page too, and ``where`` are these rows'
    ``places``.
    """
    array, stride, step = at[0], at[1], at[2]
    n = columns(BLOCK, DEALT)
    if how.tma:
        if DEALT:  # the descriptor's L is split into (4, L / 4)
            tile = tl.reshape(array.load([b, head, 0, start // 4, 0]), (BLOCK, BLOCK_D))
        else:
            tile = tl.reshape(array.load([b, head, start, 0]), (BLOCK, BLOCK_D))
        if EDGE and CLEAN:
            tile = tl.where((start + n < end)[:, None], tile, 0.0)
    else:
        d = tl.arange(0, BLOCK_D)
        rows = n
        if how.wide:
            rows = n.to(tl.int64)
            d = d.to(tl.int64)
        if how.paged:
            page, row = where
            at_row = array + page * at[3] + row * stride
        else:
            at_row = array + start.to(tl.int64) * stride + rows[:, None] * stride
        there = d < dim
        if how.aligned:
            at_row = tl.multiple_of(at_row, (1, 16))
            STEP: tl.constexpr = 128 // array.dtype.element_ty.primitive_bitwidth
            there = d // STEP < tl.cdiv(dim, STEP)
        place = at_row + d[None, :] * step
        if EDGE:
            tile = tl.load(place, mask=(start + n < end)[:, None] & there[None, :], other=0.0)
        elif EVEN_D:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=there[None, :], other=0.0)
    return tile


@triton.jit
def visible(i, j, span, ENDS: tl.constexpr, how: tl.constexpr):
    """Whether query i sees key j, by position, and by length where it ENDS."""
    end, offset, left, right = span
    seen = tl.full(j.shape, 1, tl.int1)
    if ENDS:
        seen = j < end
    if how.has_right:
        seen = seen & (j <= i + offset + right)
    if how.has_left:
        seen = seen & (j >= i + offset - left)
    return seen


@triton.jit
def in_tree(j, offset, tree):
    """Whether key j is older than the queries, or a bit of ``tree`` names it: (bytes of each row, queries, 0, 0)."""
    rows, queries, _, _ = tree
    n = tl.maximum(j - offset, 0)  # the query whose key it is
    word = tl.load(rows + n // 8, mask=n < queries, other=0)
    return (j < offset) | ((word >> (n % 8).to(tl.uint8)) & 1 != 0)


@triton.jit
def hide(
    s, i, n, start, span, mask,
    MASK_KIND: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """``s`` plus a float mask, -inf where it is not visible, and what is visible, for keys ``start + n``.

    The mask's rows exist, also for queries that do not: what those get is thrown away. ENDS: keys may end within the
    tile. BOUND: it may reach past the last key, and the mask is read with a test of every key. Of a tree ``mask`` is
    what ``in_tree`` takes.
    """
    j = start + n
    seen = visible(i, j, span, ENDS, how)
    if how.tree:
        seen = seen & in_tree(j, span[1], mask)
    if MASK_KIND != NO_MASK:
        array, rows, step, seq_k = mask
        place = array + start.to(tl.int64) * step + (rows + n * step)
        if BOUND:
            tile = tl.load(place, mask=j < seq_k, other=0)
        else:
            tile = tl.load(place)
        if MASK_KIND == BOOL_MASK:
            seen = seen & (tile != 0)
        else:
            bias = float_mask(tile)
            seen = seen & (bias != float("-inf"))
            s = s + bias
    s = tl.where(seen, s, float("-inf"))
    return s, seen


@triton.jit
def sloped(s, i, n, start, offset, slope):
    """``s`` less the slope times the distance from query i to key ``start + n``.

    A row's place is counted from the tile, so that it is one conversion a row, and none a score: exact up to 2^24 keys,
    and as near as float32 beyond.
    """
    away = (i + (offset - start)).to(tl.float32) - n.to(tl.float32)
    return s - slope * tl.abs(away)


@triton.jit
def with_sink(top, total, sink):
    """Maximum and sum of a row with the sink among its scores, and what becomes of weights relative to the old maximum.

    A row that has seen nothing, and has no sink, keeps -inf and 0.
    """
    new_top = tl.maximum(top, sink)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2((top - base) * LOG2E)
    return new_top, total * rescale + tl.exp2((sink - base) * LOG2E), rescale


@triton.jit
def tanh(x):
    """Tanh to a few units in the last place: near 0 by its series, elsewhere by exp2."""
    a = tl.abs(x)
    e = tl.exp2(a * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    y = a * a
    near = -1382.0 / 155925.0
    near = near * y + 62.0 / 2835.0
    near = near * y - 17.0 / 315.0
    near = near * y + 2.0 / 15.0
    near = near * y - 1.0 / 3.0
    near = a * (near * y + 1.0)
    t = tl.where(a < 0.3, near, far)
    return tl.where(x < 0, -t, t)


@triton.jit
def float_mask(tile):
    """A loaded float mask in float32. A finite number that float32 cannot hold does not become an infinity."""
    if tile.dtype == tl.float64:
        limit = 3.4028234663852886e38
        clipped = tl.minimum(tl.maximum(tile, -limit), limit)
        infinite = (tile == float("inf")) | (tile == float("-inf")) | (tile != tile)
        tile = tl.where(infinite, tile, clipped)
    return tile.to(tl.float32)


@triton.jit
def product(a, b, acc=None):
    """``a @ b``, added to ``acc``, in float32; float32 operands in IEEE arithmetic."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 ``x`` in ``dtype``, to the nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """``x`` of 8 bits in ``dtype``, which has each of its numbers."""
    if x.dtype.is_int8():
        wide = x.to(tl.float32).to(dtype)
    else:
        wide = x.to(tl.float16).to(dtype)
    return wide


@triton.jit
def weights(s, base, rest, factor, how: tl.constexpr):
    """exp(score - lse). Folded, ``s`` are products q . k and ``base`` is lse for exp2; else both are natural.

    ``rest`` is what base lacks of lse where a float mask is added (``prepare_added``). There a score is never above
    base: its last bit is 64 where the mask is -1e9, and another kernel may have rounded it the other way.
    """
    if how.fold:
        p = tl.exp2(s * factor - base)
    elif how.mask_kind == FLOAT_MASK:
        p = tl.exp2((tl.minimum(s, base) - base) * LOG2E - rest)
    else:
        p = tl.exp2((s - base) * LOG2E)
    return p
