"""Which tiles Hopper's forward takes for a problem, the fastest first: reckoned from what each was measured to take."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own import arithmetic
from .tiles import HOPPER_SMS, HopperTile, hopper_block

__all__ = ["ranked"]

#: Tiles by head dimension, with times on an H200; README.md has what was measured beside them.
_TILES = {
    64: (
        HopperTile(192, 128, begin=3.5, step=1.38),
        HopperTile(128, 128, begin=2.7, step=1.18),
        HopperTile(128, 128, continued=True, begin=2.05, step=1.18),
    ),
    128: (
        HopperTile(192, 80, begin=5.5, step=1.36),
        HopperTile(128, 128, begin=4.4, step=1.57),
        HopperTile(192, 80, continued=True, begin=4.85, step=1.36),
        HopperTile(128, 128, continued=True, begin=3.75, step=1.57),
    ),
    256: (HopperTile(128, 80, begin=5.5, step=1.75), HopperTile(128, 64, begin=5.5, step=1.43)),
}
#: Microseconds that a launch of what is continued takes longer, whatever it computes.
_CONTINUING = 3.0
#: Turns that SMs wait for one another at the end, where lengths or a mask leave tiles of rows of all sizes.
_LAST = 0.5
#: At most so many tiles of rows are asked what they see by position, evenly spread where there are more.
_LOOKED_AT = 512


def ranked(problem: Problem, device: Device) -> list[HopperTile]:
    """The tiles, the fastest first."""
    uneven = _uneven(problem)

    def order(tile: HopperTile) -> tuple[bool, bool, float]:
        # What is continued pays where tiles of rows take as long as one another.
        return _crowded(problem, tile), uneven and tile.continued, _time(problem, device, tile)

    return sorted(_TILES[hopper_block(problem)], key=order)


def _time(problem: Problem, device: Device, tile: HopperTile) -> float:
    """About how many microseconds the SM with most to do takes, beside what any launch does."""
    tiles = problem.batch * problem.heads_q * arithmetic.tiles(problem.seq_q, tile.queries)
    share = tiles / (device.sms or HOPPER_SMS)
    launch = _CONTINUING if tile.continued else 0.0
    if problem.positional:  # tiles of all sizes, the longest first, which fill gaps
        steps = list(_steps(problem, tile))
        mean, most = (tile.begin + tile.step * n for n in (sum(steps) / len(steps), max(steps)))
        return launch + max(share * mean, most)
    one = tile.begin + tile.step * arithmetic.tiles(problem.seq_k, tile.keys)
    return launch + one * (max(1.0, share + _LAST) if _uneven(problem) else math.ceil(share))


def _steps(p: Problem, tile: HopperTile) -> Iterator[int]:
    """How many tiles of keys a tile of rows meets by position, for tiles from the first row to the last."""
    left, right = p.reach
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    rows = range(0, p.seq_q, tile.queries)
    for first in rows[:: arithmetic.tiles(len(rows), _LOOKED_AT)]:
        last = min(first + tile.queries, p.seq_q) - 1
        begin = 0 if left is None else max(0, first + offset - left)
        end = p.seq_k if right is None else min(p.seq_k, last + offset + right + 1)
        yield max(0, arithmetic.tiles(end, tile.keys) - begin // tile.keys)


def _uneven(problem: Problem) -> bool:
    """Whether tiles of rows take as long as lengths or a mask say, which the problem does not."""
    return problem.key_lengths or problem.mask is not None


def _crowded(problem: Problem, tile: HopperTile) -> bool:
    """Whether a mask's bits or a tanh have registers to spill: scores and sums of three consumers, or of 256."""
    three = tile.queries > 128
    if arithmetic.capped(problem):
        return three or tile.keys * hopper_block(problem) > 2**14
    return problem.mask is not None and three and (tile.continued or tile.keys > 80)
