"""The backward by recomputation (FlashAttention-2): P = exp(S - lse) again, tile by tile.

With D = rowsum(dO O) - dlse (``prepare``): dP = dO V^T, dS = P (dP - D), dQ = scale dS K (``query_gradient``),
dK = scale dS^T Q and dV = P^T dO (``key_gradients``). Each program owns what it writes, so that nothing is added
atomically and the bits repeat. Query heads that share a key head are summed in the accumulator.
"""

import triton
import triton.language as tl

from .lists import visit
from .philox import kept, seeded
from .tile import (
    EVERY_EDGE,
    FLOAT_MASK,
    NO_EDGE,
    NO_MASK,
    SOME_EDGES,
    columns,
    extent,
    hide,
    key_range,
    load_rows,
    product,
    query_range,
    rounded,
    store_rows,
    tanh,
    tile_of,
    visible,
    weights,
)
from .varlen import clear, padded_begin, padded_rows, sequence


@triton.jit
def prepare(
    OUT, DO, LSE, DLSE, CU_Q, DELTA, BASE,
    by_out, by_do, sizes, rows, dims, unit,
    WITH_DLSE: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(dO O) - dlse and BASE = lse * unit, (batch, heads, padded).

    BASE is +inf for rows that see nothing and for those past Lq, so that they weigh 0 without a test. Of sequences one
    after another both are (heads, padded), where each sequence begins at a whole tile; the rows between are not read.
    """
    heads, seq_q, padded = sizes.heads_q, sizes.seq_q, sizes.padded
    if VARLEN:
        longest = padded_rows(seq_q)
        first = tl.program_id(0).to(tl.int64) * BLOCK_M
        b = first // longest // heads
        h = first // longest % heads
        first = first % longest
        begin, length = sequence(CU_Q, b, sizes.batch, sizes.rows_q)
        if first >= padded_rows(length):
            return
        i = first + tl.arange(0, BLOCK_M)
        r = h * padded + padded_begin(begin, b) + i
        inside = i < length
        OUT += begin * by_out.l
        DO += begin * by_do.l
        saved = h * sizes.rows_q + begin + i
    else:
        r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        b = r // padded // heads
        h = r // padded % heads
        i = r % padded
        inside = (r < rows) & (i < seq_q)
    o = load_rows(
        OUT + (b * by_out.b + h * by_out.h + i * by_out.l)[:, None], inside, by_out.d, dims.v, BLOCK_DV, EVEN_DV
    )
    do = load_rows(DO + (b * by_do.b + h * by_do.h + i * by_do.l)[:, None], inside, by_do.d, dims.v, BLOCK_DV, EVEN_DV)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if not VARLEN:
        saved = (b * heads + h) * seq_q + i
    if WITH_DLSE:
        delta -= tl.load(DLSE + saved, mask=inside, other=0.0)
    lse = tl.load(LSE + saved, mask=inside, other=float("-inf"))
    tl.store(DELTA + r, delta, mask=r < rows)
    tl.store(BASE + r, tl.where(lse == float("-inf"), float("inf"), lse * unit), mask=r < rows)


@triton.jit
def score_gradient(
    s, dp, base, delta, rest, i, n, start, hides, span, mask, scores, keep, keep_scale,
    MASK_KIND: tl.constexpr, EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """From the products q . k and dO . v of one tile, either way round: the weights after dropout, dS, and dS q . k.

    The last is the gradient of scale * q . k: dS itself but for softcap, which lies between it and the float mask.
    EDGE and STRETCH as in the forward; with some edges, ``hides`` says whether this tile has one.
    """
    factor = scores.factor
    if not how.fold:
        s = s * factor
    if how.softcap:
        t = tanh(s)
        s = t * scores.cap
    if how.generic:
        t = tl.zeros_like(s)
        if scores.cap > 0.0:
            t = tanh(s)
            s = t * scores.cap
    if EDGE == EVERY_EDGE:
        s, seen = hide(s, i, n, start, span, mask, MASK_KIND, ENDS, BOUND, how)
    if EDGE == SOME_EDGES and hides:
        if STRETCH:
            seen = (start + n >= span[2]) & (start + n < span[0])
        else:
            seen = visible(i, start + n, span, True, how)
        s = tl.where(seen, s, float("-inf"))
    p = weights(s, base, rest, factor, how)
    dropped = p
    if how.dropout:
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if EDGE == EVERY_EDGE:  # hidden keys may hold NaN, which 0 times it is too
        ds = tl.where(seen, ds, 0.0)
    dqk = ds
    if how.softcap or how.generic:
        dqk = ds * (1.0 - t * t)
        if EDGE == EVERY_EDGE:
            dqk = tl.where(seen, dqk, 0.0)
    return dropped, ds, dqk


@triton.jit
def _over_queries(
    state, k, v, first, b, h, q_at, do_at, base_at, delta_at, rest_at, mask, tiles, t0, t1, seq_q, span, scores,
    random, keep_scale, dim, dim_v,
    MASK_KIND: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Add what the query tiles ``t0`` to ``t1`` of one head give to dK and dV. Tiles are (keys, queries).

    ``mask`` has the step from query to query in place of offsets.
    """
    dk, dv = state
    array, smq, smk, seq_k = mask
    for t in tl.range(t0, t1):
        start = t * how.block_m
        if LISTED:
            start = tl.load(tiles + t) * how.block_m
        i = start + tl.arange(0, how.block_m)
        q = tile_of(
            q_at, b, h, start, seq_q, dim, how.block_m, how.block_d, how.even_d, not how.even_q, False, False, how
        )
        do = tile_of(
            do_at, b, h, start, seq_q, dim_v, how.block_m, how.block_dv, how.even_dv, not how.even_q, False, False, how
        )
        base = tl.load(base_at + i)
        delta = tl.load(delta_at + i)
        rest = 0.0
        if how.mask_kind == FLOAT_MASK:
            rest = tl.load(rest_at + i)[None, :]
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
            (here, rows * smq, smk, seq_k), scores, keep, keep_scale, MASK_KIND, EDGE, False,
            how.has_lengths or not how.even_k, not how.even_k, how,
        )  # fmt: skip
        dv = product(rounded(p, do.dtype), do, dv)
        dk = product(rounded(dqk, q.dtype), q, dk)
    return dk, dv


