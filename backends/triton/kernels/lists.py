"""Which tiles of a mask a program visits: what hides everything is not loaded, what hides nothing is not tested.

``classify`` looks at every tile once, positions and lengths included; ``arrange`` makes of it, for each tile of queries
(or of keys), what to visit: the longest run of wholly visible tiles, stretched by a part of a tile at either end where
the mask is that of a padding, and a list of all other tiles that are not empty.
"""

import triton
import triton.language as tl

from .tile import FLOAT_MASK, extent, hide

#: What is known of a tile. From _HEAD and _TAIL on, that as many of its first or last keys are seen by every query, and
#: the others by none.
_EMPTY = tl.constexpr(0)
_MIXED = tl.constexpr(1)
_FULL = tl.constexpr(2)
_HEAD = tl.constexpr(1024)
_TAIL = tl.constexpr(2048)


@triton.jit
def _kind(seeing, plain, rows, BLOCK_N: tl.constexpr, STRETCH: tl.constexpr):
    """The kind of a tile of ``rows`` queries, of whom so many see each key (BLOCK_N,), and so many with no bias."""
    every = (plain == rows).to(tl.int32)
    count = tl.sum(every, 0)
    kind = tl.where(count == BLOCK_N, _FULL, (tl.max(seeing, 0) > 0).to(tl.int32) * _MIXED)
    if STRETCH:
        n = tl.arange(0, BLOCK_N)
        alike = (tl.sum((seeing > 0).to(tl.int32), 0) == count) & (count > 0) & (count < BLOCK_N)
        kind = tl.where(alike & (tl.max(every * (n + 1), 0) == count), _HEAD + count, kind)
        kind = tl.where(alike & (tl.max(every * (BLOCK_N - n), 0) == count), _TAIL + count, kind)
    return kind


