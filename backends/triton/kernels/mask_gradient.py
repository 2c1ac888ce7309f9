"""The gradient of a float mask: dS, summed over what the mask is broadcast over."""

import triton
import triton.language as tl

from .philox import kept, seeded
from .score_gradient import score_gradient
from .tile import EVERY_EDGE, columns, extent, load_rows, product, rounded


@triton.jit
def mask_gradient(
    Q, K, V, DO, BASE, DELTA, MASK, LENGTHS, SLOPES, DMASK,
    by, sizes, dims, reach, mask_heads, scores, random,
    OVER_B: tl.constexpr, OVER_H: tl.constexpr, OVER_Q: tl.constexpr, OVER_K: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """DMASK, contiguous in the shape of the mask: one tile a program, summed over what the mask is broadcast OVER."""
    batch, heads_q, group, seq_q, padded, seq_k = sizes
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    dice = seeded(random)
    tiles_q = tl.cdiv(seq_q, BLOCK_M)
    tiles_k = tl.cdiv(seq_k, BLOCK_N)
    pid = tl.program_id(0)
    first_k = 0
    last_k = tiles_k
    if not OVER_K:
        first_k = pid % tiles_k
        last_k = first_k + 1
        pid = pid // tiles_k
    first_q = 0
    last_q = tiles_q
    if not OVER_Q:
        first_q = pid % tiles_q
        last_q = first_q + 1
        pid = pid // tiles_q
    first_h = 0
    last_h = heads_q
    if not OVER_H:
        first_h = pid % mask_heads
        last_h = first_h + 1
    first_b = 0
    last_b = batch
    if not OVER_B:
        first_b = pid // mask_heads
        last_b = first_b + 1
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in range(first_b, last_b):
        end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
        for h in range(first_h, last_h):
            b64 = tl.cast(b, tl.int64)
            h64 = tl.cast(h, tl.int64)
            head64 = tl.cast(h // group, tl.int64)
            for tile_q in range(first_q, last_q):
                i = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
                i64 = i.to(tl.int64)
                inside = i < seq_q
                q = load_rows(
                    Q + (b64 * by.q.b + h64 * by.q.h + i64 * by.q.l)[:, None],
                    inside,
                    by.q.d,
                    dims.qk,
                    how.block_d,
                    how.even_d,
                )
                do = load_rows(
                    DO + (b64 * by.o.b + h64 * by.o.h + i64 * by.o.l)[:, None],
                    inside,
                    by.o.d,
                    dims.v,
                    how.block_dv,
                    how.even_dv,
                )
                rows = (b64 * heads_q + h64) * padded + i64
                base = tl.load(BASE + rows)[:, None]
                delta = tl.load(DELTA + rows)[:, None]
                rest = tl.load(BASE + batch.to(tl.int64) * heads_q * padded + rows)[:, None]
                slope = 0.0
                if how.alibi:
                    slope = tl.load(SLOPES + b * scores.slope_b + h * scores.slope_h)
                mask_head = MASK + b64 * by.m.b + h64 * by.m.h
                mask_rows = tl.minimum(i64, seq_q - 1)[:, None] * by.m.l
                for tile_k in range(first_k, last_k):
                    n = columns(BLOCK_N, how.dropout)
                    j = tile_k * BLOCK_N + n
                    j64 = j.to(tl.int64)
                    there = j < end
                    k = load_rows(
                        K + (b64 * by.k.b + head64 * by.k.h + j64 * by.k.l)[:, None],
                        there,
                        by.k.d,
                        dims.qk,
                        how.block_d,
                        how.even_d,
                    )
                    v = load_rows(
                        V + (b64 * by.v.b + head64 * by.v.h + j64 * by.v.l)[:, None],
                        there,
                        by.v.d,
                        dims.v,
                        how.block_dv,
                        how.even_dv,
                    )
                    s = product(q, tl.trans(k))
                    dp = product(do, tl.trans(v))
                    keep = True
                    if how.dropout:
                        hs = (h + tl.zeros_like(i))[:, None]
                        keep = kept(b64, hs, i[:, None], tile_k * BLOCK_N, dice, BLOCK_M, BLOCK_N)
                    n64 = n[None, :].to(tl.int64)
                    _, ds, _ = score_gradient(
                        s, dp, base, delta, rest, i[:, None], n64, tl.cast(tile_k * BLOCK_N, tl.int32), True,
                        (end, offset, reach.left, reach.right), (mask_head, mask_rows, by.m.d, seq_k), slope, scores,
                        keep, random.keep_scale, how.mask_kind, EVERY_EDGE, False, True, True, how,
                    )  # fmt: skip
                    acc += ds
    out = DMASK
    rows_out = seq_q
    if OVER_Q:
        rows_out = 1
    keys_out = seq_k
    if OVER_K:
        keys_out = 1
    mask_head = first_h
    if OVER_H:
        mask_head = 0
    mask_batch = first_b
    if OVER_B:
        mask_batch = 0
    out += (tl.cast(mask_batch, tl.int64) * mask_heads + mask_head) * rows_out * keys_out
    i = first_q * BLOCK_M + tl.arange(0, BLOCK_M)
    j = first_k * BLOCK_N + columns(BLOCK_N, how.dropout)
    if OVER_Q and OVER_K:
        tl.store(out, rounded(tl.sum(tl.sum(acc, 1), 0), DMASK.dtype.element_ty))
    elif OVER_Q:
        tl.store(out + j, rounded(tl.sum(acc, 0), DMASK.dtype.element_ty), mask=j < seq_k)
    elif OVER_K:
        tl.store(out + i, rounded(tl.sum(acc, 1), DMASK.dtype.element_ty), mask=i < seq_q)
    else:
        at = out + i[:, None].to(tl.int64) * seq_k + j[None, :]
        tl.store(at, rounded(acc, DMASK.dtype.element_ty), mask=(i < seq_q)[:, None] & (j < seq_k)[None, :])
