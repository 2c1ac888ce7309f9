"""Tile sizes, warps, stages and splits of the CUDA kernels, and the shared memory that they take: nowhere else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attnswitch import arithmetic
from attnswitch.backend import Config
from attnswitch.cost import kv_bytes
from attnswitch.device import Device
from attnswitch.problem import DTYPES, Problem

from .families import against_hopper

__all__ = [
    "MERGED",
    "MERGING_WARPS",
    "PARTS",
    "ROWS_A_BLOCK",
    "WHOLE",
    "CudaConfig",
    "HopperTile",
    "Tile",
    "block",
    "configs",
    "hopper_block",
    "hopper_shared",
    "left",
    "merging_shared",
    "once",
    "packs",
    "rows",
    "shared",
]

#: Shared memory of a block where the device does not say: what every GPU since sm_86 has.
_SHARED = 99 * 1024
#: Most splits of the keys of one row.
_MOST_SPLITS = 256
#: Rows of a matrix instruction: so many, or fewer, are a tile that all warps of a block have.
_FEW = 16
#: Columns of a head at most.
_MOST_COLUMNS = 256
#: What a block takes beside its tiles, the last block of a row to merge, a launch that does, and that for each row of
#: an SM: in steps of a tile each warp, of about 2 us on an H200.
_EXTRA, _MERGE, _LAUNCH, _LAUNCHED_ROW = 3, 3, 6, 0.5
#: Products of such a step on tensor cores, and how many times as long the ordinary units take for them.
_STEP, _ORDINARY = 2**20, 7
#: Splits that the block of the last one merges; more are merged by a launch of many blocks, of so many warps each.
_MOST_MERGED, MERGING_WARPS = 24, 8
#: Bytes of keys and values that are the first to leave the L2: an H200 gains up to these, and loses at twice as many.
_ONCE = 256 * 2**20
#: How keys are split, as ``SPLIT`` of ``forward.cu``: not at all, into parts for another launch, or merged at once.
WHOLE, PARTS, MERGED = range(3)
#: Rows, one to a warp, of a block of the kernels that have no tiles.
ROWS_A_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries and of keys in a tile, warps of a block, and stages of its pipeline of loads.

    ``resident`` is how many blocks are to fit an SM, which bounds the registers of each. Warps share a tile of keys and
    have rows of their own, or, ``apart``, have the same rows and tiles of keys of their own.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    resident: int = 1
    apart: bool = False

    @property
    def teams(self) -> int:
        """How many groups of warps share tiles of keys."""
        return self.warps if self.apart else 1

    def __str__(self) -> str:
        apart = " apart" if self.apart else ""
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages} r{self.resident}{apart}"


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Rows of queries, 64 to a warpgroup, and of keys in a tile of Hopper's forward, and stages of keys and values.

    ``continued``: the next rows' first product runs beside the last of these. ``pace``: scores in a time, relative to
    the other tiles of a head dimension, where keys are many.
    """

    queries: int
    keys: int
    stages: int = 2
    continued: bool = False
    pace: float = 1.0

    def __str__(self) -> str:
        return f"hopper {self.queries}x{self.keys} s{self.stages}{' continued' if self.continued else ''}"


#: Tiles of Hopper's forward by head dimension; README.md has what was measured beside them.
_HOPPER = {
    64: (HopperTile(192, 128, pace=1.27), HopperTile(128, 128, continued=True)),
    128: (
        HopperTile(192, 80, continued=True, pace=1.07),
        HopperTile(128, 128, continued=True),
        HopperTile(192, 80, pace=1.07),
    ),
    256: (HopperTile(128, 80), HopperTile(128, 64, pace=0.98)),
}
#: Keys that cost a row although it does not see them, where it sees some by position: this many heights of its tile.
_EDGE = 1.3
#: Turns that SMs wait for one another at the end, where lengths or a mask leave tiles of rows of all sizes.
_LAST = 0.5


@dataclass(frozen=True, slots=True)
class CudaConfig(Config):
    """Tiles of the kernels that cost: the forward, and the gradients of key and value, of query, of a float mask."""

    forward: Tile | HopperTile
    key_gradients: Tile
    query_gradient: Tile
    mask_gradient: Tile
    #: Keys are split among this many blocks; 1 is none.
    splits: int = 1
    #: Whether the gradients of key and value are made by one launch, or by one each for want of registers.
    key_and_value: bool = True

    @property
    def split(self) -> int:
        """How keys are split, and who merges them."""
        if self.splits == 1:
            return WHOLE
        few = isinstance(self.forward, Tile) and self.forward.apart and self.splits <= _MOST_MERGED
        return MERGED if few else PARTS

    def __str__(self) -> str:
        keys = f"keys {'' if self.key_and_value else 'apart '}{self.key_gradients}"
        parts = (f"forward {self.forward}", keys, f"queries {self.query_gradient}", f"mask {self.mask_gradient}")
        return ", ".join((*parts, f"splits {self.splits}"))


