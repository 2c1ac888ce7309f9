"""Among how many blocks the keys of a row are split, who puts the parts together, and how long that takes."""

from __future__ import annotations

import functools
import math

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..launching import merging
from . import choice, occupancy
from .tiles import Tile, on_tensor_cores, packs, room

__all__ = ["EXTRA", "MERGED", "MOST_SPLITS", "PARTS", "WHOLE", "how", "pace", "schedule"]

#: How keys are split, as ``SPLIT`` of ``forward.cu``: not at all, into parts for another launch, or merged at once.
WHOLE, PARTS, MERGED = range(3)
#: Most splits of the keys of one row.
MOST_SPLITS = 256
#: Splits that the block of the last one merges; more are merged by a launch of many blocks.
_MOST_MERGED = 24
#: What a block takes beside its tiles, the last block of a row to merge, a launch that does, and that for each row of
#: an SM: in steps of a tile each warp, of about 2 us on an H200.
EXTRA, _MERGE, _LAUNCH, _LAUNCHED_ROW = 3, 3, 6, 0.5
#: Microseconds of a step; how busy a warp alone keeps its SM, by matrix instructions or the ordinary units (an H200:
#: h200/tiles.json).
_MICROSECONDS = 2.0
_BUSY, _BUSIER = 0.19, 0.22
#: Products of such a step on tensor cores, and how many times as long the ordinary units take for them.
_STEP, _ORDINARY = 2**20, 7


def how(tile: Tile, splits: int) -> int:
    """Which of ``WHOLE``, ``PARTS`` and ``MERGED`` as many splits are."""
    if splits == 1:
        return WHOLE
    return MERGED if tile.apart and splits <= _MOST_MERGED else PARTS


