"""Tiles of the portable kernels, what of a problem decides how they are filled, and the shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnswitch.problem import DTYPES, Problem
from attnswitch.problem.cost import kv_bytes

from ...own import arithmetic

__all__ = [
    "BESIDE_PADDED",
    "FEW",
    "FEWER",
    "ROWS_A_BLOCK",
    "Tile",
    "block",
    "brief",
    "fits",
    "left",
    "mixed",
    "on_tensor_cores",
    "once",
    "packs",
    "paged",
    "real",
    "room",
    "rows",
    "scattered",
    "shared",
    "shrunk",
]

#: Rows of a matrix instruction: so many, or fewer, are a tile that all warps of a block have; and rows up to which a
#: tile has all of them.
FEW, FEWER = 16, 64
#: The head dimension up to which few rows and few keys have small tiles.
_BRIEF_DIM = 128
#: Queries below which a tile of one head is partly empty, which the heads that share keys then fill.
_PARTLY = 64
#: Rows, one to a warp, of a block of the kernels that have no tiles.
ROWS_A_BLOCK = 4
#: Bytes of keys and values that are the first to leave the L2: an H200 gains up to these, and loses at twice as many.
_ONCE = 256 * 2**20
#: How many times as long a forward over pages takes as the same keys are expected to, padded to one length: one to
#: eight queries on an H200 0.68 to 0.93 times (fixtures/results/h200/bench-paged.json).
BESIDE_PADDED = 0.75
#: And as long again where a tile of keys is in several pages: 1.16 times for 32 queries, 1.37 for 8 (bench-pages.json,
#: bench-trees.json). Where each copy looks for its page: 2.4 times for 8 queries (bench-pages-before.json).
_SCATTERED, _LOOKED_UP = 1.35, 2.4
#: Keys of a tile that are loaded alike where they are in one page (``src/portable/pages.cuh``).
_SECTION = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries and of keys in a tile, warps of a block, and stages of its pipeline of loads.

    ``resident`` is how many blocks are to fit an SM, which bounds the registers of each. Warps share a tile of keys and
    have rows of their own, or, ``apart``, have the same rows and tiles of keys of their own. ``generic`` kernels are
    compiled for no feature of a problem, and for its head dimensions by class.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    resident: int = 1
    apart: bool = False
    generic: bool = False

    @property
    def teams(self) -> int:
        """How many groups of warps share tiles of keys."""
        return self.warps if self.apart else 1

    def __str__(self) -> str:
        kind = " apart" if self.apart else " generic" if self.generic else ""
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages} r{self.resident}{kind}"


def on_tensor_cores(problem: Problem) -> bool:
    """Whether products run on tensor cores (``mma.cuh``) or on the ordinary units (``simt.cuh``)."""
    return problem.dtype in ("float16", "bfloat16")


def block(dim: int, problem: Problem, tile: Tile) -> int:
    """The head dimension as a kernel sees it: whole steps of a matrix instruction, or of 8 lanes with 16 bytes each.

    Generic kernels see the class of the larger one.
    """
    if tile.generic:
        return arithmetic.dim_class(problem)
    step = 16 if on_tensor_cores(problem) else 8 * 16 // DTYPES[problem.dtype]
    return -(-dim // step) * step


def packs(problem: Problem) -> bool:
    """Whether rows of the query heads that share a key head lie one after another in tiles, which are then full.

    They do however many queries there are where bits may not depend on the longest of other sequences.
    """
    return problem.group > 1 and (mixed(problem) or problem.seq_q < _PARTLY)


def mixed(problem: Problem) -> bool:
    """Whether sequences of few queries and of many are to have the same bits alone, and so the same tiles."""
    return problem.splits > 0 and problem.varlen


def rows(problem: Problem) -> int:
    """Rows of queries for each head of the grid."""
    return problem.seq_q * (problem.group if packs(problem) else 1)


def brief(problem: Problem) -> bool:
    """Whether so few rows see so few keys that small tiles, of which little is empty, are the fastest.

    48 causal queries before 600 keys, of 64 sequences of 16 heads: D 64 20 us, Hopper's kernel 36; D 128 33, and 45; of
    4 sequences 8.3 and 9.3, 9.9 and 10.6 (an H200; other GPUs were not timed). TRIED.md has more.
    """
    p = problem
    if not arithmetic.bare(p) or not on_tensor_cores(p) or max(p.dim_qk, p.dim_v) > _BRIEF_DIM:
        return False
    return FEW < rows(p) <= FEWER and arithmetic.seen(p, p.seq_q) <= FEWER


def once(problem: Problem, tile: Tile) -> bool:
    """Whether keys and values, each of which one block reads, are the first to leave the L2."""
    if tile.stages == 1:
        return False
    one_tile = rows(problem) <= FEW and (packs(problem) or problem.group == 1)
    return one_tile and kv_bytes(problem) <= _ONCE


def paged(problem: Problem, tile: Tile) -> int:
    """``PAGED`` of ``src/portable/pages.cuh``: 1 where a tile of keys is in several, 2 in one, 3 in more than 32.

    Wherever in a page the tile begins. 4 where it is in several and each section of it in one, of caches of 8 bits,
    whose tiles of a few queries are longer than the usual page.
    """
    if problem.page and problem.page % tile.keys == 0:
        return 2
    if problem.cache and problem.page % _SECTION == tile.keys % _SECTION == 0:
        return 4
    return 0 if not problem.page else 1 if tile.keys - 1 <= 31 * problem.page else 3


def scattered(problem: Problem, tile: Tile) -> float:
    """How many times as long a forward takes over these pages as over those that hold whole tiles of keys."""
    return {1: _SCATTERED, 2: 1.0, 3: _LOOKED_UP, 4: 1.0}[paged(problem, tile)]


def shared(kernel: str, tile: Tile, problem: Problem) -> int:
    """Bytes of shared memory that a block of ``kernel`` takes; the sources assert the same."""
    size, summed = DTYPES[problem.dtype], real(problem)
    pad = 16 // size
    dim, dim_v = (block(n, problem, tile) + pad for n in (problem.dim_qk, problem.dim_v))
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    if kernel == "mask_gradient":
        return max((rows + columns) * (dim + dim_v) * size, rows * columns * summed)
    if kernel == "prepare_added":
        return (rows + tile.stages * columns) * dim * size
    own = dim if kernel == "forward" else dim + dim_v
    stage = columns * (dim + dim_v) * size
    widened = 0
    if problem.cache:  # with 16 bytes more than a row too, and a scale of each
        if not (tile.apart and on_tensor_cores(problem)):
            widened = stage
        stage = columns * (dim + dim_v - 2 * pad + 2 * 16 + 2 * summed)
    if kernel == "key_gradients":
        stage += 2 * columns * summed
    scratch = 0 if on_tensor_cores(problem) else tile.teams * rows * (columns + pad) * size
    ring = tile.stages * stage + widened
    if tile.apart:  # what a team has made of its keys lies where they were
        ring = max(ring, rows * (dim_v + 2) * summed)
    return rows * own * size + tile.teams * ring + scratch


def left(problem: Problem, tile: Tile) -> int:
    """Bytes that the block of one split leaves to that of the last: numerators, maximum and sum of each row."""
    return tile.queries * (block(problem.dim_v, problem, tile) + 2) * real(problem)


def real(problem: Problem) -> int:
    """Bytes of a number as the kernels add up: float32, or float64 for float64."""
    return 8 if problem.dtype == "float64" else 4


def room(tile: Tile, kernel: str, problem: Problem, shared_memory: int) -> int:
    """How many blocks of ``kernel`` an SM holds by its shared memory, in bytes."""
    return shared_memory // shared(kernel, tile, problem)


def fits(tile: Tile, kernel: str, problem: Problem, shared_memory: int) -> bool:
    """Whether it holds one."""
    return room(tile, kernel, problem, shared_memory) > 0


def shrunk(tile: Tile, kernel: str, problem: Problem, shared_memory: int) -> Tile:
    """``tile`` with fewer stages, rows that go by, own rows and warps, in this order, until it fits."""
    turned = kernel == "key_gradients"
    own, by = (tile.keys, tile.queries) if turned else (tile.queries, tile.keys)
    least_by, least_own = (16, 16) if on_tensor_cores(problem) else (8, 4)  # of a warp
    warps, stages = tile.warps, tile.stages
    while not fits(tile, kernel, problem, shared_memory):
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