@triton.jit
def key_gradients(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, CU_Q, CU_K, TILES, COUNTS, DK, DV,
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
    dice = seeded(random)
    count = tl.cdiv(seq_k, BLOCK_N)
    heads = heads_q // group
    pid = tl.program_id(0)
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
        begin_q, seq_q = sequence(CU_Q, b, batch, sizes.rows_q)
        begin_k, seq_k = sequence(CU_K, b, batch, sizes.rows_k)
        Q += begin_q * by.q.l
        DO += begin_q * by.o.l
        K += begin_k * by.k.l
        V += begin_k * by.v.l
        DK += begin_k * by_key.l * dims.qk
        DV += begin_k * by_value.l * dims.v
        if b == batch:
            leap = count * BLOCK_N
            by_h, by_l = by_key.h.to(tl.int64) * dims.qk, by_key.l.to(tl.int64) * dims.qk
            clear(DK, by_h, by_l, head, 1, first, seq_k, leap, dims.qk, BLOCK_N, BLOCK_D, how.even_d)
            by_h, by_l = by_value.h.to(tl.int64) * dims.v, by_value.l.to(tl.int64) * dims.v
            clear(DV, by_h, by_l, head, 1, first, seq_k, leap, dims.v, BLOCK_N, BLOCK_DV, how.even_dv)
            return
        if first >= seq_k:
            return
    j = first + columns(BLOCK_N, how.dropout)
    j64 = j.to(tl.int64)
    end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
    span = (end, offset, reach.left, reach.right)
    exists = j < end
    k = load_rows(
        K + (b64 * by.k.b + head64 * by.k.h + j64 * by.k.l)[:, None], exists, by.k.d, dims.qk, BLOCK_D, how.even_d
    )
    v = load_rows(
        V + (b64 * by.v.b + head64 * by.v.h + j64 * by.v.l)[:, None], exists, by.v.d, dims.v, BLOCK_DV, how.even_dv
    )
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
                    span, scores, dice, random.keep_scale, dims.qk, dims.v,
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
    store_rows(DK + (keys * dims.qk)[:, None], dk, inside, 1, dims.qk, BLOCK_D, how.even_d)
    store_rows(DV + (values * dims.v)[:, None], dv, inside, 1, dims.v, BLOCK_DV, how.even_dv)


@triton.jit
def _over_keys(
    dq, q, do, base, delta, rest, i, h, b, head, k_at, v_at, mask, tiles, t0, t1, full, span, scores, random,
    keep_scale, dim, dim_v,
    MASK_KIND: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr,
    BOUND: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Add what the key tiles ``t0`` to ``t1`` give to dQ; edges and STRETCH as in the forward."""
    end = span[0]
    first_full, last_full = full
    for t in tl.range(t0, t1):
        start = t * how.block_n
        if LISTED:
            start = tl.load(tiles + t) * how.block_n
        k = tile_of(
            k_at, b, head, start, end, dim,
            how.block_n, how.block_d, how.even_d, ENDS, how.has_lengths, how.dropout, how,
        )  # fmt: skip
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
            s, dp, base, delta, rest, i, n, start, (t < first_full) | (t >= last_full), span, mask, scores,
            keep, keep_scale, MASK_KIND, EDGE, STRETCH, ENDS, BOUND, how,
        )  # fmt: skip
        dq = product(rounded(dqk, k.dtype), k, dq)
    return dq


@triton.jit
def query_gradient(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, CU_Q, CU_K, TILES, COUNTS, DQ,
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
        begin_q, seq_q = sequence(CU_Q, b, batch, sizes.rows_q)
        begin_k, seq_k = sequence(CU_K, b, batch, sizes.rows_k)
        Q += begin_q * by.q.l
        DO += begin_q * by.o.l
        K += begin_k * by.k.l
        V += begin_k * by.v.l
        DQ += begin_q * by_grad.l * dims.qk
        if b == batch:
            by_h, by_l = by_grad.h.to(tl.int64) * dims.qk, by_grad.l.to(tl.int64) * dims.qk
            clear(DQ, by_h, by_l, h, 1, first, seq_q, count * BLOCK_M, dims.qk, BLOCK_M, BLOCK_D, how.even_d)
            return
        if first >= seq_q:
            return
    i = first + tl.arange(0, BLOCK_M)
    i64 = i.to(tl.int64)
    inside = i < seq_q
    q = load_rows(
        Q + (b64 * by.q.b + h64 * by.q.h + i64 * by.q.l)[:, None], inside, by.q.d, dims.qk, BLOCK_D, how.even_d
    )
    do = load_rows(
        DO + (b64 * by.o.b + h64 * by.o.h + i64 * by.o.l)[:, None], inside, by.o.d, dims.v, BLOCK_DV, how.even_dv
    )
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
            sees = (stretch[1], 0, stretch[0], 0)
        if part == 2:
            t0, t1 = full[1], mixed_end
        if part == 2 and MASKED:
            t0 = tl.maximum(mixed_end - 1, begin)
        if part == 0 and how.generic:
            dq = _over_keys(
                dq, q, do, base, delta, rest, i[:, None], hs, b, head, (K, by.k.l, by.k.d), (V, by.v.l, by.v.d),
                mask, TILES, begin, mixed_end, full, span, scores, dice, random.keep_scale, dims.qk, dims.v,
                how.mask_kind, False, EVERY_EDGE, False, True, True, how,
            )  # fmt: skip
        elif not how.generic and (
            (part == 0 and (how.has_left or MASKED) and not ONE_LOOP)
            or (part == 1 and (how.listed or not MASKED))
            or (part == 2 and ((RAGGED and not MASKED) or (MASKED and not how.even_k)) and not ONE_LOOP)
        ):
            dq = _over_keys(
                dq, q, do, base, delta, rest, i[:, None], hs, b, head, (K, by.k.l, by.k.d), (V, by.v.l, by.v.d),
                mask, TILES, t0, t1, full, sees, scores, dice, random.keep_scale, dims.qk, dims.v,
                NO_MASK if part == 1 else how.mask_kind, how.listed and part != 1,
                EVERY_EDGE if part != 1 else (SOME_EDGES if ONE_LOOP or STRETCH else NO_EDGE), part == 1 and STRETCH,
                part != 1 and (how.has_lengths or (not how.even_k and (part == 2 or not MASKED))),
                part != 1 and not how.even_k and (part == 2 or not MASKED), how,
            )  # fmt: skip
    if how.varlen:
        rows = h64 * by_grad.h + i64 * by_grad.l
    else:
        rows = b64 * heads_q * seq_q + h64 * by_grad.h + i64 * by_grad.l
    store_rows(DQ + (rows * dims.qk)[:, None], dq * scores.scale, inside, 1, dims.qk, BLOCK_D, how.even_d)
