"""Which tiles of a mask a program visits: what hides everything is not loaded, what hides nothing is not tested.

One kernel looks at every tile once, positions and lengths included, and makes of it, for each tile of queries (or of
keys), what to visit: the longest run of wholly visible tiles, stretched by a part of a tile at either end where the
mask is that of a padding, and a list of all other tiles that are not empty.
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
#: Kinds that ``_arrange`` looks at together.
_BLOCK = tl.constexpr(256)


@triton.jit
def _of_tiles(each, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Sums over the queries of each tile (AT_ONCE, width). Tiles lie side by side, or BY_KEYS below one another."""
    if BY_KEYS:
        sums = tl.sum(tl.reshape(each, (AT_ONCE, BLOCK_M, each.shape[1])), 1)
    else:
        sums = tl.reshape(tl.sum(each, 0), (AT_ONCE, each.shape[1] // AT_ONCE))
    return sums


@triton.jit
def _kinds(every, some, BLOCK_N: tl.constexpr, STRETCH: tl.constexpr):
    """Kinds (n,) of tiles, of whose keys (n, BLOCK_N) every query, or some, sees this one."""
    n = tl.arange(0, BLOCK_N)[None, :]
    sums = tl.sum(every + (some << 8) + (every * n << 16), 1)  # three in one, of at most 128, 128 and 8128
    count = sums & 0xFF
    seen = sums >> 8 & 0xFF
    places = sums >> 16
    kinds = tl.where(count == BLOCK_N, _FULL, tl.where(seen > 0, _MIXED, _EMPTY))
    if STRETCH:  # so many different places add up to the least, or the most, only at one end
        part = (seen == count) & (count > 0) & (count < BLOCK_N)
        least = count * (count - 1) // 2
        kinds = tl.where(part & (places == least), _HEAD + count, kinds)
        kinds = tl.where(part & (places == least + count * (BLOCK_N - count)), _TAIL + count, kinds)
    return kinds


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _arrange(kinds, step, tiles, counts, others, SIZE: tl.constexpr):
    """Write ``tiles`` and ``counts`` of one owner from its ``kinds``."""
    longest = 0
    run_end = 0
    gap = -1  # the last tile so far that is not full
    for first in range(0, others, _BLOCK):
        t = first + tl.arange(0, _BLOCK)
        kind = tl.load(kinds + t.to(tl.int64) * step, mask=t < others, other=_EMPTY)
        gaps = tl.maximum(tl.associative_scan(tl.where(kind == _FULL, -1, t), 0, _later), gap)
        here = tl.max((tl.cast(t - gaps, tl.int64) << 32) - t, 0)  # the longest, and of several the first: both in one
        length = tl.cast((here + 0x7FFFFFFF) >> 32, tl.int32)  # up, over what t took away
        run_end = tl.where(length > longest, tl.cast((tl.cast(length, tl.int64) << 32) - here, tl.int32) + 1, run_end)
        longest = tl.maximum(longest, length)
        if first + _BLOCK < others:  # a next block asks for it
            gap = tl.max(gaps, 0)
    run_first = run_end - longest
    before = kinds + tl.cast(run_first - 1, tl.int64) * step
    after = kinds + tl.cast(run_end, tl.int64) * step
    before = tl.load(before, mask=run_first > 0, other=_EMPTY).to(tl.int32)
    after = tl.load(after, mask=run_end < others, other=_EMPTY).to(tl.int32)
    stretch_first = run_first * SIZE - tl.where(before > _TAIL, before - _TAIL, 0)
    stretch_end = run_end * SIZE + tl.where((after > _HEAD) & (after < _TAIL), after - _HEAD, 0)
    near_first = stretch_first // SIZE
    near_end = tl.cdiv(stretch_end, SIZE)
    count = 0
    for first in range(0, others, _BLOCK):
        t = first + tl.arange(0, _BLOCK)
        kind = tl.load(kinds + t.to(tl.int64) * step, mask=t < others, other=_EMPTY)
        named = ((kind != _EMPTY) & ((t < near_first) | (t >= near_end))).to(tl.int32)
        tl.store(tiles + count + tl.cumsum(named, 0) - 1, t, mask=named != 0)
        count += tl.sum(named, 0)
    tl.store(counts, count)
    tl.store(counts + 1, run_first)
    tl.store(counts + 2, run_end)
    tl.store(counts + 3, stretch_first)
    tl.store(counts + 4, stretch_end)


@triton.jit
def classify(
    MASK, LENGTHS, KINDS, TILES, COUNTS,
    by, heads, owners, others, found, seq_q, seq_k, reach,
    AT_ONCE: tl.constexpr, BY_KEYS: tl.constexpr, STRETCH: tl.constexpr, WORDS: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """For each owner, a tile of queries or BY_KEYS of keys: TILES (batch, heads, owners, others), and COUNTS.

    COUNTS (batch, heads, owners, 5) holds how many tiles the list names; the first tile of the run and the one after
    it; and the first key of the stretched run and the one after it. KINDS (batch, heads, owners, found) is for this
    kernel alone: ``found`` is 1 where all ``others`` are alike. AT_ONCE tiles are looked at together. WORDS: the mask
    alone decides, it is bool, and its keys lie side by side, four to an aligned word.
    """
    if how.overlap:  # the attention may begin, up to where it waits
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_M: tl.constexpr = how.block_m
    BLOCK_N: tl.constexpr = how.block_n
    HEIGHT: tl.constexpr = BLOCK_M * AT_ONCE if BY_KEYS else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_N * AT_ONCE
    pid = tl.program_id(0)
    owner = pid % owners
    of = pid // owners
    b = (of // heads).to(tl.int64)
    MASK += b * by.b + (of % heads).to(tl.int64) * by.h
    pid = pid.to(tl.int64)
    kinds = KINDS + pid * found
    for first in range(0, found, AT_ONCE):
        t = first + tl.arange(0, AT_ONCE)
        tile_q = owner
        start = first * BLOCK_N
        if BY_KEYS:
            tile_q = first
            start = owner * BLOCK_N
        i = tl.minimum(tile_q * BLOCK_M + tl.arange(0, HEIGHT), seq_q - 1)[:, None]  # the last query once more
        rows = i.to(tl.int64) * by.l
        if WORDS:  # how many queries see each key, and how many with no bias: by four bytes at a time, or one by one
            n = tl.arange(0, WIDTH // 4)[None, :]
            there = first + n // (BLOCK_N // 4) < found  # tile by tile: tested together, loaded together
            words = (MASK + start + rows).to(tl.pointer_type(tl.uint32), bitcast=True) + n
            if BY_KEYS:
                four = tl.load(words)
            else:
                four = tl.load(words, mask=there, other=0)
            four = (((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) >> 7 & 0x01010101  # 1 in each byte that is not 0
            four = _of_tiles(four, BLOCK_M, AT_ONCE, BY_KEYS)  # of at most 128 queries: no byte overflows
            seeing = four[:, :, None] >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :] & 0xFF
            seeing = tl.reshape(seeing, (AT_ONCE, BLOCK_N)).to(tl.int32)
            plain = seeing
        else:
            n = tl.arange(0, WIDTH)[None, :]
            end, offset = extent(LENGTHS, b, seq_q, seq_k, reach, how)
            zero = tl.zeros((HEIGHT, WIDTH), tl.float32)
            mask = (MASK, rows, by.d, seq_k)
            span = (end, offset, reach.left, reach.right)
            bias, seen = hide(zero, i, n.to(tl.int64), start, span, mask, how.mask_kind, True, True, how)
            both = tl.broadcast_to(seen, (HEIGHT, WIDTH)).to(tl.int32)
            if how.mask_kind == FLOAT_MASK:
                both += tl.where(bias == 0.0, both << 16, 0)
            both = _of_tiles(both, BLOCK_M, AT_ONCE, BY_KEYS)
            seeing = both & 0xFFFF
            plain = seeing
            if how.mask_kind == FLOAT_MASK:
                plain = both >> 16
        every = (plain == BLOCK_M).to(tl.int32)
        some = (seeing > 0).to(tl.int32)
        tl.store(kinds + t, _kinds(every, some, BLOCK_N, STRETCH).to(tl.int16), mask=t < found)
    tl.debug_barrier()  # what other threads of the program have stored
    step = tl.minimum(found - 1, 1)
    _arrange(kinds, step, TILES + pid * others, COUNTS + pid * 5, others, BLOCK_M if BY_KEYS else BLOCK_N)


@triton.jit
def visit(counts):
    """What ``classify`` stored: how many tiles are named, the run (first, end) in tiles, and in keys when stretched."""
    return tl.load(counts), (tl.load(counts + 1), tl.load(counts + 2)), (tl.load(counts + 3), tl.load(counts + 4))
