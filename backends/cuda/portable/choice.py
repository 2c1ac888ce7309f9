"""Which tiles the portable kernels take on GPUs where none was measured, the fastest first: reckoned, not measured.

A step is what a warp does with one tile of columns. Alone, it takes the clocks of all that it uses, one after another:
products, reads of shared memory, exponentials, instructions. Where an SM has more warps, one's wait is another's work,
until the busiest of these is busy throughout (Little's law; Volkov, "Understanding Latency Hiding on GPUs", 2016). So a
tile is as good as the warps that an SM holds of it (``occupancy``), and as few bytes and instructions as it takes for
each product. Clocks are those of one of the four parts of an SM, a warp's home.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ...own import arithmetic
from ..classes import per_class
from . import occupancy
from .occupancy import SM
from .tiles import Tile, block, on_tensor_cores

__all__ = ["ranked", "taken"]

#: Warps of a block, and stages of its pipeline.
_WARPS, _STAGES = (4, 8), (1, 2)
#: Rows of a warp and columns of a tile.
_ROWS, _COLUMNS = (8, 16, 32), (8, 16, 32, 64, 128)
#: Registers that are left for a mask or dropout, which the table does not have.
_SPARE = 7
#: Rows to which the backward's arrays are padded.
_MOST_ROWS = 128
#: Tiles of a class of problems that are compared for its lengths.
_FEW = 8
#: How much sooner another tile must be done than the one that is best for long sequences: one more kernel to compile.
_WORTH = 1.2
#: Times that are taken to be alike: of these, the tile comes first that loads least, then the one that waits least.
_ALIKE = 1.08
#: Clocks of a barrier, of a copy that nothing hides, and to begin and end a block.
_BARRIER, _COPY, _BEGIN = 100, 500, 1500
#: Clocks of a read of shared memory by a warp: 512 bytes for matrices, at 128 a clock for all four parts; half of it
#: where lanes read the same 16 bytes.
_MATRICES, _CHUNKS = 16, 8
#: Clocks of an exponential by a warp, and bytes that an SM reads of the L2 in one.
_EXPONENTIAL, _L2 = 8, 32
#: Instructions of a score beside its products: forward, and gradients; of 16 bytes that are copied; of a step and of 8
#: of its rows.
_SCORE, _GRADIENT, _COPIED, _TURN, _ROW = 6, 10, 4, 60, 20
#: How much of what a warp uses beside what it uses most is waited for.
_WAITS = 0.5
#: Numbers of a thread that are multiplied by one that was read, in float32: 8 chunks of 16 bytes.
_PART = 8


class _Step(NamedTuple):
    """A tile, and how many blocks of it an SM holds.

    Clocks of a step: of a warp alone, of what it keeps busiest, of a block's loads; and those to begin a block.
    """

    tile: Tile
    blocks: int
    alone: float
    busy: float
    loads: float
    begin: float

    @property
    def scores(self) -> int:
        """Of a step of a block."""
        return self.tile.queries * self.tile.keys

    @property
    def pace(self) -> float:
        """Clocks of a score."""
        return self.time(self.blocks) / (self.blocks * self.scores)

    @property
    def slack(self) -> float:
        """Clocks of a score if nothing was ever busy."""
        return self.alone / (self.blocks * self.scores)

    def time(self, together: int) -> float:
        """Clocks of a step of so many blocks at once."""
        warps = max(1.0, together * self.tile.warps / 4)
        return max(self.alone, warps * self.busy, together * self.loads)


def taken(problem: Problem, device: Device) -> bool:
    """Whether tiles are reckoned: not in float64, nor on 9.0, where they were measured."""
    if device.kind != "cuda" or device.capability is None or device.capability[0] == 9:
        return False
    return problem.dtype != "float64"


def ranked(kernel: str, problem: Problem, device: Device) -> list[Tile]:
    """The tiles of ``kernel`` that suit ``problem`` on ``device``, the fastest first.

    Empty where none fits, or where tiles are not reckoned.
    """
    if not taken(problem, device):
        return []
    steps = _steps(problem, kernel, occupancy.sm(device))
    timed = [(_time(kernel, problem, device, step), n) for n, step in enumerate(steps)]
    if not timed:
        return []
    order = [n for _, n in sorted(timed)]
    if timed[0][0] <= _WORTH * timed[order[0]][0]:  # the best for long sequences is near enough
        order = [0, *(n for n in order if n)]
    return [steps[n].tile for n in order]


def _time(kernel: str, p: Problem, device: Device, step: _Step) -> float:
    """About how many clocks the SM with most blocks takes."""
    queries, keys = arithmetic.tiles(p.seq_q, step.tile.queries), arithmetic.tiles(p.seq_k, step.tile.keys)
    if kernel == "key_gradients":
        count = p.batch * p.heads_kv * keys
    elif kernel == "mask_gradient" and p.mask_shape is not None:  # a block adds up what the mask's axes leave out
        b, h, q, k = p.mask_shape
        count = b * h * (queries if q != 1 else 1) * (keys if k != 1 else 1)
    else:
        count = p.batch * p.heads_q * queries
    by = p.batch * p.heads_q * queries * keys / max(1, count)
    full, rest = divmod(arithmetic.tiles(count, device.sms or 64), step.blocks)
    rounds = full * (step.begin + by * step.time(step.blocks))
    return rounds + (step.begin + by * step.time(rest) if rest else 0.0)


@per_class
def _steps(problem: Problem, kernel: str, sm: SM) -> list[_Step]:
    """The best tiles for long sequences, the best first."""
    found = []
    for rows_of_warp, columns, warps, stages in itertools.product(_ROWS, _COLUMNS, _WARPS, _STAGES):
        own = rows_of_warp * warps
        single = kernel == "mask_gradient" or not sm.reserved  # before 8.0 no copy runs beside what a warp does
        if own > _MOST_ROWS or (stages > 1 and single):
            continue
        shape = (columns, own) if kernel == "key_gradients" else (own, columns)
        tile = Tile(*shape, warps, stages)
        registers = occupancy.registers(kernel, tile, problem) or occupancy.MOST_REGISTERS
        held = occupancy.blocks(kernel, tile, problem, sm)
        if held and registers <= occupancy.MOST_REGISTERS - _SPARE:
            found.append(_step(kernel, tile, problem, sm, held))
    best = sorted(found, key=lambda step: step.pace)[:_FEW]
    alike = _ALIKE * best[0].pace if best else 0.0
    return sorted(best, key=lambda step: (max(step.pace, alike), step.loads / step.scores, step.slack))


def _step(kernel: str, tile: Tile, problem: Problem, sm: SM, held: int) -> _Step:
    turned = kernel == "key_gradients"
    own, columns = (tile.keys, tile.queries) if turned else (tile.queries, tile.keys)
    of_warp = own // tile.warps
    dim, dim_v = (block(n, problem, tile) for n in (problem.dim_qk, problem.dim_v))
    depths, widths = _products(kernel, dim, dim_v)
    row = (dim + dim_v) * DTYPES[problem.dtype]
    moved = row * (columns + own if kernel == "mask_gradient" else columns)
    scores = of_warp * columns / 32
    lanes = 32 / (sm.ordinary / 4)  # clocks of an instruction of the ordinary units
    others = _TURN + of_warp / 8 * _ROW + scores * (_SCORE if kernel == "forward" else _GRADIENT)
    if kernel == "forward":
        others += of_warp * dim_v / 32  # sums are rescaled
    copies = moved / 16 / 32 / tile.warps * _COPIED
    terms = of_warp * columns * (sum(depths) + sum(widths))
    if on_tensor_cores(problem):
        products, reads = terms / 2048, _matrices(of_warp, columns, depths, widths)
        multiplied, read, computed = terms / (sm.tensor / 4), reads * _MATRICES, others * lanes
    else:
        products, reads = terms / 32, _chunks(of_warp, columns, depths, widths)
        multiplied, read, computed = (products + others) * lanes, reads * _CHUNKS, 0.0
    pipes = (multiplied, read, computed, scores * _EXPONENTIAL, products + reads + others + copies)
    exposed = _BARRIER + (_COPY if tile.stages == 1 else 0)
    alone = max(pipes) + _WAITS * (sum(pipes) - max(pipes)) + exposed
    return _Step(tile, held, alone, max(pipes), moved / _L2, _BEGIN + own * row / _L2)


def _products(kernel: str, dim: int, dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Depths of the products that make scores, and widths of those that add up sums."""
    if kernel == "forward":
        return (dim,), (dim_v,)
    if kernel == "query_gradient":
        return (dim, dim_v), (dim,)
    return (dim, dim_v), ((dim, dim_v) if kernel == "key_gradients" else ())


def _matrices(of_warp: int, columns: int, depths: tuple[int, ...], widths: tuple[int, ...]) -> float:
    """How often a warp reads four matrices (``mma.cuh``): of both operands, but not of scores, which it has."""
    left, right = of_warp / 16, columns / 16
    return sum(depths) / 16 * (left + right) + sum(widths) / 16 * right


def _chunks(of_warp: int, columns: int, depths: tuple[int, ...], widths: tuple[int, ...]) -> float:
    """How often a warp reads chunks of 16 bytes (``simt.cuh``): of a thread's rows and columns, for four terms each."""
    left, right = of_warp / 4, columns / 8
    return sum(depths) / 4 * (left + right) + columns / 4 * sum(widths) / 64 * (left + _PART)
