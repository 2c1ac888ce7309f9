"""The backward by recomputation (FlashAttention-2): P = exp(S - lse) again, tile by tile.

With D = rowsum(dO O) - dlse (``prepare``): dP = dO V^T, dS = P (dP - D), dQ = scale dS K (``query_gradient``),
dK = scale dS^T Q and dV = P^T dO (``key_gradients``). Each program owns what it writes, so that nothing is added
atomically and the bits repeat. Query heads that share a key head are summed in the accumulator.
"""

import triton
import triton.language as tl

from .philox import kept
from .tile import (
    EVERY_EDGE,
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

#: Integers whose value is not worth a kernel of its own.
_RUNTIME = [
    "batch", "heads_q", "group", "seq_q", "padded", "seq_k", "bottom_right", "left", "right", "section", "seed_low",
    "seed_high", "threshold", "stb", "sth", "stt",
]  # fmt: skip


@triton.jit(do_not_specialize=["heads", "seq_q", "padded", "rows"])
def prepare(
    OUT, DO, LSE, DLSE, DELTA, BASE,
    sob, soh, sol, sod, sdb, sdh, sdl, sdd,
    heads, seq_q, padded, rows, dim_v, unit,
    WITH_DLSE: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(dO O) - dlse and BASE = lse * unit, (batch, heads, padded).

    BASE is +inf for rows that see nothing and for those past Lq, so that they weigh 0 without a test.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = r // padded // heads
    h = r // padded % heads
    i = r % padded
    inside = (r < rows) & (i < seq_q)
    o = load_rows(OUT + (b * sob + h * soh + i * sol)[:, None], inside, sod, dim_v, BLOCK_DV, EVEN_DV)
    do = load_rows(DO + (b * sdb + h * sdh + i * sdl)[:, None], inside, sdd, dim_v, BLOCK_DV, EVEN_DV)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    saved = (b * heads + h) * seq_q + i
    if WITH_DLSE:
        delta -= tl.load(DLSE + saved, mask=inside, other=0.0)
    lse = tl.load(LSE + saved, mask=inside, other=float("-inf"))
    tl.store(DELTA + r, delta, mask=r < rows)
    tl.store(BASE + r, tl.where(lse == float("-inf"), float("inf"), lse * unit), mask=r < rows)


@triton.jit
def score_gradient(
    s, dp, base, delta, i, n, start, MASK, mask_rows, smk, seq_k, end, offset, left, right,
    factor, cap, keep, keep_scale, hides,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, MASK_KIND: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """From the products q . k and dO . v of one tile, either way round: the weights after dropout, dS, and dS q . k.

    The last is the gradient of scale * q . k: dS itself but for softcap, which lies between it and the float mask.
    EDGE and STRETCH as in the forward; with some edges, ``hides`` says whether this tile has one.
    """
    if not FOLD:
        s = s * factor
    if SOFTCAP:
        t = tanh(s)
        s = t * cap
    if EDGE == EVERY_EDGE:
        s, seen = hide(
            s, i, n, start, end, offset, left, right, MASK, mask_rows, smk, seq_k,
            MASK_KIND, HAS_LEFT, HAS_RIGHT, ENDS, BOUND,
        )  # fmt: skip
    if EDGE == SOME_EDGES and hides:
        if STRETCH:
            seen = (start + n >= left) & (start + n < end)
        else:
            seen = visible(i, start + n, offset, end, left, right, True, HAS_LEFT, HAS_RIGHT)
        s = tl.where(seen, s, float("-inf"))
    p = weights(s, base, factor, FOLD)
    dropped = p
    if DROPOUT:
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if EDGE == EVERY_EDGE:  # hidden keys may hold NaN, which 0 times it is too
        ds = tl.where(seen, ds, 0.0)
    dqk = ds
    if SOFTCAP:
        dqk = ds * (1.0 - t * t)
        if EDGE == EVERY_EDGE:
            dqk = tl.where(seen, dqk, 0.0)
    return dropped, ds, dqk


@triton.jit
def _over_queries(
    dk, dv, k, v, first, b, h, Q, DO, BASE, DELTA, MASK, TILES,
    sql, sqd, sdl, sdd, smq, smk, t0, t1, seq_q, seq_k, end, offset, left, right, dim, dim_v,
    factor, cap, seed_low, seed_high, threshold, keep_scale,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, EVEN_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, MASK_KIND: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr,
    ENDS: tl.constexpr, BOUND: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add what the query tiles ``t0`` to ``t1`` of one head give to dK and dV. Tiles are (keys, queries)."""
    for t in tl.range(t0, t1):
        start = t * BLOCK_M
        if LISTED:
            start = tl.load(TILES + t) * BLOCK_M
        i = start + tl.arange(0, BLOCK_M)
        q = tile_of(Q, b, h, start, seq_q, sql, sqd, dim, BLOCK_M, BLOCK_D, EVEN_D, not EVEN_Q, False, False, TMA, WIDE)
        do = tile_of(
            DO, b, h, start, seq_q, sdl, sdd, dim_v, BLOCK_M, BLOCK_DV, EVEN_DV, not EVEN_Q, False, False, TMA, WIDE
        )
        base = tl.load(BASE + i)
        delta = tl.load(DELTA + i)
        s = product(k, tl.trans(q))
        dp = product(v, tl.trans(do))
        keep = True
        if DROPOUT:
            rows = tl.reshape(i, (BLOCK_M, 1))
            keep = tl.trans(
                kept(b, h + tl.zeros_like(rows), rows, first, seed_low, seed_high, threshold, BLOCK_M, BLOCK_N)
            )
        n = columns(BLOCK_N, DROPOUT)[:, None]
        mask_tile = MASK
        mask_rows = (tl.minimum(i, seq_q - 1) - start)[None, :]
        if MASK_KIND != NO_MASK:
            mask_tile = MASK + start.to(tl.int64) * smq
        if WIDE:
            n = n.to(tl.int64)
            mask_rows = mask_rows.to(tl.int64)
        p, _, dqk = score_gradient(
            s, dp, base[None, :], delta[None, :], i[None, :], n, first,
            mask_tile, mask_rows * smq, smk, seq_k, end, offset, left, right,
            factor, cap, keep, keep_scale, True,
            FOLD, SOFTCAP, MASK_KIND, DROPOUT, HAS_LEFT, HAS_RIGHT, EDGE, False, ENDS, BOUND,
        )  # fmt: skip
        dv = product(rounded(p, do.dtype), do, dv)
        dk = product(rounded(dqk, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=_RUNTIME)
def key_gradients(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, TILES, COUNTS, DK, DV,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd, sdb, sdh, sdl, sdd, smb, smh, smq, smk, stb, sth, stt,
    batch, heads_q, group, seq_q, padded, seq_k, dim, dim_v, bottom_right, left, right, section,
    scale, factor, cap, seed_low, seed_high, threshold, keep_scale,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, MASK_KIND: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, LISTED: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """DK (batch, heads_kv, Lk, dim) and DV (batch, heads_kv, Lk, dim_v): one tile of keys of one key head a program."""
    seed_low = seed_low.to(tl.uint32, bitcast=True)
    seed_high = seed_high.to(tl.uint32, bitcast=True)
    tiles = tl.cdiv(seq_k, BLOCK_N)
    heads = heads_q // group
    pid = tl.program_id(0)
    whole = section * tiles
    at = pid // whole * section
    here = tl.minimum(section, batch * heads - at)
    tile = pid % whole // here  # the first keys are seen by most queries under a causal mask
    at = at + pid % whole % here
    b = at // heads
    head = at % heads
    b64 = b.to(tl.int64)
    head64 = head.to(tl.int64)
    first = tile * BLOCK_N
    j = first + columns(BLOCK_N, DROPOUT)
    j64 = j.to(tl.int64)
    end, offset = extent(LENGTHS, b, seq_q, seq_k, bottom_right, HAS_LENGTHS)
    exists = j < end
    k = load_rows(K + (b64 * skb + head64 * skh + j64 * skl)[:, None], exists, skd, dim, BLOCK_D, EVEN_D)
    v = load_rows(V + (b64 * svb + head64 * svh + j64 * svl)[:, None], exists, svd, dim_v, BLOCK_DV, EVEN_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    last = tl.minimum(first + BLOCK_N, seq_k) - 1
    lo, full_lo, full_hi, hi = query_range(first, last, offset, seq_q, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    if HAS_LENGTHS:  # none of these keys is there
        hi = tl.where(first < end, hi, 0)
        full_hi = tl.where(first < end, full_hi, 0)
    begin = lo // BLOCK_M
    mixed_end = tl.cdiv(hi, BLOCK_M)
    first_full = full_lo // BLOCK_M
    last_full = full_hi // BLOCK_M
    tiles_q = tl.cdiv(seq_q, BLOCK_M)
    MASKED: tl.constexpr = MASK_KIND != NO_MASK
    for member in range(group):
        h = head * group + member
        h64 = h.to(tl.int64)
        q_head = Q
        do_head = DO
        if not TMA:
            q_head = Q + b64 * sqb + h64 * sqh
            do_head = DO + b64 * sdb + h64 * sdh
        rows_at = (b64 * heads_q + h64) * padded
        mask_head = MASK
        if MASKED:
            mask_head = MASK + (b64 * smb + h64 * smh)
        tiles_at = TILES
        if LISTED:
            where = b64 * stb + h * sth + tile * stt
            tiles_at = TILES + where * tiles_q
            begin = 0
            mixed_end = tl.load(COUNTS + where * 5)
            first_full = tl.load(COUNTS + where * 5 + 1)
            last_full = tl.load(COUNTS + where * 5 + 2)
        for part in tl.static_range(3):  # edges before, the run that sees every key, edges after
            t0, t1 = begin, first_full
            if part == 0 and MASKED:
                t1 = mixed_end
            if part == 1:
                t0, t1 = first_full, last_full
            if part == 2:
                t0, t1 = last_full, mixed_end
            if (
                (part == 0 and (HAS_RIGHT or MASKED))
                or (part == 1 and (LISTED or not MASKED))
                or (part == 2 and HAS_LEFT and not MASKED)
            ):
                dk, dv = _over_queries(
                    dk, dv, k, v, first, b, h, q_head, do_head, BASE + rows_at, DELTA + rows_at, mask_head, tiles_at,
                    sql, sqd, sdl, sdd, smq, smk, t0, t1, seq_q, seq_k, end, offset, left, right,
                    dim, dim_v, factor, cap, seed_low, seed_high, threshold, keep_scale, EVEN_D, EVEN_DV, EVEN_Q,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, SOFTCAP, NO_MASK if part == 1 else MASK_KIND, DROPOUT,
                    HAS_LEFT, HAS_RIGHT, LISTED and part != 1,
                    EVERY_EDGE if part != 1 else NO_EDGE, HAS_LENGTHS or not EVEN_K, not EVEN_K, TMA, WIDE,
                )  # fmt: skip
    inside = j < seq_k
    kept_rows = exists[:, None]
    dk = tl.where(kept_rows, dk * scale, 0.0)
    dv = tl.where(kept_rows, dv, 0.0)
    out = (b64 * heads + head64) * seq_k + j64
    store_rows(DK + (out * dim)[:, None], dk, inside, 1, dim, BLOCK_D, EVEN_D)
    store_rows(DV + (out * dim_v)[:, None], dv, inside, 1, dim_v, BLOCK_DV, EVEN_DV)


@triton.jit
def _over_keys(
    dq, q, do, base, delta, i, h, b, head, K, V, MASK, TILES,
    skl, skd, svl, svd, mask_rows, smk, t0, t1, first_full, last_full, seq_k, end, offset, left, right, dim, dim_v,
    factor, cap, seed_low, seed_high, threshold, keep_scale,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, MASK_KIND: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, LISTED: tl.constexpr,
    EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add what the key tiles ``t0`` to ``t1`` give to dQ; edges and STRETCH as in the forward."""
    for t in tl.range(t0, t1):
        start = t * BLOCK_N
        if LISTED:
            start = tl.load(TILES + t) * BLOCK_N
        k = tile_of(
            K, b, head, start, end, skl, skd, dim, BLOCK_N, BLOCK_D, EVEN_D, ENDS, HAS_LENGTHS, DROPOUT, TMA, WIDE
        )
        v = tile_of(
            V, b, head, start, end, svl, svd, dim_v, BLOCK_N, BLOCK_DV, EVEN_DV, ENDS, False, DROPOUT, TMA, WIDE
        )
        s = product(q, tl.trans(k))
        dp = product(do, tl.trans(v))
        keep = True
        if DROPOUT:
            keep = kept(b, h, i, start, seed_low, seed_high, threshold, BLOCK_M, BLOCK_N)
        n = columns(BLOCK_N, DROPOUT)[None, :]
        if WIDE:
            n = n.to(tl.int64)
        _, _, dqk = score_gradient(
            s, dp, base, delta, i, n, start, MASK, mask_rows, smk, seq_k, end, offset, left, right,
            factor, cap, keep, keep_scale, (t < first_full) | (t >= last_full),
            FOLD, SOFTCAP, MASK_KIND, DROPOUT, HAS_LEFT, HAS_RIGHT, EDGE, STRETCH, ENDS, BOUND,
        )  # fmt: skip
        dq = product(rounded(dqk, k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=_RUNTIME)
def query_gradient(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, TILES, COUNTS, DQ,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd, sdb, sdh, sdl, sdd, smb, smh, smq, smk, stb, sth, stt,
    batch, heads_q, group, seq_q, padded, seq_k, dim, dim_v, bottom_right, left, right, section,
    scale, factor, cap, seed_low, seed_high, threshold, keep_scale,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, MASK_KIND: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, LISTED: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """DQ (batch, heads_q, Lq, dim): one tile of queries of one head a program, in the order of the forward."""
    seed_low = seed_low.to(tl.uint32, bitcast=True)
    seed_high = seed_high.to(tl.uint32, bitcast=True)
    tiles = tl.cdiv(seq_q, BLOCK_M)
    pid = tl.program_id(0)
    whole = section * tiles
    at = pid // whole * section
    here = tl.minimum(section, batch * heads_q - at)
    tile = tiles - 1 - pid % whole // here
    at = at + pid % whole % here
    b = at // heads_q
    h = at % heads_q
    head = h // group
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    first = tile * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    i64 = i.to(tl.int64)
    inside = i < seq_q
    q = load_rows(Q + (b64 * sqb + h64 * sqh + i64 * sql)[:, None], inside, sqd, dim, BLOCK_D, EVEN_D)
    do = load_rows(DO + (b64 * sdb + h64 * sdh + i64 * sdl)[:, None], inside, sdd, dim_v, BLOCK_DV, EVEN_DV)
    rows = (b64 * heads_q + h64) * padded + i64
    base = tl.load(BASE + rows)[:, None]
    delta = tl.load(DELTA + rows)[:, None]
    end, offset = extent(LENGTHS, b, seq_q, seq_k, bottom_right, HAS_LENGTHS)
    last = tl.minimum(first + BLOCK_M, seq_q) - 1
    lo, full_lo, full_hi, hi = key_range(first, last, offset, end, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    begin = lo // BLOCK_N
    mixed_end = tl.cdiv(hi, BLOCK_N)
    first_full = full_lo // BLOCK_N
    last_full = full_hi // BLOCK_N
    stretch_first = 0
    stretch_end = 0
    if LISTED:
        where = b64 * stb + h * sth + tile * stt
        TILES += where * tl.cdiv(seq_k, BLOCK_N)
        begin = 0
        mixed_end = tl.load(COUNTS + where * 5)
        first_full = tl.load(COUNTS + where * 5 + 1)
        last_full = tl.load(COUNTS + where * 5 + 2)
        stretch_first = tl.load(COUNTS + where * 5 + 3)
        stretch_end = tl.load(COUNTS + where * 5 + 4)
    k_head = K
    v_head = V
    if not TMA:
        k_head = K + b64 * skb + head.to(tl.int64) * skh
        v_head = V + b64 * svb + head.to(tl.int64) * svh
    if MASK_KIND != NO_MASK:
        MASK += b64 * smb + h64 * smh + first.to(tl.int64) * smq
    mask_rows = (tl.minimum(i64 if WIDE else i, seq_q - 1) - first)[:, None] * smq
    hs = (h + tl.zeros_like(i))[:, None]
    MASKED: tl.constexpr = MASK_KIND != NO_MASK
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    RAGGED: tl.constexpr = HAS_RIGHT or HAS_LENGTHS or not EVEN_K
    ONE_LOOP: tl.constexpr = not MASKED and not HAS_LENGTHS and (TMA or EVEN_K) and (HAS_LEFT or RAGGED)
    STRETCH: tl.constexpr = LISTED and EVEN_K and not HAS_LENGTHS
    for part in tl.static_range(3):  # as in the forward
        t0, t1 = begin, first_full
        if part == 0 and MASKED:
            t1 = mixed_end if EVEN_K else mixed_end - 1
        if part == 1:
            t0, t1 = first_full, last_full
        if part == 1 and ONE_LOOP:
            t0, t1 = begin, mixed_end
        if part == 1 and STRETCH:
            t0, t1 = stretch_first // BLOCK_N, tl.cdiv(stretch_end, BLOCK_N)
        if part == 2:
            t0, t1 = last_full, mixed_end
        if part == 2 and MASKED:
            t0 = tl.maximum(mixed_end - 1, begin)
        if (
            (part == 0 and (HAS_LEFT or MASKED) and not ONE_LOOP)
            or (part == 1 and (LISTED or not MASKED))
            or (part == 2 and ((RAGGED and not MASKED) or (MASKED and not EVEN_K)) and not ONE_LOOP)
        ):
            dq = _over_keys(
                dq, q, do, base, delta, i[:, None], hs, b, head, k_head, v_head, MASK, TILES,
                skl, skd, svl, svd, mask_rows, smk, t0, t1, first_full, last_full,
                seq_k, stretch_end if part == 1 and STRETCH else end, offset,
                stretch_first if part == 1 and STRETCH else left, right,
                dim, dim_v, factor, cap, seed_low, seed_high, threshold, keep_scale,
                EVEN_D, EVEN_DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                FOLD, SOFTCAP, NO_MASK if part == 1 else MASK_KIND, DROPOUT,
                HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, LISTED and part != 1,
                EVERY_EDGE if part != 1 else (SOME_EDGES if ONE_LOOP or STRETCH else NO_EDGE), part == 1 and STRETCH,
                part != 1 and (HAS_LENGTHS or (not EVEN_K and (part == 2 or not MASKED))),
                part != 1 and not EVEN_K and (part == 2 or not MASKED), TMA, WIDE,
            )  # fmt: skip
    rows = (b64 * heads_q + h64) * seq_q + i64
    store_rows(DQ + (rows * dim)[:, None], dq * scale, inside, 1, dim, BLOCK_D, EVEN_D)