def schedule(problem: Problem, device: Device, tile: Tile) -> tuple[float, int]:
    """About how long the forward takes, in steps of a tile each warp, and among how many blocks keys are then split.

    Blocks run for about as long, in rounds of as many as fit, and a round takes its steps and a few more to begin and
    to end with. So no SM is left without work while others have some, if that can be, and is worth the merging.
    In pages sequences have lengths of their own, which the host does not know, and splits share each evenly.
    """
    sm = occupancy.sm(device) if not tile.apart and choice.taken(problem, device) else None
    heads, group, at_once, slowness = _of_class(problem, tile, device.on_chip, sm)
    blocks = problem.batch * heads * -(-problem.seq_q * group // tile.queries)
    tiles = -(-arithmetic.seen(problem, -(-tile.queries // group)) // tile.keys)
    if not blocks or not tiles:
        return 0, 1
    sms = device.sms or 64
    slots = sms * at_once
    if not tile.apart and not problem.page:
        of_step = _MICROSECONDS * slowness
        busy = tile.warps * (_BUSY if on_tensor_cores(problem) else _BUSIER)
        return _of_parts(
            blocks, tiles, sms, at_once, busy, merging.LAUNCH / of_step, merging.of_parts(problem) / of_step
        )
    launch = (_LAUNCH + _LAUNCHED_ROW * problem.batch * problem.heads_q * problem.seq_q / sms) / slowness
    work = blocks, tiles, slots, tile.teams, tile.apart, launch
    cost, splits = _soonest(*work)
    # In more rounds than one blocks that end early leave room for others already.
    if problem.page and splits == 1 and blocks <= slots:
        return _soonest_uneven(problem.batch, *work)
    return cost, splits


@functools.lru_cache(maxsize=4096)
def _of_parts(
    blocks: int, tiles: int, sms: int, at_once: int, busy: float, launch: float, part: float
) -> tuple[float, int]:
    """``schedule`` where a launch merges, which takes ``launch``, and ``part`` for each split.

    Blocks share their SM, which each keeps ``busy`` to a part, and which has room for ``at_once``. Splits hold two
    tiles at least, and only fill what is free.
    """
    best, least = 1, math.inf
    for splits in range(1, max(1, min(sms * at_once // blocks, tiles // 2, MOST_SPLITS)) + 1):
        together = -(-blocks * splits // sms)
        longest = max(-(-together // at_once), together * busy)
        cost = (-(-tiles // splits) + EXTRA) * max(1.0, longest) + (splits > 1) * (launch + part * splits)
        if cost < least:
            best, least = splits, cost
    return least, best


@functools.lru_cache(maxsize=4096)
def _soonest(blocks: int, tiles: int, slots: int, teams: int, apart: bool, launch: float) -> tuple[float, int]:
    """``schedule`` of whole blocks and their tiles of keys, where ``slots`` blocks run at one time.

    ``launch`` is what a launch takes that merges.
    """
    # Splits that are not apart hold two tiles at least, and only fill what is free: their rounds are no shorter.
    most = min(tiles if apart else min(slots // blocks, tiles // 2), MOST_SPLITS)
    rounds = -(-blocks // slots)
    best, least, tried = 1, float(rounds * (-(-tiles // teams) + EXTRA)), 1
    # No splits in as many rounds or more cost less than all steps, shared evenly, and what a round takes beside them.
    while tried < most and tiles * blocks / (slots * teams) + EXTRA * rounds < least:
        within = min(most, rounds * slots // blocks)
        for end in (min(within, _MOST_MERGED if apart else 0), within):
            if end > tried:  # of those merged alike in as many rounds, the most: they take the fewest steps
                tried = end
                steps = -(-tiles // (end * teams))
                splits = -(-tiles // (steps * teams))  # no more than take as few
                merge = 0 if splits == 1 else _MERGE if apart and splits <= _MOST_MERGED else launch
                cost = -(-blocks * splits // slots) * (steps + EXTRA) + merge
                if cost < least:
                    best, least = splits, cost
        rounds = max(rounds + 1, -(-blocks * (tried + 1) // slots))
    return least, -(-tiles // -(-tiles // best))  # none is launched for nothing


@functools.lru_cache(maxsize=4096)
def _soonest_uneven(
    batch: int, blocks: int, tiles: int, slots: int, teams: int, apart: bool, launch: float
) -> tuple[float, int]:
    """The same where the lengths of ``batch`` sequences are taken for evenly spread, up to that of the longest.

    Where all run at one time, the longest decides. Where they do not, the longest are begun first, and one begins as
    another ends, so that all end at about the same time.
    """
    best, least = 1, math.inf
    for splits in range(1, max(1, min(tiles if apart else tiles // 2, MOST_SPLITS)) + 1):
        steps = -(-tiles // (splits * teams))
        merge = 0 if splits == 1 else _MERGE if apart and splits <= _MOST_MERGED else launch
        longest = steps + EXTRA
        cost = float(longest)
        if blocks * splits > slots:
            each = (batch + 1) / (2 * batch) * tiles / (splits * teams) + 0.5 + EXTRA
            cost = max(cost, blocks * splits / slots * each)
        if cost + merge < least:
            best, least = splits, cost + merge
    return least, best


@per_class
def _of_class(problem: Problem, tile: Tile, on_chip: int, sm: occupancy.SM | None) -> tuple[int, int, int, float]:
    """Heads of the grid, query heads in each, blocks on an SM at one time, and ``pace``."""
    if sm is None:
        held = min(room(tile, "forward", problem, on_chip), 16 // tile.warps)
    else:
        held = occupancy.blocks("forward", tile, problem, sm)
    at_once = max(1, held)
    shape = (problem.heads_kv, problem.group) if packs(problem) else (problem.heads_q, 1)
    return *shape, at_once, pace(problem, tile)


def pace(problem: Problem, tile: Tile, products: int = 2) -> float:
    """How many times as long as one that waits for memory a step of ``tile`` takes, for its ``products`` of tiles."""
    if tile.apart:
        return 1
    terms = products * tile.queries * tile.keys * (problem.dim_qk + problem.dim_v) // 2
    return max(1, terms / _STEP * (1 if on_tensor_cores(problem) else _ORDINARY))
