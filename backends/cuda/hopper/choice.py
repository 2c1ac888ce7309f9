"""Which tiles Hopper's kernels take for a problem, the fastest first: reckoned from what each was measured to take."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..launching import merging
from .tiles import (
    EVEN,
    FEW,
    LATENT,
    SMS,
    HopperGradients,
    HopperTile,
    LatentTile,
    bias,
    dims,
    gradient_dims,
    latent_heads,
    latent_tiles,
    lengths,
    ordered,
    saved,
)

__all__ = ["alike", "gradients", "latent", "latent_splits", "most_saved", "ranked", "ranked_gradients", "splits"]

#: Tiles by head dimensions, with times on an H200; MEASURED.md and TRIED.md have what was measured beside them.
_TILES = {
    (64, 64): (
        HopperTile(192, 128, begin=3.5, step=1.38),
        HopperTile(128, 128, begin=2.7, step=1.18),
        HopperTile(128, 128, continued=True, begin=2.05, step=1.18),
    ),
    (96, 96): (HopperTile(192, 112, begin=3.0, step=1.43), HopperTile(128, 128, begin=2.5, step=1.31)),
    (128, 128): (
        HopperTile(192, 80, begin=5.5, step=1.36),
        HopperTile(128, 128, begin=4.4, step=1.57),
        HopperTile(192, 80, continued=True, begin=4.85, step=1.36),
        HopperTile(128, 128, continued=True, begin=3.75, step=1.57),
    ),
    (192, 128): (HopperTile(128, 128, begin=3.4, step=1.7),),
    (256, 256): (HopperTile(128, 80, begin=5.5, step=1.75), HopperTile(128, 64, begin=5.5, step=1.43)),
}
#: The same where tiles of a float mask take room, and registers.
_BIASED = {
    (64, 64): (HopperTile(128, 128, begin=2.9, step=1.47),),
    (96, 96): (HopperTile(128, 128, begin=3.4, step=1.75),),
    (128, 128): (HopperTile(128, 128, begin=3.9, step=2.06),),
    (192, 128): (HopperTile(128, 80, begin=3.8, step=1.44),),
    (256, 256): (HopperTile(128, 64, begin=6.0, step=1.44),),
}
#: Tiles of the backward by head dimensions, with times on an H200.
_GRADIENTS = {
    (64, 64): HopperGradients(128, 128, 2, begin=5.0, step=2.25),
    (128, 128): HopperGradients(128, 64, 2, begin=4.5, step=2.08),
    (192, 128): HopperGradients(128, 64, 2, begin=6.0, step=2.94),
    (256, 256): HopperGradients(64, 64, 2, begin=8.3, step=2.8),
}
#: The same where a tanh or dropout takes registers, or tiles of a float mask take room; and where blocks add to the
#: gradient of the query in turn. Steps with dropout were not timed, and are reckoned as those without.
_CAPPED = {**_GRADIENTS, (64, 64): HopperGradients(128, 64, 4, begin=6.0, step=1.5)}
_ORDERED = {
    (64, 64): HopperGradients(128, 64, 4, begin=6.0, step=1.5),
    (128, 128): HopperGradients(128, 64, 2, begin=7.0, step=2.15),
}
#: Microseconds that a tile of keys takes less to begin and to end with where blocks go on with other keys.
_GOING_ON = 2.0
#: How much later the last of these blocks ends than the mean, in longest tiles, where positions make tiles unlike.
_STAIRS = 1.25
#: Parts of the queries of the same keys at most, and microseconds that each takes for a million sums of dK and dV; and
#: blocks for each SM from which on there are none.
_MOST_SPLITS, _PART, _SHARED_UP_TO = 16, 1.2, 4
#: Microseconds that a block of the forward of wide heads takes to begin and to end with, and for each pair of tiles;
#: parts of the keys at most, and rounds of blocks from which on SMs end at about the same time.
_LATENT, _MOST_LATENT, _ROUNDS = HopperTile(64, 64, begin=7.0, step=4.5), 128, 4
#: Tiles of rows for each SM from which on, and up to which, keys are split evenly: of fewer, rows have many parts, and
#: of more, SMs end at about the same time anyway.
_LEAST_EVEN, _MOST_EVEN = 0.25, 4
#: Pairs of tiles of keys that take as long as what a tile of rows does beside them: ``src/hopper/latent/even.cuh``.
_BESIDE = 1
#: Microseconds that a launch of what is continued takes longer, whatever it computes.
_CONTINUING = 3.0
#: Turns that SMs wait for one another at the end, where lengths or a mask leave tiles of rows of all sizes.
_LAST = 0.5


def ranked(problem: Problem, device: Device) -> list[HopperTile]:
    """The tiles, the fastest first."""
    timed = [(*last, _time(problem, device, tile), n) for n, (last, tile) in enumerate(_tiles(problem))]
    timed.sort()
    return [_tiles(problem)[n][1] for *_, n in timed]


@per_class
def _tiles(problem: Problem) -> list[tuple[tuple[bool, bool], HopperTile]]:
    """Each tile, after what puts it behind the others however fast it is."""
    # What is continued pays where tiles of rows take as long as one another.
    uneven = _uneven(problem)
    found = (_BIASED if bias(problem) else _TILES)[dims(problem)]
    return [((_crowded(problem, tile), uneven and tile.continued), tile) for tile in found]


def gradients(problem: Problem) -> HopperGradients:
    """The tile of the backward."""
    if ordered(problem):
        return _ORDERED[gradient_dims(problem)]
    small = arithmetic.capped(problem) or problem.dropout > 0.0 or bias(problem) == 1
    return (_CAPPED if small else _GRADIENTS)[gradient_dims(problem)]


def ranked_gradients(problem: Problem, device: Device) -> list[HopperGradients]:
    """The tile of the backward, and the same where blocks go on with other keys: the faster first."""
    tile = gradients(problem)
    if gradient_dims(problem) != (64, 64) or ordered(problem) or bias(problem) == 1:
        return [tile]  # registers and shared memory hold no more
    found = [tile, replace(tile, continued=True)]
    return found[::-1] if _pays_to_go_on(problem, device, tile) else found


def _pays_to_go_on(p: Problem, device: Device, tile: HopperGradients) -> bool:
    """Whether as many blocks as SMs that go on with other keys take less time than a block for each tile of keys.

    TRIED.md has what both took.
    """
    if device.kind == "cpu":  # so that both are checked
        return p.seq_k % 4 == 1
    sms, blocks = device.sms or SMS, _blocks(p, tile)
    if blocks <= sms or _uneven(p) or splits(p, device, tile) > 1:
        return False
    met = _queries(p, tile)
    share, last = _blocks_take(p, sms, tile, met)
    going_on, longest = _blocks_take(p, sms, replace(tile, begin=tile.begin - _GOING_ON), met)
    going_on = going_on + _STAIRS * longest if p.positional else math.ceil(blocks / sms) * longest
    return going_on < share + last / 2


@functools.lru_cache(maxsize=64)  # asked for by the plan, and by what it launches
def splits(problem: Problem, device: Device, tile: HopperGradients) -> int:
    """Among how many blocks the queries of the same keys are divided: as many as let SMs end at about the same time."""
    p, met = problem, _queries(problem, tile)
    sums = _blocks(p, tile) * tile.keys * (p.dim_qk + p.dim_v) / 1e6

    def time(parts: int) -> float:
        share, last = _blocks_take(p, device.sms or SMS, tile, met, parts)
        return max(share + last / 2, last) + (parts * sums * _PART if parts > 1 else 0.0)

    most = min(_MOST_SPLITS, max(1, met[1] * p.group))
    return min(range(1, most + 1), key=time)


def alike(p: Problem, rows: int) -> Problem:
    """A problem of as much work, which says how long its sequences are: with varlen as long as the longest.

    ``rows`` are the keys of all sequences together.
    """
    return p.dense(batch=max(1, rows // p.seq_k)) if p.varlen else p


def most_saved(p: Problem, device: Device) -> int:
    """Numbers that launches of the backward leave to one another at most, however long sequences are.

    ``p`` is as it is launched. Of few rows, several blocks share each tile of keys.
    """
    tile = gradients(p)
    if not p.varlen:
        return sum(saved(p, lengths(p, (1, 1)), splits(p, device, tile)))
    sequences, each = p.batch - 1, _blocks(p.dense(batch=1), tile)
    few = min(sequences, math.ceil(_SHARED_UP_TO * (device.sms or SMS) / max(1, each)))  # more are not shared
    numbers = []
    for n in {*range(1, few + 1), max(1, sequences)}:
        rows = min((n + 1) * p.seq_k, sequences * p.seq_k)
        parts = splits(alike(p, n * p.seq_k), device, tile)
        numbers.append(sum(saved(p, lengths(p, (sequences * p.seq_q, rows)), parts)))
    return max(numbers)


def _blocks(p: Problem, tile: HopperGradients) -> int:
    """Tiles of keys of all key heads."""
    return p.batch * p.heads_kv * arithmetic.tiles(p.seq_k, tile.keys)


def _blocks_take(
    p: Problem, sms: int, tile: HopperGradients, met: tuple[int, int], parts: int = 1
) -> tuple[float, float]:
    """Microseconds of an SM's share of all blocks, ``parts`` to a tile of keys, and of the longest block.

    ``met`` are the ``_queries``.
    """
    total, longest = met
    share = (_blocks(p, tile) * parts * tile.begin + p.batch * p.heads_q * total * tile.step) / sms
    return share, tile.begin + tile.step * math.ceil(longest * p.group / parts)


def latent(problem: Problem, device: Device) -> LatentTile:
    """The tile of the forward of wide heads: of few rows where they are all of a key head.

    Of those keys are split evenly where the GPU alone knows how many there are.
    """
    p = problem
    if latent_heads(p, LATENT) * p.seq_q > FEW.queries:
        return LATENT
    if p.splits:  # a sequence has its bits whatever the others' lengths and queries
        return LATENT if p.varlen else FEW
    if device.kind == "cpu":  # so that all are checked
        return (EVEN, FEW, LATENT)[arithmetic.tiles(p.seq_k, FEW.keys) % 3]
    if not (p.key_lengths or p.varlen):
        return FEW
    tiles = latent_tiles(p, FEW)
    share = tiles / (device.sms or SMS)
    counted = tiles * (_pairs(p) + _BESIDE) < 2**31  # by blocks, in 32 bits
    return EVEN if _LEAST_EVEN < share <= _MOST_EVEN and counted else FEW


def _pairs(p: Problem) -> int:
    """Of tiles of keys, as the forward of wide heads takes them."""
    return arithmetic.tiles(p.seq_k, 2 * LATENT.keys)


def latent_splits(problem: Problem, device: Device) -> int:
    """Among how many blocks the keys of wide heads are split: as many as let SMs end at about the same time."""
    p = problem
    pairs = _pairs(p)
    if device.kind == "cpu":  # so that both are checked
        return max(1, min(2, pairs)) if p.seq_k % 2 else 1
    # Sequences in pages have lengths of their own: all are taken for the longest, and for evenly spread up to that.
    means = (1.0, (p.batch + 1) / (2 * p.batch)) if p.page and p.batch else (1.0,)
    return _latent_splits(latent_tiles(p, LATENT), pairs, device.sms or SMS, means, merging.of_parts(p))


@functools.lru_cache(maxsize=4096)  # lengths change at every token, and pairs of tiles rarely
def _latent_splits(blocks: int, pairs: int, sms: int, means: tuple[float, ...], part: float) -> int:
    """The same, of ``blocks`` tiles of rows, whose keys are ``pairs`` of tiles where they are the longest.

    ``means`` are how long the average may be, as a part of the longest; each counts alike.
    """

    def time(parts: int, mean: float) -> float:
        longest = _LATENT.begin + _LATENT.step * arithmetic.tiles(pairs, parts)
        rounds = blocks * parts / sms
        share = rounds * (_LATENT.begin + _LATENT.step * pairs / parts * mean)
        if mean == 1.0 and rounds <= _ROUNDS:
            share = math.ceil(rounds) * longest
        return max(longest, share) + (merging.LAUNCH + part * parts if parts > 1 else 0.0)

    most = max(1, min(pairs, _MOST_LATENT))
    return min(range(1, most + 1), key=lambda parts: sum(time(parts, mean) for mean in means))


def _queries(p: Problem, tile: HopperGradients) -> tuple[int, int]:
    """How many tiles of queries all tiles of keys of a head meet by position, and about how many at most."""
    left, right = p.reach
    rows, whole = arithmetic.tiles(p.seq_k, tile.keys), arithmetic.tiles(p.seq_q, tile.queries)
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    total, longest = rows * whole, whole
    if right is not None:  # a tile of keys begins at the first query that sees its first key
        total -= _staircase(rows, -offset - right, tile.keys, tile.queries, whole)
        longest = whole - min(whole, max(0, -offset - right) // tile.queries)
    if left is not None:
        end = tile.keys - offset + left
        total -= rows * whole - _staircase(rows, end + tile.queries - 1, tile.keys, tile.queries, whole)
        longest = min(longest, arithmetic.tiles(tile.keys + left + (right or 0), tile.queries) + 1)
    return max(0, total), max(0, min(total, longest))


def _time(problem: Problem, device: Device, tile: HopperTile) -> float:
    """About how many microseconds the SM with most to do takes, beside what any launch does."""
    rows = arithmetic.tiles(problem.seq_q, tile.queries)
    share = problem.batch * problem.heads_q * rows / (device.sms or SMS)
    launch = _CONTINUING if tile.continued else 0.0
    if problem.positional:  # tiles of all sizes, the longest first, which fill gaps
        steps, longest = _steps(problem, tile)
        return launch + max(share * (tile.begin + tile.step * steps / rows), tile.begin + tile.step * longest)
    one = tile.begin + tile.step * arithmetic.tiles(problem.seq_k, tile.keys)
    return launch + one * (max(1.0, share + _LAST) if _uneven(problem) else math.ceil(share))


def _steps(p: Problem, tile: HopperTile) -> tuple[int, int]:
    """How many tiles of keys all tiles of rows meet by position, and about how many the one that meets most does."""
    left, right = p.reach
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    rows = arithmetic.tiles(p.seq_q, tile.queries)
    whole = arithmetic.tiles(p.seq_k, tile.keys)
    total, longest = rows * whole, whole
    if right is not None:  # a tile ends after the last key of its last row
        end = offset + right + tile.queries
        total = _staircase(rows, end + tile.keys - 1, tile.queries, tile.keys, whole)
        last = min(p.seq_k, offset + right + p.seq_q)
        longest = max(0, arithmetic.tiles(last, tile.keys))
        cut = min(p.seq_k, offset + right + rows * tile.queries)  # as if the last tile were full
        total -= max(0, arithmetic.tiles(cut, tile.keys)) - longest
    if left is not None:  # and begins at the first of its first
        total -= _staircase(rows, offset - left, tile.queries, tile.keys, whole)
        if right is None:
            longest = max(0, whole - max(0, offset - left) // tile.keys)
        else:  # the window reaches into most tiles where it begins latest in one
            among = math.gcd(tile.queries, tile.keys)
            latest = tile.keys - among + (offset - left) % among
            longest = min(longest, arithmetic.tiles(latest + left + min(tile.queries, p.seq_q) + right, tile.keys))
    return total, min(total, longest)


def _uneven(problem: Problem) -> bool:
    """Whether tiles of rows take as long as lengths or a mask say, which the problem does not."""
    return problem.key_lengths or problem.varlen or (problem.mask is not None and problem.mask.is_bool)


def _crowded(problem: Problem, tile: HopperTile) -> bool:
    """Whether bits of a mask or of dropout, or a tanh, spill: beside sums of three consumers, or of D 256."""
    three, large = tile.queries > 128, tile.keys * dims(problem)[1] > 2**14
    if problem.dropout > 0.0:
        return three or large or tile.continued
    if arithmetic.capped(problem):
        return three or large
    return three and problem.mask is not None and (tile.continued or tile.keys > 80)


def _staircase(steps: int, start: int, rise: int, tread: int, most: int) -> int:
    """The sum of (start + rise * i) // tread, each at least 0 and at most ``most``, for i from 0 to ``steps`` - 1."""
    low = min(steps, max(0, arithmetic.tiles(tread - start, rise)))  # before it all are 0
    high = min(steps, max(low, arithmetic.tiles(most * tread - start, rise)))  # from it on all are the most
    return _floors(high - low, start + rise * low, rise, tread) + (steps - high) * most


def _floors(count: int, start: int, rise: int, tread: int) -> int:
    """``_staircase`` of no bounds: the lattice points below a line, turned as in Euclid's algorithm."""
    total = 0
    while count > 0:
        total += count * (start // tread) + count * (count - 1) // 2 * (rise // tread)
        start, rise = start % tread, rise % tread
        top = start + rise * count
        if top < tread:
            break
        count, start, rise, tread = top // tread, top % tread, tread, rise
    return total
