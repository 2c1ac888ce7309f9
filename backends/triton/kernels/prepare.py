"""What the backward needs of every row: D = rowsum(dO O) - dlse, and its lse in the unit of the exponential."""

import triton
import triton.language as tl

from .tile import load_rows
from .varlen import padded_begin, padded_rows, sequence


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
        begin, length = sequence(CU_Q, sizes.cu_q, b, sizes.batch, sizes.rows_q)
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