def on_tensor_cores(problem: Problem) -> bool:
    """Whether products run on tensor cores (``mma.cuh``) or on the ordinary units (``simt.cuh``)."""
    return problem.dtype in ("float16", "bfloat16")


def block(dim: int, problem: Problem) -> int:
    """The head dimension as a kernel sees it: whole steps of a matrix instruction, or of 8 lanes with 16 bytes each."""
    step = 16 if on_tensor_cores(problem) else 8 * 16 // DTYPES[problem.dtype]
    return -(-dim // step) * step


def hopper_block(problem: Problem) -> int:
    """The head dimension as Hopper's forward sees it, of key and value alike: TMA fills up with zeros."""
    return min(dim for dim in _HOPPER if dim >= max(problem.dim_qk, problem.dim_v))


def packs(problem: Problem) -> bool:
    """Whether the query heads that share a key head lie in one tile: a few queries of each then fill it."""
    return problem.group > 1 and problem.seq_q * problem.group <= 64


def rows(problem: Problem) -> int:
    """Rows of queries for each head of the grid."""
    return problem.seq_q * (problem.group if packs(problem) else 1)


def once(problem: Problem) -> bool:
    """Whether keys and values, each of which one block reads, are the first to leave the L2."""
    one_tile = rows(problem) <= _FEW and (packs(problem) or problem.group == 1)
    return one_tile and kv_bytes(problem) <= _ONCE


def configs(problem: Problem, device: Device) -> Iterator[CudaConfig]:
    """The heuristic's choice, then every other combination that fits the device."""
    best = _emulated(problem) if device.kind == "cpu" else _heuristic(problem, device)
    if not against_hopper(problem, device):
        yield from (replace(best, forward=tile, splits=1) for tile in _hopper_tiles(problem, device))
    yield best
    if device.kind == "cpu":
        return
    if best.splits > 1:
        yield replace(best, splits=1)
    tall = (16, 32, 64, 128) if on_tensor_cores(problem) else (8, 16, 32, 64, 128)
    searched = [Tile(*choice) for choice in itertools.product(tall, (32, 64, 128), (1, 2, 4, 8), (1, 2, 3))]
    few = itertools.product((16, 32, 64), (2, 4, 8), (2, 3, 4)) if rows(problem) <= _FEW else ()
    for tile in (*searched, *(Tile(_FEW, *choice, apart=True) for choice in few)):
        if tile != best.forward and _suits(tile, "forward", problem, device):
            yield replace(best, forward=tile, splits=_splits(problem, device, tile))
    for tile in searched if problem.grads else ():
        if tile != best.query_gradient and _suits(tile, "query_gradient", problem, device):
            yield replace(best, query_gradient=tile)
        turned = replace(tile, queries=tile.keys, keys=tile.queries)
        if turned != best.key_gradients and _suits(turned, "key_gradients", problem, device):
            yield replace(best, key_gradients=turned)


def _hopper_tiles(problem: Problem, device: Device) -> list[HopperTile]:
    """Tiles of Hopper's forward, the fastest first: by the scores that the SM with most of them makes, and its pace."""
    left, right = problem.reach
    uneven = problem.key_lengths or problem.mask is not None
    seen = problem.seq_k // 2 if problem.causal else problem.seq_k
    if left is not None and right is not None:
        seen = min(seen, left + right + 1)

    def cost(tile: HopperTile) -> float:
        share = problem.batch * problem.heads_q * arithmetic.tiles(problem.seq_q, tile.queries) / max(1, device.sms)
        if problem.positional:  # tiles of all sizes, which fill gaps
            return max(1.0, share) * tile.queries * (seen + _EDGE * tile.queries) / tile.pace
        if uneven:
            return (share + _LAST) * tile.queries * seen / tile.pace
        return math.ceil(share) * tile.queries * seen / tile.pace

    def crowded(tile: HopperTile) -> bool:
        """Whether a mask's bits or a tanh have registers to spill: scores and sums of three consumers, or of 256."""
        three = tile.queries > 128
        if arithmetic.capped(problem):
            return three or tile.keys * hopper_block(problem) > 2**14
        return problem.mask is not None and three and (tile.continued or tile.keys > 80)

    # What is continued pays where tiles of rows take as long as one another.
    tiles = _HOPPER[hopper_block(problem)]
    return sorted(tiles, key=lambda tile: (crowded(tile), cost(tile), uneven and tile.continued))


def _suits(tile: Tile, kernel: str, problem: Problem, device: Device) -> bool:
    """Whether a warp gets whole rows, and few enough for its registers, and the tile fits shared memory."""
    own = tile.keys if kernel == "key_gradients" else tile.queries
    each, left_over = divmod(own, tile.warps // tile.teams)
    least, most = (16, 32) if on_tensor_cores(problem) else (4, 32)
    return not left_over and least <= each <= most and each % least == 0 and _fits(tile, kernel, problem, device)


def _emulated(problem: Problem) -> CudaConfig:
    """Small tiles, several to a length that an emulation can do, and between them every shape of warp and pipeline."""
    forward = Tile(32, 16, 2, 2)
    if rows(problem) <= _FEW:
        forward = Tile(_FEW, 16, 3, 2, apart=True)
    # Split where it can be, since that is what is to be checked.
    splits = 3 if rows(problem) <= 64 and problem.seq_k > 2 * forward.keys else 1
    return CudaConfig(
        forward,
        key_gradients=Tile(16, 32, 2, 3),
        query_gradient=Tile(32, 32, 1, 1),
        mask_gradient=Tile(32, 16, 2, 1),
        splits=splits,
        key_and_value=max(problem.dim_qk, problem.dim_v) <= 64,
    )


def _heuristic(problem: Problem, device: Device) -> CudaConfig:
    wide = max(problem.dim_qk, problem.dim_v)
    together = wide <= 128
    if problem.dtype == "float64":
        together = wide <= 64
        forward = Tile(64, 32, 4, 1) if wide <= 128 else Tile(32, 32, 4, 1)
        query_gradient = Tile(32, 32, 4, 1) if wide <= 128 else Tile(16, 16, 4, 1)
        key_gradients = replace(query_gradient, queries=query_gradient.keys, keys=query_gradient.queries)
    elif problem.dtype == "float32":
        forward = Tile(128, 64, 4, 1, 2) if wide <= 64 else Tile(64, 32, 4, 1, 2)
        query_gradient = Tile(64, 64, 4, 1, 2) if wide <= 64 else Tile(64, 32, 4, 1, 2)
        key_gradients = replace(query_gradient, queries=query_gradient.keys, keys=query_gradient.queries)
    elif wide <= 64:
        forward, query_gradient, key_gradients = Tile(128, 64, 4, 2, 2), Tile(128, 32, 4, 2, 2), Tile(32, 128, 4, 2, 2)
    elif wide <= 128:
        forward, query_gradient, key_gradients = Tile(128, 32, 4, 2, 2), Tile(64, 64, 4, 2, 2), Tile(32, 64, 4, 2, 2)
    else:
        forward, query_gradient, key_gradients = Tile(64, 64, 4, 1, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)
    if (few := rows(problem)) <= _FEW:
        forward = _streaming(problem, device)
    elif few <= 64:
        # Blocks of few warps, several to an SM, with tiles of keys in flight.
        height = 1 << (few - 1).bit_length()
        forward = Tile(height, 64 if on_tensor_cores(problem) else 32, height // 16, 3)
    mask_gradient = Tile(64, 32, 4, 1) if on_tensor_cores(problem) or wide <= 64 else Tile(32, 32, 4, 1)
    forward = _shrunk(forward, "forward", problem, device)
    return CudaConfig(
        forward,
        _shrunk(key_gradients, "key_gradients", problem, device),
        _shrunk(query_gradient, "query_gradient", problem, device),
        _shrunk(mask_gradient, "mask_gradient", problem, device),
        splits=_splits(problem, device, forward),
        key_and_value=together,
    )


def _streaming(problem: Problem, device: Device) -> Tile:
    """The tile of a few rows: warps apart, eight of them or four, whichever is sooner done."""
    row = (problem.dim_qk + problem.dim_v) * DTYPES[problem.dtype]
    keys = 32 if row <= 256 else 16
    for several, stages in itertools.product(((8, 4), (2,)), (3, 2)):
        tiles = [Tile(_FEW, keys, warps, stages, apart=True) for warps in several]
        if fitting := [tile for tile in tiles if _fits(tile, "forward", problem, device)]:
            return min(fitting, key=lambda tile: _schedule(problem, device, tile)[0])
    return Tile(_FEW, keys, 1, 3)


def _splits(problem: Problem, device: Device, tile: Tile) -> int:
    """Among how many blocks the keys of one tile of queries are split."""
    return _schedule(problem, device, tile)[1]


def _schedule(problem: Problem, device: Device, tile: Tile) -> tuple[float, int]:
    """About how long the forward takes, in steps of a tile each warp, and among how many blocks keys are then split.

    Blocks run for about as long, in rounds of as many as fit, and a round takes its steps and a few more to begin and
    to end with. So no SM is left without work while others have some, if that can be, and is worth the merging.
    """
    blocks = problem.batch * problem.heads_q * -(-rows(problem) // tile.queries)
    blocks //= problem.group if packs(problem) else 1
    tiles = -(-problem.seq_k // tile.keys)
    if not blocks or not tiles:
        return 0, 1
    room = (device.shared_memory or _SHARED) // shared("forward", tile, problem)
    sms = device.sms or 64
    slots = sms * max(1, min(room, 16 // tile.warps))
    launch = _LAUNCH + _LAUNCHED_ROW * problem.batch * problem.heads_q * problem.seq_q / sms

    def cost(splits: int) -> float:
        each = -(-tiles // splits)
        steps = -(-each // tile.teams)
        merge = 0 if splits == 1 else _MERGE if tile.apart and splits <= _MOST_MERGED else launch / _pace(problem, tile)
        return -(-blocks * splits // slots) * (steps + _EXTRA) + merge

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


# -- shared memory -----------------------------------------------------------------------------------------------------


def shared(kernel: str, tile: Tile, problem: Problem) -> int:
    """Bytes of shared memory that a block of ``kernel`` takes; the sources assert the same."""
    size, real = DTYPES[problem.dtype], _real(problem)
    pad = 16 // size
    dim, dim_v = (block(n, problem) + pad for n in (problem.dim_qk, problem.dim_v))
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    if kernel == "mask_gradient":
        return max((rows + columns) * (dim + dim_v) * size, rows * columns * real)
    own = dim if kernel == "forward" else dim + dim_v
    stage = columns * (dim + dim_v) * size
    if kernel == "key_gradients":
        stage += 2 * columns * real
    scratch = 0 if on_tensor_cores(problem) else tile.teams * rows * (columns + pad) * size
    ring = tile.stages * stage
    if tile.apart:  # what a team has made of its keys lies where they were
        ring = max(ring, rows * (dim_v + 2) * real)
    return rows * own * size + tile.teams * ring + scratch


def left(problem: Problem, tile: Tile) -> int:
    """Bytes that the block of one split leaves to that of the last: numerators, maximum and sum of each row."""
    return tile.queries * (block(problem.dim_v, problem) + 2) * _real(problem)


def merging_shared(problem: Problem) -> int:
    """Bytes of shared memory that a block of ``merge.cu`` takes, for rows of any length."""
    return MERGING_WARPS * _MOST_COLUMNS * _real(problem)


def _real(problem: Problem) -> int:
    """Bytes of a number as the kernels add up: float32, or float64 for float64."""
    return 8 if problem.dtype == "float64" else 4


def hopper_shared(tile: HopperTile, dim: int) -> int:
    """Bytes of shared memory that a block of Hopper's forward takes, barriers included."""
    queries = tile.queries * (2 if dim <= 128 else 1)
    return 2 * dim * (queries + 2 * tile.stages * tile.keys) + 1024


def _fits(tile: Tile, kernel: str, problem: Problem, device: Device) -> bool:
    return shared(kernel, tile, problem) <= (device.shared_memory or _SHARED)


def _shrunk(tile: Tile, kernel: str, problem: Problem, device: Device) -> Tile:
    """``tile`` with fewer stages, rows that go by, own rows and warps, in this order, until it fits."""
    turned = kernel == "key_gradients"
    own, by = (tile.keys, tile.queries) if turned else (tile.queries, tile.keys)
    least_by, least_own = (16, 16) if on_tensor_cores(problem) else (8, 4)  # of a warp
    warps, stages = tile.warps, tile.stages
    while not _fits(tile, kernel, problem, device):
        if stages > 1:
            stages -= 1
        elif by > least_by:
            by //= 2
        elif own // warps > least_own:
            own //= 2
        elif warps > 1:
            own, warps = own // 2, warps // 2
        else:
            break
        queries, keys = (by, own) if turned else (own, by)
        tile = replace(tile, queries=queries, keys=keys, warps=warps, stages=stages)
    return tile
