"""Among how many blocks the keys of a row are split, who puts the parts together, and how long that takes."""

from __future__ import annotations

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .tiles import HopperTile, Tile, on_tensor_cores, packs, room, rows

__all__ = ["MERGED", "PARTS", "WHOLE", "how", "schedule"]

#: How keys are split, as ``SPLIT`` of ``forward.cu``: not at all, into parts for another launch, or merged at once.
WHOLE, PARTS, MERGED = range(3)
#: Most splits of the keys of one row.
_MOST_SPLITS = 256
#: Splits that the block of the last one merges; more are merged by a launch of many blocks.
_MOST_MERGED = 24
#: What a block takes beside its tiles, the last block of a row to merge, a launch that does, and that for each row of
#: an SM: in steps of a tile each warp, of about 2 us on an H200.
_EXTRA, _MERGE, _LAUNCH, _LAUNCHED_ROW = 3, 3, 6, 0.5
#: Products of such a step on tensor cores, and how many times as long the ordinary units take for them.
_STEP, _ORDINARY = 2**20, 7


def how(tile: Tile | HopperTile, splits: int) -> int:
    """Which of ``WHOLE``, ``PARTS`` and ``MERGED`` as many splits are."""
    if splits == 1:
        return WHOLE
    return MERGED if isinstance(tile, Tile) and tile.apart and splits <= _MOST_MERGED else PARTS


def schedule(problem: Problem, device: Device, tile: Tile) -> tuple[float, int]:
    """About how long the forward takes, in steps of a tile each warp, and among how many blocks keys are then split.

    Blocks run for about as long, in rounds of as many as fit, and a round takes its steps and a few more to begin and
    to end with. So no SM is left without work while others have some, if that can be, and is worth the merging.
    """
    blocks = problem.batch * problem.heads_q * -(-rows(problem) // tile.queries)
    blocks //= problem.group if packs(problem) else 1
    tiles = -(-problem.seq_k // tile.keys)
    if not blocks or not tiles:
        return 0, 1
    sms = device.sms or 64
    slots = sms * max(1, min(room(tile, "forward", problem, device), 16 // tile.warps))
    launch = _LAUNCH + _LAUNCHED_ROW * problem.batch * problem.heads_q * problem.seq_q / sms
    merge = {WHOLE: 0, MERGED: _MERGE, PARTS: launch / _pace(problem, tile)}

    def cost(splits: int) -> float:
        each = -(-tiles // splits)
        steps = -(-each // tile.teams)
        return -(-blocks * splits // slots) * (steps + _EXTRA) + merge[how(tile, splits)]

    most = tiles
    if not tile.apart:  # splits hold two tiles at least, and only fill what is free: their rounds are no shorter
        most = min(slots // blocks, tiles // 2)
    best = min(range(1, max(1, min(most, _MOST_SPLITS)) + 1), key=cost)
    return cost(best), -(-tiles // -(-tiles // best))  # none is launched for nothing


def _pace(problem: Problem, tile: Tile) -> float:
    """How many times as long as one that waits for memory a step of ``tile`` takes, for its arithmetic."""
    if tile.apart:
        return 1
    products = tile.queries * tile.keys * (problem.dim_qk + problem.dim_v)
    return max(1, products / _STEP * (1 if on_tensor_cores(problem) else _ORDINARY))
