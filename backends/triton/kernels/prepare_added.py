"""What ``prepare`` makes of each row, where a float mask is added; and ``rest``: P = exp(S - base - rest).

A mask may move all scores of a row so far from 0 (-1e9, as models hide padding) that lse has no digits left for the
logarithm of their sum. In such rows base is the largest score, and rest the logarithm of the sum relative to it, in
base 2; in all others rest is 0. lse comes from any kernel, and no other statistic with it, so a program looks at the
keys again if one of its rows is such a row.
"""

import triton
import triton.language as tl

from .tile import FLOAT_MASK, LN2, LOG2E, extent, hide, key_range, load_rows, product, sloped, tanh, with_sink

#: From here on the rounding of lse is one of weights by 2^-11, which 16-bit results hardly show.
_FAR = tl.constexpr(8192.0)
#: How far apart roundings of one lse may be, relative to it.
_ROUNDING = tl.constexpr(4.8e-7)


@triton.jit
def _normaliser(Q, K, MASK, first, i, inside, span, slope, by, seq_q, seq_k, dims, scores, how: tl.constexpr):
    """The largest score of each row, and the sum relative to it. ``Q``, ``K`` and ``MASK`` are of one head."""
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    q = load_rows(Q + (i * by.q.l)[:, None], inside, by.q.d, dims.qk, how.block_d, how.even_d)
    lo, _, _, hi = key_range(first, tl.minimum(first + BLOCK_M, seq_q) - 1, span, how)
    n = tl.arange(0, BLOCK_N)
    mask_rows = tl.minimum(i, seq_q - 1)[:, None] * by.m.l
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for t in tl.range(lo // BLOCK_N, tl.cdiv(hi, BLOCK_N)):
        start = t * BLOCK_N
        j = (start + n).to(tl.int64)
        k = load_rows(K + (j * by.k.l)[:, None], j < span[0], by.k.d, dims.qk, how.block_d, how.even_d)
        s = product(q, tl.trans(k)) * scores.factor
        if how.softcap:
            s = tanh(s) * scores.cap
        if how.generic:
            s = tl.where(scores.cap > 0.0, tanh(s) * scores.cap, s)
        if how.alibi:
            s = sloped(s, i[:, None], n[None, :], start, span[1], slope)
        s, _seen = hide(
            s, i[:, None], n[None, :].to(tl.int64), start, span, (MASK, mask_rows, by.m.d, seq_k),
            FLOAT_MASK, True, True, how,
        )  # fmt: skip
        here = tl.maximum(top, tl.max(s, 1))
        base = tl.where(here == float("-inf"), 0.0, here)
        total = total * tl.exp2((top - base) * LOG2E) + tl.sum(tl.exp2((s - base[:, None]) * LOG2E), 1)
        top = here
    return top, total


@triton.jit
def prepare_added(
    Q, K, OUT, DO, MASK, LENGTHS, LSE, DLSE, SINKS, SLOPES, DELTA, BASE,
    by, by_out, sizes, dims, reach, scores,
    WITH_DLSE: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(dO O) - dlse, (batch, heads, padded); base and rest in BASE, (2, batch, heads, padded).

    Base is +inf for rows that see nothing and for those past Lq, so that they weigh 0 without a test.
    """
    BLOCK_M: tl.constexpr = how.block_m
    batch, heads, group, seq_q, padded, seq_k = sizes
    at = tl.program_id(0).to(tl.int64) * BLOCK_M
    line = at // padded  # one head's: padded is whole tiles
    b = line // heads
    h = line % heads
    first = (at % padded).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    i = first.to(tl.int64) + rows
    inside = i < seq_q
    o = load_rows(
        OUT + (b * by_out.b + h * by_out.h + i * by_out.l)[:, None],
        inside, by_out.d, dims.v, how.block_dv, how.even_dv,
    )  # fmt: skip
    do = load_rows(
        DO + (b * by.o.b + h * by.o.h + i * by.o.l)[:, None], inside, by.o.d, dims.v, how.block_dv, how.even_dv
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    saved = line * seq_q + i
    if WITH_DLSE:
        delta -= tl.load(DLSE + saved, mask=inside, other=0.0)
    lse = tl.load(LSE + saved, mask=inside, other=float("-inf"))
    base = tl.where(lse == float("-inf"), float("inf"), lse)
    rest = tl.zeros((BLOCK_M,), tl.float32)
    size = tl.abs(lse)
    far = (size >= _FAR) & (size < float("inf"))
    if tl.max(far.to(tl.int32), 0) > 0:
        end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
        slope = 0.0
        if how.alibi:
            slope = tl.load(SLOPES + b * scores.slope_b + h * scores.slope_h)
        top, total = _normaliser(
            Q + b * by.q.b + h * by.q.h, K + b * by.k.b + h // group * by.k.h, MASK + b * by.m.b + h * by.m.h,
            first, i, inside, (end, offset, reach.left, reach.right), slope, by, seq_q, seq_k, dims, scores, how,
        )  # fmt: skip
        if how.sinks:
            top, total, _rescale = with_sink(top, total, tl.load(SINKS + h))
        own = tl.log2(total)
        of_more = lse - top > own * LN2 + size * _ROUNDING  # of other keys too: it is taken as it is
        base = tl.where(far, tl.where(of_more, lse, top), base)
        rest = tl.where(far, tl.where(of_more, 0.0, own), rest)
    tl.store(DELTA + at + rows, delta)
    tl.store(BASE + at + rows, base)
    tl.store(BASE + batch.to(tl.int64) * heads * padded + at + rows, rest)