@triton.jit
def _by_words(MASK, smq, start, inside, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many queries see each key (BLOCK_N,) of a tile, by four bytes of a bool mask at a time."""
    n = tl.arange(0, BLOCK_N // 4)[None, :]
    rows = MASK + start + tl.arange(0, BLOCK_M).to(tl.int64)[:, None] * smq
    words = rows.to(tl.pointer_type(tl.uint32), bitcast=True)
    four = tl.load(words + n, mask=inside, other=0)
    four = (((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) >> 7 & 0x01010101  # 1 in each byte that is not 0
    sums = tl.sum(four, 0)  # of at most 128 rows: no byte overflows
    each = sums[:, None] >> (8 * tl.arange(0, 4))[None, :].to(tl.uint32) & 0xFF
    return tl.reshape(each, (BLOCK_N,)).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "tiles_q", "tiles_k", "seq_q", "seq_k", "bottom_right", "left", "right"])
def classify(
    MASK, LENGTHS, KINDS,
    smb, smh, smq, smk, heads, tiles_q, tiles_k, seq_q, seq_k, bottom_right, left, right,
    STRETCH: tl.constexpr, WORDS: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """KINDS (batch or 1, heads or 1, tiles_q or 1, tiles_k) as int16.

    WORDS: the mask alone decides, it is bool, and its keys lie side by side, four to an aligned word.
    """
    if how.overlap:  # ``arrange`` may begin, up to where it waits
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    tile_q = pid // tiles_k % tiles_q
    h = pid // tiles_k // tiles_q % heads
    b = pid // tiles_k // tiles_q // heads
    first = tile_q * BLOCK_M
    start = tile_k * BLOCK_N
    i = first + tl.arange(0, BLOCK_M)[:, None]
    inside = i < seq_q
    MASK += b.to(tl.int64) * smb + h.to(tl.int64) * smh
    if WORDS:
        seeing = _by_words(MASK + first.to(tl.int64) * smq, smq, start, inside, BLOCK_M, BLOCK_N)
        plain = seeing
    else:
        n = tl.arange(0, BLOCK_N)[None, :]
        end, offset = extent(LENGTHS, b, seq_q, seq_k, bottom_right, how)
        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        mask = (MASK, tl.minimum(i, seq_q - 1).to(tl.int64) * smq, smk, seq_k)
        bias, seen = hide(
            zero, i, n.to(tl.int64), start, (end, offset, left, right), mask,
            how.mask_kind, how.has_lengths or not how.even_k, not how.even_k, how,
        )  # fmt: skip
        both = (tl.broadcast_to(seen, (BLOCK_M, BLOCK_N)) & inside).to(tl.int32)
        if how.mask_kind == FLOAT_MASK:
            both += tl.where(bias == 0.0, both << 16, 0)
        both = tl.sum(both, 0)
        seeing = both & 0xFFFF
        plain = seeing
        if how.mask_kind == FLOAT_MASK:
            plain = both >> 16
    rows = tl.minimum(BLOCK_M, seq_q - first)
    tl.store(KINDS + pid, _kind(seeing, plain, rows, BLOCK_N, STRETCH).to(tl.int16))


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["owners", "others", "step_owner", "step_other", "step_head"])
def arrange(
    KINDS, TILES, COUNTS,
    owners, others, step_owner, step_other, step_head,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """For one owner a program: TILES (..., owners, others), and COUNTS (..., owners, 5).

    COUNTS holds how many tiles the list names; the first tile of the run and the one after it; and the first key of the
    stretched run and the one after it, SIZE keys to a tile.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0).to(tl.int64)
    kinds = KINDS + pid // owners * step_head + pid % owners * step_owner
    longest = 0
    run_end = 0
    gap = -1  # the last tile so far that is not full
    for first in range(0, others, BLOCK):
        t = first + tl.arange(0, BLOCK)
        kind = tl.load(kinds + t.to(tl.int64) * step_other, mask=t < others, other=_EMPTY)
        gaps = tl.maximum(tl.associative_scan(tl.where(kind == _FULL, -1, t), 0, _later), gap)
        length = t - gaps
        here = tl.max(length, 0)
        ends = tl.min(tl.where(length == here, t + 1, others), 0)
        run_end = tl.where(here > longest, ends, run_end)
        longest = tl.maximum(longest, here)
        gap = tl.max(gaps, 0)
    run_first = run_end - longest
    before = kinds + tl.cast(run_first - 1, tl.int64) * step_other
    after = kinds + tl.cast(run_end, tl.int64) * step_other
    before = tl.load(before, mask=run_first > 0, other=_EMPTY).to(tl.int32)
    after = tl.load(after, mask=run_end < others, other=_EMPTY).to(tl.int32)
    stretch_first = run_first * SIZE - tl.where(before > _TAIL, before - _TAIL, 0)
    stretch_end = run_end * SIZE + tl.where((after > _HEAD) & (after < _TAIL), after - _HEAD, 0)
    near_first = stretch_first // SIZE
    near_end = tl.cdiv(stretch_end, SIZE)
    count = 0
    for first in range(0, others, BLOCK):
        t = first + tl.arange(0, BLOCK)
        kind = tl.load(kinds + t.to(tl.int64) * step_other, mask=t < others, other=_EMPTY)
        named = ((kind != _EMPTY) & ((t < near_first) | (t >= near_end))).to(tl.int32)
        tl.store(TILES + pid * others + count + tl.cumsum(named, 0) - 1, t, mask=named != 0)
        count += tl.sum(named, 0)
    tl.store(COUNTS + pid * 5, count)
    tl.store(COUNTS + pid * 5 + 1, run_first)
    tl.store(COUNTS + pid * 5 + 2, run_end)
    tl.store(COUNTS + pid * 5 + 3, stretch_first)
    tl.store(COUNTS + pid * 5 + 4, stretch_end)


@triton.jit
def visit(counts):
    """What ``arrange`` stored: how many tiles are named, the run (first, end) in tiles, and in keys when stretched."""
    return tl.load(counts), (tl.load(counts + 1), tl.load(counts + 2)), (tl.load(counts + 3), tl.load(counts + 4))
