"""dK and dV: a program has a tile of keys, and visits the queries of all heads that share it."""

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
    columns,
    extent,
    load_rows,
    product,
    query_range,
    rounded,
    store_rows,
    tile_of,
)
from .varlen import clear, padded_begin, sequence


@triton.jit
def _over_queries(
    state, k, v, first, b, h, q_at, do_at, base_at, delta_at, rest_at, mask, tiles, t0, t1, seq_q, span, slope, scores,
    random, keep_scale, dim, dim_v, column,
    MASK_KIND: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Add what the query tiles ``t0`` to ``t1`` of one head give to dK and dV. Tiles are (keys, queries).

    ``mask`` has the step from query to query in place of offsets. Of wide heads ``k`` and ``v`` are rows, and
    ``column`` is the first of the panels of dK and dV.
    """
    dk, dv = state
    EVEN_D: tl.constexpr = how.even_d and not how.panelled
    EVEN_DV: tl.constexpr = how.even_dv and not how.panelled
    array, smq, smk, seq_k = mask
    for t in tl.range(t0, t1):
        start = t * how.block_m
        if LISTED:
            start = tl.load(tiles + t) * how.block_m
        i = start + tl.arange(0, how.block_m)
        q_own = q_at
        do_own = do_at
        if how.panelled:
            q_own = panel_at(q_at, column, how)
            do_own = panel_at(do_at, column, how)
        q = tile_of(
            q_own, b, h, start, seq_q, dim - column, how.block_m, how.block_d, EVEN_D, not how.even_q, False, False, how
        )
        do = tile_of(
            do_own, b, h, start, seq_q, dim_v - column,
            how.block_m, how.block_dv, EVEN_DV, not how.even_q, False, False, how,
        )  # fmt: skip
        base = tl.load(base_at + i)
        delta = tl.load(delta_at + i)
        rest = 0.0
        if how.mask_kind == FLOAT_MASK:
            rest = tl.load(rest_at + i)[None, :]
        if how.panelled:
            s = product_of_panels(
                k, q_at, b, h, start, seq_q, dim,
                how.block_n, how.block_m, how.block_d, how.even_d, not how.even_q, False, False, how,
            )  # fmt: skip
            dp = product_of_panels(
                v, do_at, b, h, start, seq_q, dim_v,
                how.block_n, how.block_m, how.block_dv, how.even_dv, not how.even_q, False, False, how,
            )  # fmt: skip
        else:
            s = product(k, tl.trans(q))
            dp = product(v, tl.trans(do))
        keep = True
        if how.dropout:
            rows = tl.reshape(i, (how.block_m, 1))
            keep = tl.trans(kept(b, h + tl.zeros_like(rows), rows, first, random, how.block_m, how.block_n))
        n = columns(how.block_n, how.dropout)[:, None]
        here = array
        rows = (tl.minimum(i, seq_q - 1) - start)[None, :]
        if MASK_KIND != NO_MASK:
            here = array + start.to(tl.int64) * smq
        if how.wide:
            n = n.to(tl.int64)
            rows = rows.to(tl.int64)
        p, _, dqk = score_gradient(
            s, dp, base[None, :], delta[None, :], rest, i[None, :], n, first, True, span,
            (here, rows * smq, smk, seq_k), slope, scores, keep, keep_scale, MASK_KIND, EDGE, False,
            how.has_lengths or not how.even_k, not how.even_k, how,
        )  # fmt: skip
        dv = product(rounded(p, do.dtype), do, dv)
        dk = product(rounded(dqk, q.dtype), q, dk)
    return dk, dv


@triton.jit
def key_gradients(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, CU_Q, CU_K, TILES, COUNTS, SLOPES, DK, DV,
    by, by_key, by_value, visits, sizes, dims, reach, section, scores, random,
    how: tl.constexpr,
):  # fmt: skip
    """DK (batch, heads_kv, Lk, dim) and DV (batch, heads_kv, Lk, dim_v): one tile of keys of one key head a program."""
    batch, heads_q, group = sizes.batch, sizes.heads_q, sizes.group
    seq_q, padded, seq_k = sizes.seq_q, sizes.padded, sizes.seq_k
    entries = batch
    if how.varlen:
        entries += 1
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    BLOCK_D: tl.constexpr = how.block_d
    BLOCK_DV: tl.constexpr = how.block_dv
    # Where one of the heads has fewer panels, a program may have none of it.
    EVEN_D: tl.constexpr = how.even_d and not how.panelled
    EVEN_DV: tl.constexpr = how.even_dv and not how.panelled
    dice = seeded(random)
    count = tl.cdiv(seq_k, BLOCK_N)
    heads = heads_q // group
    pid = tl.program_id(0)
    column = 0  # the first of this program's panels of DK and DV
    if how.panelled:
        panels = tl.cdiv(tl.maximum(dims.qk, dims.v), BLOCK_D)
        column = pid % panels * BLOCK_D
        pid = pid // panels
    whole = section * count
    at = pid // whole * section
    here = tl.minimum(section, entries * heads - at)
    tile = pid % whole // here  # the first keys are seen by most queries under a causal mask
    at = at + pid % whole % here
    b = at // heads
    head = at % heads
    b64 = b.to(tl.int64)
    head64 = head.to(tl.int64)
    first = tile * BLOCK_N
    if how.varlen:
        begin_q, seq_q = sequence(CU_Q, sizes.cu_q, b, batch, sizes.rows_q)
        begin_k, seq_k = sequence(CU_K, sizes.cu_k, b, batch, sizes.rows_k)
        Q += begin_q * by.q.l
        DO += begin_q * by.o.l
        K += begin_k * by.k.l
        V += begin_k * by.v.l
        DK += begin_k * by_key.l * dims.qk
        DV += begin_k * by_value.l * dims.v
        if b == batch:
            leap = count * BLOCK_N
            by_h, by_l = by_key.h.to(tl.int64) * dims.qk, by_key.l.to(tl.int64) * dims.qk
            clear(DK + column, by_h, by_l, head, 1, first, seq_k, leap, dims.qk - column, BLOCK_N, BLOCK_D, EVEN_D)
            by_h, by_l = by_value.h.to(tl.int64) * dims.v, by_value.l.to(tl.int64) * dims.v
            clear(DV + column, by_h, by_l, head, 1, first, seq_k, leap, dims.v - column, BLOCK_N, BLOCK_DV, EVEN_DV)
            return
        if first >= seq_k:
            return
    j = first + columns(BLOCK_N, how.dropout)
    j64 = j.to(tl.int64)
    end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
    span = (end, offset, reach.left, reach.right)
    exists = j < end
    k_rows = K + (b64 * by.k.b + head64 * by.k.h + j64 * by.k.l)[:, None]
    k = (k_rows, exists, by.k.d)
    if not how.panelled:
        k = load_rows(k_rows, exists, by.k.d, dims.qk, BLOCK_D, how.even_d)
    v_rows = V + (b64 * by.v.b + head64 * by.v.h + j64 * by.v.l)[:, None]
    v = (v_rows, exists, by.v.d)
    if not how.panelled:
        v = load_rows(v_rows, exists, by.v.d, dims.v, BLOCK_DV, how.even_dv)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    last = tl.minimum(first + BLOCK_N, seq_k) - 1
    lo, full_lo, full_hi, hi = query_range(first, last, seq_q, span, how)
    if how.has_lengths:  # none of these keys is there
        hi = tl.where(first < end, hi, 0)
        full_hi = tl.where(first < end, full_hi, 0)
    begin = lo // BLOCK_M
    mixed_end = tl.cdiv(hi, BLOCK_M)
    full = (full_lo // BLOCK_M, full_hi // BLOCK_M)
    tiles_q = tl.cdiv(seq_q, BLOCK_M)
    MASKED: tl.constexpr = how.mask_kind != NO_MASK
    ALL_EDGES: tl.constexpr = MASKED or how.generic
    for member in range(group):
        h = head * group + member
        h64 = h.to(tl.int64)
        q_head = Q
        do_head = DO
        if not how.tma:
            q_head = Q + b64 * by.q.b + h64 * by.q.h
            do_head = DO + b64 * by.o.b + h64 * by.o.h
        if how.varlen:
            rows_at = h64 * padded + padded_begin(begin_q, b)
        else:
            rows_at = (b64 * heads_q + h64) * padded
        mask = (0, 0, 0, 0)
        if MASKED:
            mask = (MASK + (b64 * by.m.b + h64 * by.m.h), by.m.l, by.m.d, seq_k)
        slope = 0.0
        if how.alibi:
            slope = tl.load(SLOPES + b * scores.slope_b + h * scores.slope_h)
        tiles = TILES
        if how.listed:
            where = b64 * visits.b + h * visits.h + tile * visits.t
            tiles = TILES + where * tiles_q
            begin = 0
            mixed_end, full, _ = visit(COUNTS + where * 5)
        for part in tl.static_range(3):  # edges before, the run that sees every key, edges after
            t0, t1 = begin, full[0]
            if part == 0 and ALL_EDGES:
                t1 = mixed_end
            if part == 1:
                t0, t1 = full
            if part == 2:
                t0, t1 = full[1], mixed_end
            if (
                (part == 0 and (how.has_right or ALL_EDGES))
                or (part == 1 and (how.listed or not ALL_EDGES))
                or (part == 2 and how.has_left and not ALL_EDGES)
            ):
                dk, dv = _over_queries(
                    (dk, dv), k, v, first, b, h, (q_head, by.q.l, by.q.d), (do_head, by.o.l, by.o.d), BASE + rows_at,
                    DELTA + rows_at, BASE + batch.to(tl.int64) * heads_q * padded + rows_at, mask, tiles, t0, t1, seq_q,
                    span, slope, scores, dice, random.keep_scale, dims.qk, dims.v, column,
                    NO_MASK if part == 1 else how.mask_kind, how.listed and part != 1,
                    EVERY_EDGE if part != 1 else NO_EDGE, how,
                )  # fmt: skip
    inside = j < seq_k
    kept_rows = exists[:, None]
    dk = tl.where(kept_rows, dk * scores.scale, 0.0)
    dv = tl.where(kept_rows, dv, 0.0)
    if how.varlen:
        keys = head64 * by_key.h + j64 * by_key.l
        values = head64 * by_value.h + j64 * by_value.l
    else:
        keys = b64 * heads * seq_k + head64 * by_key.h + j64 * by_key.l
        values = b64 * heads * seq_k + head64 * by_value.h + j64 * by_value.l
    store_rows(DK + column + (keys * dims.qk)[:, None], dk, inside, 1, dims.qk - column, BLOCK_D, EVEN_D)
    store_rows(DV + column + (values * dims.v)[:, None], dv, inside, 1, dims.v - column, BLOCK_DV, EVEN_DV)
