"""dQ: a program has a tile of queries of one head, and visits the keys that they see."""

import triton
import triton.language as tl

from .lists import visit
from .panels import panel_at, product_of_panels
from .philox import kept, seeded
from .score_gradient import score_gradient
from .tile import (
    EVERY_EDGE,
    FLOAT_MASK,
    NO_EDGE,
    NO_MASK,
    SOME_EDGES,
    columns,
    extent,
    key_range,
    load_rows,
    product,
    rounded,
    store_rows,
    tile_of,
)
from .varlen import clear, padded_begin, sequence


@triton.jit
def _over_keys(
    dq, q, do, base, delta, rest, i, h, b, head, k_at, v_at, mask, tiles, t0, t1, full, span, slope, scores, random,
    keep_scale, dim, dim_v, column,
    MASK_KIND: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr,
    BOUND: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Add what the key tiles ``t0`` to ``t1`` give to dQ; edges and STRETCH as in the forward.

    Of wide heads ``q`` and ``do`` are rows, and ``column`` is the first of the panel of dQ.
    """
    end = span[0]
    first_full, last_full = full
    for t in tl.range(t0, t1):
        start = t * how.block_n
        if LISTED:
            start = tl.load(tiles + t) * how.block_n
        k_own = k_at
        if how.panelled:
            k_own = panel_at(k_at, column, how)
        k = tile_of(
            k_own, b, head, start, end, dim - column,
            how.block_n, how.block_d, how.even_d, ENDS, how.has_lengths, how.dropout, how,
        )  # fmt: skip
        if how.panelled:
            s = product_of_panels(
                q, k_at, b, head, start, end, dim,
                how.block_m, how.block_n, how.block_d, how.even_d, ENDS, how.has_lengths, how.dropout, how,
            )  # fmt: skip
            dp = product_of_panels(
                do, v_at, b, head, start, end, dim_v,
                how.block_m, how.block_n, how.block_dv, how.even_dv, ENDS, False, how.dropout, how,
            )  # fmt: skip
        else:
            v = tile_of(
                v_at, b, head, start, end, dim_v, how.block_n, how.block_dv, how.even_dv, ENDS, False, how.dropout, how
            )
            s = product(q, tl.trans(k))
            dp = product(do, tl.trans(v))
        keep = True
        if how.dropout:
            keep = kept(b, h, i, start, random, how.block_m, how.block_n)
        n = columns(how.block_n, how.dropout)[None, :]
        if how.wide:
            n = n.to(tl.int64)
        _, _, dqk = score_gradient(
            s, dp, base, delta, rest, i, n, start, (t < first_full) | (t >= last_full), span, mask, slope, scores,
            keep, keep_scale, MASK_KIND, EDGE, STRETCH, ENDS, BOUND, how,
        )  # fmt: skip
        dq = product(rounded(dqk, k.dtype), k, dq)
    return dq


@triton.jit
def query_gradient(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, CU_Q, CU_K, TILES, COUNTS, SLOPES, DQ,
    by, by_grad, visits, sizes, dims, reach, section, scores, random,
    how: tl.constexpr,
):  # fmt: skip
    """DQ (batch, heads_q, Lq, dim): one tile of queries of one head a program, in the order of the forward."""
    batch, heads_q, group = sizes.batch, sizes.heads_q, sizes.group
    seq_q, padded, seq_k = sizes.seq_q, sizes.padded, sizes.seq_k
    entries = batch
    if how.varlen:
        entries += 1
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    BLOCK_D: tl.constexpr = how.block_d
    BLOCK_DV: tl.constexpr = how.block_dv
    dice = seeded(random)
    count = tl.cdiv(seq_q, BLOCK_M)
    pid = tl.program_id(0)
    column = 0  # the first of this program's panel of DQ
    if how.panelled:
        panels = tl.cdiv(dims.qk, BLOCK_D)
        column = pid % panels * BLOCK_D
        pid = pid // panels
    whole = section * count
    at = pid // whole * section
    here = tl.minimum(section, entries * heads_q - at)
    tile = count - 1 - pid % whole // here
    at = at + pid % whole % here
    b = at // heads_q
    h = at % heads_q
    head = h // group
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    first = tile * BLOCK_M
    if how.varlen:
        begin_q, seq_q = sequence(CU_Q, sizes.cu_q, b, batch, sizes.rows_q)
        begin_k, seq_k = sequence(CU_K, sizes.cu_k, b, batch, sizes.rows_k)
        Q += begin_q * by.q.l
        DO += begin_q * by.o.l
        K += begin_k * by.k.l
        V += begin_k * by.v.l
        DQ += begin_q * by_grad.l * dims.qk
        if b == batch:
            by_h, by_l = by_grad.h.to(tl.int64) * dims.qk, by_grad.l.to(tl.int64) * dims.qk
            leap = count * BLOCK_M
            clear(DQ + column, by_h, by_l, h, 1, first, seq_q, leap, dims.qk - column, BLOCK_M, BLOCK_D, how.even_d)
            return
        if first >= seq_q:
            return
    i = first + tl.arange(0, BLOCK_M)
    i64 = i.to(tl.int64)
    inside = i < seq_q
    q_rows = Q + (b64 * by.q.b + h64 * by.q.h + i64 * by.q.l)[:, None]
    q = (q_rows, inside, by.q.d)
    if not how.panelled:
        q = load_rows(q_rows, inside, by.q.d, dims.qk, BLOCK_D, how.even_d)
    do_rows = DO + (b64 * by.o.b + h64 * by.o.h + i64 * by.o.l)[:, None]
    do = (do_rows, inside, by.o.d)
    if not how.panelled:
        do = load_rows(do_rows, inside, by.o.d, dims.v, BLOCK_DV, how.even_dv)
    if how.varlen:
        rows = h64 * padded + padded_begin(begin_q, b) + i64
    else:
        rows = (b64 * heads_q + h64) * padded + i64
    base = tl.load(BASE + rows)[:, None]
    delta = tl.load(DELTA + rows)[:, None]
    rest = 0.0
    if how.mask_kind == FLOAT_MASK:
        rest = tl.load(BASE + batch.to(tl.int64) * heads_q * padded + rows)[:, None]
    end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
    span = (end, offset, reach.left, reach.right)
    last = tl.minimum(first + BLOCK_M, seq_q) - 1
    lo, full_lo, full_hi, hi = key_range(first, last, span, how)
    slope = 0.0
    if how.alibi:
        slope = tl.load(SLOPES + b * scores.slope_b + h * scores.slope_h)
    begin = lo // BLOCK_N
    mixed_end = tl.cdiv(hi, BLOCK_N)
    full = (full_lo // BLOCK_N, full_hi // BLOCK_N)
    stretch = (0, 0)
    if how.listed:
        where = b64 * visits.b + h * visits.h + tile * visits.t
        TILES += where * tl.cdiv(seq_k, BLOCK_N)
        begin = 0
        mixed_end, full, stretch = visit(COUNTS + where * 5)
    if not how.tma:
        K += b64 * by.k.b + head.to(tl.int64) * by.k.h
        V += b64 * by.v.b + head.to(tl.int64) * by.v.h
    mask = (0, 0, 0, 0)
    if how.mask_kind != NO_MASK:
        mask_rows = (tl.minimum(i64 if how.wide else i, seq_q - 1) - first)[:, None] * by.m.l
        mask = (MASK + b64 * by.m.b + h64 * by.m.h + first.to(tl.int64) * by.m.l, mask_rows, by.m.d, seq_k)
    hs = (h + tl.zeros_like(i))[:, None]
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    MASKED: tl.constexpr = how.mask_kind != NO_MASK
    RAGGED: tl.constexpr = how.has_right or how.has_lengths or not how.even_k
    ONE_LOOP: tl.constexpr = not MASKED and not how.has_lengths and (how.tma or how.even_k) and (how.has_left or RAGGED)
    STRETCH: tl.constexpr = how.listed and how.even_k and not how.has_lengths
    for part in tl.static_range(3):  # as in the forward
        t0, t1 = begin, full[0]
        sees = span
        if part == 0 and MASKED:
            t1 = mixed_end if how.even_k else mixed_end - 1
        if part == 1:
            t0, t1 = full
        if part == 1 and ONE_LOOP:
            t0, t1 = begin, mixed_end
        if part == 1 and STRETCH:
            t0, t1 = stretch[0] // BLOCK_N, tl.cdiv(stretch[1], BLOCK_N)
            sees = (stretch[1], offset, stretch[0], 0)
        if part == 2:
            t0, t1 = full[1], mixed_end
        if part == 2 and MASKED:
            t0 = tl.maximum(mixed_end - 1, begin)
        if part == 0 and how.generic:
            dq = _over_keys(
                dq, q, do, base, delta, rest, i[:, None], hs, b, head, (K, by.k.l, by.k.d), (V, by.v.l, by.v.d),
                mask, TILES, begin, mixed_end, full, span, slope, scores, dice, random.keep_scale, dims.qk, dims.v,
                column, how.mask_kind, False, EVERY_EDGE, False, True, True, how,
            )  # fmt: skip
        elif not how.generic and (
            (part == 0 and (how.has_left or MASKED) and not ONE_LOOP)
            or (part == 1 and (how.listed or not MASKED))
            or (part == 2 and ((RAGGED and not MASKED) or (MASKED and not how.even_k)) and not ONE_LOOP)
        ):
            dq = _over_keys(
                dq, q, do, base, delta, rest, i[:, None], hs, b, head, (K, by.k.l, by.k.d), (V, by.v.l, by.v.d),
                mask, TILES, t0, t1, full, sees, slope, scores, dice, random.keep_scale, dims.qk, dims.v, column,
                NO_MASK if part == 1 else how.mask_kind, how.listed and part != 1,
                EVERY_EDGE if part != 1 else (SOME_EDGES if ONE_LOOP or STRETCH else NO_EDGE), part == 1 and STRETCH,
                part != 1 and (how.has_lengths or (not how.even_k and (part == 2 or not MASKED))),
                part != 1 and not how.even_k and (part == 2 or not MASKED), how,
            )  # fmt: skip
    if how.varlen:
        rows = h64 * by_grad.h + i64 * by_grad.l
    else:
        rows = b64 * heads_q * seq_q + h64 * by_grad.h + i64 * by_grad.l
    at_row = DQ + column + (rows * dims.qk)[:, None]
    store_rows(at_row, dq * scores.scale, inside, 1, dims.qk - column, BLOCK_D, how.even_d)
