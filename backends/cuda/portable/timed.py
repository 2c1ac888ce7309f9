"""The portable forward in float32 on Hopper, whose tiles were timed: which it takes, and how many blocks split keys.

One block of four warps keeps the ordinary units of an SM nearly busy: two blocks take almost twice as long. So splits
pay where SMs would have no block, and a smaller tile where rows are left over; else the tile is taken that needs least
for each score.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..launching import merging
from .tiles import FEWER, Tile, block, packs, rows

__all__ = ["soonest", "taken"]

#: By class of head dimension: microseconds of a step of a tile, alone on its SM and beside others (an H200:
#: h200/tiles.json, by ``fixtures/measure_tiles.py``, which has tiles that were slower too).
_STEPS = {
    64: {Tile(128, 64, 4, 1, 2): (9.3, 7.3), Tile(64, 32, 4, 2, 2): (2.4, 2.1)},
    128: {Tile(64, 32, 4, 2, 2): (4.7, 4.1)},
}
_MOST_SPLITS = 32


def taken(problem: Problem, device: Device) -> bool:
    """Whether the forward of ``problem`` on ``device`` is one of those."""
    if device.kind != "cuda" or (device.capability or (0, 0))[0] != 9 or problem.dtype != "float32":
        return False
    if problem.page or problem.varlen or packs(problem):
        return False
    return max(problem.dim_qk, problem.dim_v) <= 128 and rows(problem) > FEWER


def soonest(problem: Problem, device: Device) -> tuple[Tile, int]:
    """The tile that is done first, and among how many blocks the keys of a row are then split."""
    _, tile, splits = min(_timed(problem, device.sms or 64), key=itemgetter(0))
    return tile, splits


def _timed(p: Problem, sms: int) -> Iterator[tuple[float, Tile, int]]:
    """Microseconds of each tile and number of splits."""
    wide = max(p.dim_qk, p.dim_v)
    of_class = 64 if wide <= 64 else 128
    parts = merging.of_parts(p)
    for tile, (alone, beside) in _STEPS[of_class].items():
        share = (block(p.dim_qk, p, tile) + block(p.dim_v, p, tile)) / (2 * of_class)
        blocks = p.batch * p.heads_q * arithmetic.tiles(p.seq_q, tile.queries)
        keys = arithmetic.tiles(p.seq_k, tile.keys)
        most = min(_MOST_SPLITS, max(1, keys // 2)) if blocks else 1
        for splits in range(1, most + 1):
            each = arithmetic.tiles(keys, splits)
            if splits > 1 and each == arithmetic.tiles(keys, splits - 1):
                continue  # no block has fewer steps for it
            together = arithmetic.tiles(blocks * splits, sms)
            to_merge = (merging.LAUNCH + splits * parts) if splits > 1 else 0.0
            yield (each + 1) * max(alone, together * beside) * share + to_merge, tile, splits
