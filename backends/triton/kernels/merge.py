"""Where keys are split: what the programs of a row's splits made, put together."""

import triton
import triton.language as tl

from .tile import LN2, LOG2E, rounded, with_sink
from .varlen import clear, sequence


@triton.jit
def merge(
    PARTS, SUMS, OUT, LSE, CU_Q, SINKS,
    by, sizes, dims, splits,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, OVERLAP: tl.constexpr, VARLEN: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):  # fmt: skip
    """One row of OUT and LSE from its numerators PARTS (splits, rows, dim_v) and SUMS: all maxima, then all sums.

    Rows are (batch, heads, Lq), or (heads, rows) of sequences one after another, of which those past the last are
    cleared.

    Takes BLOCK_S splits at a time. Nothing that is loaded waits for what was, since waiting is all that this costs.
    """
    heads, seq_q = sizes.heads_q, sizes.seq_q
    rows = sizes.batch * heads * seq_q
    row = tl.program_id(0)
    if VARLEN:
        entry = row // seq_q // heads
        h = row // seq_q % heads
        i = row % seq_q
        begin, length = sequence(CU_Q, sizes.cu_q, entry, sizes.batch, sizes.rows_q)
        OUT += begin * by.l
        LSE += begin
        if entry == sizes.batch:
            clear(OUT, by.h, by.l, h, 1, i, length, seq_q, dims.v, 1, BLOCK_DV, False)
            for past in range(i, length, seq_q):
                tl.store(LSE + h.to(tl.int64) * sizes.rows_q + past, float("-inf"))
            return
        if i >= length:
            return
        rows = heads.to(tl.int64) * sizes.rows_q
        row = h.to(tl.int64) * sizes.rows_q + i
        SUMS += begin
        PARTS += begin * dims.v
    SUMS += row
    PARTS += row.to(tl.int64) * dims.v
    dv = tl.arange(0, BLOCK_DV)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    total = 0.0
    top = float("-inf")
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        at = s.to(tl.int64) * rows
        tops = tl.load(SUMS + at, mask=s < splits, other=float("-inf"))
        totals = tl.load(SUMS + splits.to(tl.int64) * rows + at, mask=s < splits, other=0.0)
        inside = (s < splits)[:, None] & (dv < dims.v)[None, :]
        parts = tl.load(PARTS + at[:, None] * dims.v + dv[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2((tops - base) * LOG2E)
        rescale = tl.exp2((top - base) * LOG2E)
        total = total * rescale + tl.sum(weights * totals, 0)
        acc = acc * rescale + tl.sum(parts * weights[:, None], 0)
        top = new_top
    b = 0
    if not VARLEN:
        b = (row // seq_q // heads).to(tl.int64)
        h = row // seq_q % heads
        i = row % seq_q
    if WITH_SINKS:
        top, total, rescale = with_sink(top, total, tl.load(SINKS + h))
        acc = acc * rescale
    total = tl.where(total == 0.0, 1.0, total)  # it saw nothing
    h = h.to(tl.int64)
    i = i.to(tl.int64)
    out = tl.div_rn(acc, total + tl.zeros_like(acc))
    tl.store(OUT + b * by.b + h * by.h + i * by.l + dv, rounded(out, OUT.dtype.element_ty), mask=dv < dims.v)
    tl.store(LSE + row, top + tl.log2(total) * LN2)
