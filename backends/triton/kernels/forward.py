"""The forward: online softmax over tiles of keys (FlashAttention-2), for many queries or, split over the keys, for few.

Each program takes BLOCK_M rows of one batch entry and one key head. A row is a query of one head, or with PACKED of all
query heads that share the key head: row r is query ``r // group`` of head ``r % group`` of the group, so that a few
queries still fill a tile and their keys are loaded once. Where a row's scores need nothing but a factor, the factor is
folded into exp2; elsewhere scores are in natural units.
"""

import triton
import triton.language as tl

from .lists import visit
from .paged import add_scaled, places, scales_of, share
from .panels import panel_at, product_of_panels
from .philox import drop, keeps, origin, seeded
from .tile import (
    EVERY_EDGE,
    LN2,
    LOG2E,
    NO_EDGE,
    NO_MASK,
    SOME_EDGES,
    columns,
    extent,
    hide,
    key_range,
    load_rows,
    product,
    rounded,
    sloped,
    store_rows,
    tanh,
    tile_of,
    widened,
    with_sink,
)
from .varlen import clear, sequence


@triton.jit
def _attend(
    state, q, zero, i, h, b, head, k_at, v_at, paging, scaling, mask, tiles, t0, t1, full, span, slope, scores, random,
    dim, dim_v,
    MASK_KIND: tl.constexpr, LISTED: tl.constexpr, EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr,
    BOUND: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Take the key tiles ``t0`` to ``t1`` into ``state``: the accumulator, the sum of weights, the maximum so far.

    EDGE says which tiles may hide positions: none, every, or those outside ``full`` (first, end). STRETCH: what those
    see is the keys ``left`` to ``end`` of the span. ENDS: keys may end within a tile. BOUND: the arrays do.
    """
    acc, total, top = state
    k_scales, v_scales = scaling
    end, left = span[0], span[2]
    factor = scores.factor
    first_full, last_full = full
    some = True
    if LISTED:  # mostly none: then the loop's pipeline is not even set up
        some = t0 < t1
    if some:
        for t in tl.range(t0, t1):
            start = t * how.block_n
            if LISTED:
                start = tl.load(tiles + t) * how.block_n
            if how.dropout:  # before the scores: the product of the tile before is still under way
                k0, k1, k2, k3 = keeps(zero, b, h, i, start, random, how.block_n)
            where = (0, 0)
            if how.paged:
                where = places(paging, start, end, ENDS, how)
            if how.panelled:
                s = product_of_panels(
                    q, k_at, b, head, start, end, dim,
                    how.block_m, how.block_n, how.block_d, how.even_d, ENDS, False, how.dropout, how, where,
                )  # fmt: skip
            else:
                k = tile_of(
                    k_at, b, head, start, end, dim,
                    how.block_n, how.block_d, how.even_d, ENDS, False, how.dropout, how, where,
                )  # fmt: skip
                if how.scaled:
                    k = widened(k, q.dtype)
                s = product(q, tl.trans(k))
            if how.scaled:
                s = s * scales_of(paging, k_scales, start, end, ENDS, how)[None, :]
            if not how.fold:
                s = s * factor
                if how.softcap:
                    s = tanh(s) * scores.cap
                if how.generic:
                    s = tl.where(scores.cap > 0.0, tanh(s) * scores.cap, s)
                if how.alibi:
                    s = sloped(s, i, columns(how.block_n, how.dropout)[None, :], start, span[1], slope)
            if EDGE != NO_EDGE:
                hides = True
                if EDGE == SOME_EDGES:  # a branch, so that one loop keeps its loads coming
                    hides = (t < first_full) | (t >= last_full)
                if hides:
                    n = columns(how.block_n, how.dropout)[None, :]
                    if how.wide:
                        n = n.to(tl.int64)
                    if STRETCH:
                        s = tl.where((start + n >= left) & (start + n < end), s, float("-inf"))
                    else:
                        s, _ = hide(s, i, n, start, span, mask, MASK_KIND, ENDS or EDGE == SOME_EDGES, BOUND, how)
            if how.fold:
                new_top = tl.maximum(top, tl.max(s, 1) * (factor * LN2))
            else:
                new_top = tl.maximum(top, tl.max(s, 1))
            base = new_top
            if EDGE != NO_EDGE:
                # A row that has seen no key yet keeps -inf; subtracting 0 leaves its weights at exp2(-inf) = 0.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            if how.fold:
                p = tl.exp2(s * factor - (base * LOG2E)[:, None])
            else:
                p = tl.exp2((s - base[:, None]) * LOG2E)
            rescale = tl.exp2((top - base) * LOG2E)
            total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            if how.dropout:
                p = drop(p, k0, k1, k2, k3, how.block_m, how.block_n)
            v = tile_of(
                v_at, b, head, start, end, dim_v,
                how.block_n, how.block_dv, how.even_dv, ENDS, how.has_lengths, how.dropout, how, where,
            )  # fmt: skip
            if how.scaled:
                v_scale = scales_of(paging, v_scales, start, end, ENDS, how)
                if how.panelled:  # q are pointers
                    acc = add_scaled(acc, p, v, v_scale, q[0].dtype.element_ty)
                else:
                    acc = add_scaled(acc, p, v, v_scale, q.dtype)
            else:
                acc = product(rounded(p, v.dtype), v, acc)
            top = new_top
    return acc, total, top


@triton.jit
def forward(
    Q, K, V, OUT, LSE, MASK, LENGTHS, CU_Q, CU_K, TILES, COUNTS, SINKS, SLOPES, TABLE, K_SCALES, V_SCALES, TREE,
    by, visits, sizes, dims, reach, section, splits, scores, random,
    how: tl.constexpr,
):  # fmt: skip
    """Rows of OUT (batch, heads, Lq, DV) and LSE (batch, heads, Lq), or what ``merge`` makes them of.

    The grid is one axis: the heads of a section fastest, then the tiles of rows from the last, which is the longest
    under a causal mask, to the first, then sections (of as many heads as share the L2); or splits fastest, then tiles.
    With sequences one after another, OUT is (heads, rows, DV), LSE (heads, rows), and ``merge`` clears what it writes.
    """
    batch, heads_q, group = sizes.batch, sizes.heads_q, sizes.group
    seq_q, seq_k = sizes.seq_q, sizes.seq_k
    entries = batch
    if how.varlen and not how.split:
        entries += 1
    if how.split and how.overlap:  # ``merge`` may begin, up to where it waits
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    BLOCK_D: tl.constexpr = how.block_d
    BLOCK_DV: tl.constexpr = how.block_dv
    pack = 1
    if how.packed:
        pack = group
    rows = seq_q * pack
    count = tl.cdiv(rows, BLOCK_M)
    heads = heads_q // pack
    pid = tl.program_id(0)
    column = 0  # the first of this program's panel
    width_v = dims.v
    if how.panelled:
        panels = tl.cdiv(dims.v, BLOCK_DV)
        column = pid % panels * BLOCK_DV
        width_v = dims.v - column
        pid = pid // panels
    split = 0
    if how.split:  # few rows, whose keys are read once: no order is better than another
        split = pid % splits.count
        pid = pid // splits.count
        tile = pid % count
        at = pid // count
    else:
        whole = section * count
        at = pid // whole * section
        here = tl.minimum(section, entries * heads - at)
        rest = pid % whole
        tile = count - 1 - rest // here
        at = at + rest % here
    dice = seeded(random)
    b = at // heads
    head = (at % heads) * pack  # the first query head of this program
    head_kv = head // group
    if how.packed:
        head_kv = at % heads
    b64 = b.to(tl.int64)

    first = tile * BLOCK_M
    if how.varlen:
        begin_q, seq_q = sequence(CU_Q, sizes.cu_q, b, batch, sizes.rows_q)
        if not how.paged:
            begin_k, seq_k = sequence(CU_K, sizes.cu_k, b, batch, sizes.rows_k)
            K += begin_k * by.k.l
            V += begin_k * by.v.l
        rows = seq_q * pack
        Q += begin_q * by.q.l
        if how.tree:
            TREE += begin_q * sizes.tree_l
        OUT += begin_q * by.o.l
        LSE += begin_q
        if b == batch:
            leap = count * BLOCK_M
            clear(OUT + column, by.o.h, by.o.l, head, pack, first, rows, leap, width_v, BLOCK_M, BLOCK_DV, how.even_dv)
            for start in range(first, rows, leap):
                past = start + tl.arange(0, BLOCK_M)
                at_row = (head + past % pack).to(tl.int64) * sizes.rows_q + past // pack
                tl.store(LSE + at_row, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=past < rows)
            return
        if first >= rows:
            return
    r = first + tl.arange(0, BLOCK_M)
    inside = r < rows
    i = r
    h = head + tl.zeros_like(r)
    if how.packed:
        i = r // pack
        h = head + r % pack
    i_wide = i.to(tl.int64)
    h_wide = h.to(tl.int64)
    if how.tma_rows:
        q = tl.reshape(Q.load([b, head, first, 0]), (BLOCK_M, BLOCK_D))
    else:
        q_rows = Q + b64 * by.q.b + (h_wide * by.q.h + i_wide * by.q.l)[:, None]
        q = load_rows(q_rows, inside, by.q.d, dims.qk, BLOCK_D, how.even_d)
    rows_of_q = q
    if how.panelled:
        rows_of_q = (q_rows, inside, by.q.d)
    named = (0, (0, 0), (0, 0))
    if how.listed:  # tiles that need the mask by name, and a run of wholly visible ones; queries come without waiting
        if how.overlap:
            tl.extra.cuda.gdc_wait()
        where = b64 * visits.b + head * visits.h + tile * visits.t
        TILES += where * tl.cdiv(seq_k, BLOCK_N)
        named = visit(COUNTS + where * 5)
    end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
    span = (end, offset, reach.left, reach.right)
    last = tl.minimum(first + BLOCK_M, rows) - 1
    lo, full_lo, full_hi, hi = key_range(first // pack, last // pack, span, how)
    if how.split:
        if how.paged:
            lo, hi = share(lo, hi, split, splits.count, BLOCK_N)
        else:
            lo = tl.maximum(lo, split * splits.chunk)
            hi = tl.minimum(hi, (split + 1) * splits.chunk)
        full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.cdiv(tl.maximum(hi, lo), BLOCK_N) * BLOCK_N)
        full_hi = tl.maximum(tl.minimum(full_hi, tl.maximum(hi, 0) // BLOCK_N * BLOCK_N), full_lo)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    zero = 0
    if how.dropout:
        nothing = tl.zeros((BLOCK_N, BLOCK_D), q.dtype)
        zero = origin(product(q, tl.trans(nothing)), BLOCK_M, BLOCK_N)
    paging, scaling = (0, 0), ((0, 0), (0, 0))
    if how.paged:
        K += head_kv.to(tl.int64) * by.k.h
        V += head_kv.to(tl.int64) * by.v.h
        paging = (TABLE + b64 * sizes.table, sizes.page)
        if how.scaled:
            head64 = head_kv.to(tl.int64)
            scaling = (
                (K_SCALES + head64 * sizes.k_head, sizes.k_page),
                (V_SCALES + head64 * sizes.v_head, sizes.v_page),
            )
    elif not how.tma:
        K += b64 * by.k.b + head_kv.to(tl.int64) * by.k.h
        V += b64 * by.v.b + head_kv.to(tl.int64) * by.v.h
    k_at = (K, by.k.l, by.k.d, by.k.b)
    v_at = (V, by.v.l, by.v.d, by.v.b)
    if how.panelled:
        v_at = panel_at(v_at, column, how)
    mask = (0, 0, 0, 0)
    if how.mask_kind != NO_MASK:
        MASK += b64 * by.m.b + head.to(tl.int64) * by.m.h
        there = tl.minimum(i, seq_q - 1)
        if how.packed or how.wide:
            mask_rows = (h - head).to(tl.int64) * by.m.h + there.to(tl.int64) * by.m.l
        else:  # offsets within the tile then fit 32 bits
            MASK += first.to(tl.int64) * by.m.l
            mask_rows = (there - first) * by.m.l
        mask = (MASK, mask_rows[:, None], by.m.d, seq_k)
    if how.tree:
        there = tl.minimum(i_wide, seq_q - 1)
        bits = TREE + b64 * sizes.tree_b + there[:, None] * sizes.tree_l
        mask = (bits, tl.minimum(seq_q, sizes.seq_q), 0, 0)  # a sequence may have more than the caller said
    slope = 0.0
    if how.alibi:
        slope = tl.load(SLOPES + b * scores.slope_b + h * scores.slope_h)[:, None]
    begin = lo // BLOCK_N
    mixed_end = tl.cdiv(hi, BLOCK_N)
    full = (full_lo // BLOCK_N, full_hi // BLOCK_N)
    stretch = (0, 0)
    if how.listed:
        begin = 0
        mixed_end, full, stretch = named
    MASKED: tl.constexpr = how.mask_kind != NO_MASK
    RAGGED: tl.constexpr = how.has_right or how.has_lengths or not how.even_k
    # One loop keeps the loads coming. But values past a sequence's length must be cleared, which the tiles within it
    # must not pay for; and past the last key, pointers need tests.
    ONE_LOOP: tl.constexpr = not MASKED and not how.has_lengths and (how.tma or how.even_k) and (how.has_left or RAGGED)
    STRETCH: tl.constexpr = how.listed and how.even_k and not how.has_lengths
    # The run that every row sees, tiles with an edge before it, tiles with an edge after. The longest loop comes first,
    # which may be the only one: it does not wait for the pipeline of another.
    for part in tl.static_range(3):
        t0, t1 = begin, full[0]
        sees = span
        if part == 0:
            t0, t1 = full
        if part == 0 and ONE_LOOP:
            t0, t1 = begin, mixed_end
        if part == 0 and STRETCH:
            t0, t1 = stretch[0] // BLOCK_N, tl.cdiv(stretch[1], BLOCK_N)
            sees = (stretch[1], offset, stretch[0], 0)
        if part == 1 and MASKED:
            t1 = mixed_end if how.even_k else mixed_end - 1
        if part == 2:
            t0, t1 = full[1], mixed_end
        if part == 2 and MASKED:
            t0 = tl.maximum(mixed_end - 1, begin)
        if part == 0 and how.generic:
            acc, total, top = _attend(
                (acc, total, top), rows_of_q, zero, i[:, None], h[:, None], b, head_kv, k_at, v_at, paging, scaling,
                mask, TILES, begin, mixed_end, full, span, slope, scores, dice, dims.qk, width_v,
                how.mask_kind, False, EVERY_EDGE, False, True, True, how,
            )  # fmt: skip
        elif not how.generic and (
            (part == 0 and (how.listed or not MASKED))
            or (part == 1 and (how.has_left or MASKED) and not ONE_LOOP)
            or (part == 2 and ((RAGGED and not MASKED) or (MASKED and not how.even_k)) and not ONE_LOOP)
        ):
            acc, total, top = _attend(
                (acc, total, top), rows_of_q, zero, i[:, None], h[:, None], b, head_kv, k_at, v_at, paging, scaling,
                mask, TILES, t0, t1, full, sees, slope, scores, dice, dims.qk, width_v,
                NO_MASK if part == 0 else how.mask_kind, how.listed and part != 0,
                EVERY_EDGE if part != 0 else (SOME_EDGES if ONE_LOOP or STRETCH else NO_EDGE), part == 0 and STRETCH,
                part != 0 and (how.has_lengths or (not how.even_k and (part == 2 or not MASKED))),
                part != 0 and not how.even_k and (part == 2 or not MASKED), how,
            )  # fmt: skip

    if how.varlen:
        at64 = tl.cast(split, tl.int64)
        row = (at64 * heads_q + h_wide) * sizes.rows_q + i
    else:
        at64 = split * batch + b64
        row = at64 * heads_q * seq_q + h_wide * seq_q + i
    if how.split:  # maximum, sum and numerator, which add up exactly where the parts do
        tl.store(LSE + row, top, mask=inside)
        if how.varlen:
            LSE += splits.count.to(tl.int64) * heads_q * sizes.rows_q
        else:
            LSE += splits.count.to(tl.int64) * batch * heads_q * seq_q
        tl.store(LSE + row, total, mask=inside)
        out = acc * random.keep_scale
    else:
        if how.sinks:
            top, total, rescale = with_sink(top, total, tl.load(SINKS + h))
            acc = acc * rescale[:, None]
        empty = total == 0.0  # it saw nothing
        tl.store(LSE + row, top + tl.log2(tl.where(empty, 1.0, total)) * LN2, mask=inside)
        # An exact quotient: the mean of a power of two of equal weights is exact too.
        out = acc * tl.div_rn(random.keep_scale + tl.zeros_like(total), tl.where(empty, 1.0, total))[:, None]
    if how.tma_rows:
        OUT.store([b, head, first, 0], tl.reshape(rounded(out, OUT.dtype), (1, 1, BLOCK_M, BLOCK_DV)))
    else:
        out_rows = OUT + column + at64 * by.o.b + (h_wide * by.o.h + i_wide * by.o.l)[:, None]
        store_rows(out_rows, out, inside, 1, width_v, BLOCK_DV, how.even_dv)
