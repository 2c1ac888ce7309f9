"""Tiles of Hopper's kernels, and the shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from attnswitch.problem import Problem

from ...own import arithmetic

__all__ = [
    *("EVEN", "FEW", "LATENT", "LATENT_DIMS", "ROWS", "SMS", "HopperGradients", "HopperTile", "LatentTile", "Lengths"),
    *("bias", "dims", "gradient_dims", "gradient_kernel", "gradients_shared"),
    *("latent_dims", "latent_heads", "latent_shared", "latent_tiles", "lengths", "ordered", "saved", "shared"),
]

#: SMs where a device of compute capability 9.0 does not say: what every H100 and H200 has that is not the PCIe card.
SMS = 132
#: Head dimensions, of key and of value, that the forward is compiled for, and those of the backward.
_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
_GRADIENT_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
#: Those that the forward of wide heads is compiled for.
LATENT_DIMS = ((512, 512), (576, 512))
#: Columns that an operand has side by side in shared memory.
_PANEL = 64
#: Rows of a tile of sums, which a block of four warps prepares and finishes; of keys' tiles there are an even number.
ROWS = 64
#: Numbers that begin where a line of the L2 does.
_ALIGN = 32


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Rows of queries, 64 to a warpgroup, and of keys in a tile of Hopper's forward, and stages of keys and values.

    ``continued``: the next rows' first product runs beside the last of these. ``begin``, ``step``: microseconds that a
    tile of rows takes to begin and to end with, and for each tile of keys.
    """

    queries: int
    keys: int
    stages: int = 2
    continued: bool = False
    begin: float = 0.0
    step: float = 0.0

    def __str__(self) -> str:
        return f"hopper {self.queries}x{self.keys} s{self.stages}{' continued' if self.continued else ''}"


@dataclass(frozen=True, slots=True)
class HopperGradients:
    """Rows of keys, 64 to a warpgroup, and of queries in a tile of Hopper's backward, and stages of queries.

    ``continued``: there are as many blocks as SMs, which go on with other keys. ``begin``, ``step``: microseconds that
    a block takes to begin and to end with, and for each tile of queries.
    """

    keys: int
    queries: int
    stages: int
    continued: bool = False
    begin: float = 0.0
    step: float = 0.0

    def __str__(self) -> str:
        return f"hopper {self.queries}x{self.keys} s{self.stages}{' continued' if self.continued else ''}"


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Rows and keys in a tile of the forward of heads above 256 columns; a block multiplies two tiles of keys at once.

    ``stages``: tiles of keys that shared memory has room for. ``even``: there are as many blocks as SMs, which have as
    many tiles of keys as one another, of whatever sequences.
    """

    queries: int = 64
    keys: int = 64
    stages: int = 2
    even: bool = False

    def __str__(self) -> str:
        return f"hopper latent {self.queries}x{self.keys} s{self.stages}{' even' if self.even else ''}"


#: Of any number of rows, and of so few that a third tile of keys has room beside them.
LATENT, FEW = LatentTile(), LatentTile(queries=16, stages=3)
EVEN = replace(FEW, even=True)


def latent_dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions of key and value as that forward sees them."""
    return next((d, dv) for d, dv in LATENT_DIMS if d >= problem.dim_qk and dv >= problem.dim_v)


def latent_heads(problem: Problem, tile: LatentTile) -> int:
    """How many of the query heads that share a key head lie in one of its tiles, beside as many queries as fit."""
    return min(tile.queries, 1 << (problem.group - 1).bit_length())


def latent_tiles(problem: Problem, tile: LatentTile) -> int:
    """Tiles of rows of all its heads and sequences, at most."""
    p, pack = problem, latent_heads(problem, tile)
    rows = arithmetic.tiles(p.seq_q, tile.queries // pack)
    return p.batch * p.heads_kv * arithmetic.tiles(p.group, pack) * rows


def latent_shared(problem: Problem, tile: LatentTile) -> int:
    """Bytes of shared memory that a block of it takes, barriers included."""
    dim, dim_v = latent_dims(problem)
    rest = 2 * tile.keys * _PANEL  # keys beyond the values, in whose place weights come, of the two that are multiplied
    return 2 * (tile.queries * dim + tile.stages * tile.keys * dim_v + rest) + 1024


def dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions of key and value as the forward sees them: TMA fills up with zeros."""
    return next((d, dv) for d, dv in _DIMS if d >= problem.dim_qk and dv >= problem.dim_v)


def gradient_dims(problem: Problem) -> tuple[int, int]:
    """Those of key and value as the backward sees them."""
    return next((d, dv) for d, dv in _GRADIENT_DIMS if d >= problem.dim_qk and dv >= problem.dim_v)


def gradient_kernel(problem: Problem) -> str:
    """Which of ``src/hopper`` computes: by whether registers hold dK and dV of 64 keys, and what they hold beside."""
    if ordered(problem):
        return "backward_ordered"
    return {192: "backward_halved", 256: "backward_wide"}.get(gradient_dims(problem)[0], "backward")


def bias(problem: Problem) -> int:
    """BIAS of forward and backward: 0 without a float mask, 1 where it has rows for queries, 2 where all share one."""
    if problem.mask is None or not problem.adds_mask:
        return 0
    return 1 if "q" in problem.mask.axes else 2


def copies_mask(problem: Problem) -> bool:
    """Whether a float mask is copied first, as TMA reads rows of unit stride that begin at multiples of 16 bytes."""
    memory = problem.attn_mask
    return problem.adds_mask and (memory.align < 16 or memory.strided or memory.negative)


def shared(tile: HopperTile, problem: Problem) -> int:
    """Bytes of shared memory that a block of the forward takes, barriers included."""
    kind = bias(problem)
    width, width_v, columns = (-(-n // _PANEL) * _PANEL for n in (*dims(problem), tile.keys))
    queries = tile.queries * (2 if width <= (64 if kind else 128) else 1)
    biases = (0, tile.queries, 8)[kind] * columns
    return 2 * (queries * width + tile.stages * (tile.keys * (width + width_v) + biases)) + 1024


def ordered(problem: Problem) -> bool:
    """Whether blocks of the backward add to the gradient of the query in turn: a kernel of its own."""
    return problem.deterministic and "q" in problem.grads


def gradients_shared(tile: HopperGradients, problem: Problem) -> int:
    """Bytes of shared memory that a block of the backward takes, barriers included."""
    dim, dim_v = gradient_dims(problem)
    kernel, scores = gradient_kernel(problem), tile.keys * tile.queries
    upstream = 1 if kernel == "backward_wide" else tile.stages  # stages of the queries' upstream gradients
    key_stages = 2 if tile.continued else 1
    rows = key_stages * tile.keys * (dim + dim_v) + tile.queries * (tile.stages * dim + upstream * dim_v)
    weights = scores if kernel == "backward_wide" else 0
    sums = {"backward_ordered": dim, "backward_wide": _PANEL}.get(kernel, 0)  # columns of two tiles
    kind = bias(problem)
    numbers = weights + tile.queries * (2 * sums + tile.stages * (2 if kind else 1) + upstream)
    biases = tile.stages * scores if kind == 1 else 0
    return 2 * (rows + 2 * scores + biases) + 4 * numbers + 1024


class Lengths(NamedTuple):
    """Batch entries, and rows of queries and of keys of a head in each, in whole tiles."""

    batch: int
    queries: int
    keys: int


def lengths(p: Problem, all_rows: tuple[int, int]) -> Lengths:
    """What the backward keeps of rows lies so. Of ``all_rows`` of varlen, sequences have tiles of their own.

    There is one batch entry then, whose numbers of tiles are those of ``src/sequences.cuh``.
    """
    size = 2 * ROWS
    if not p.varlen:
        return Lengths(p.batch, arithmetic.padded(p), arithmetic.tiles(p.seq_k, size) * size)
    queries, keys = ((rows // size + p.batch) * size for rows in all_rows)
    return Lengths(1, queries, keys)


def saved(p: Problem, lying: Lengths, parts: int) -> tuple[int, int, int, int]:
    """Numbers that launches of a backward leave to one another: base, counts; delta, turns; sums of dQ; of dK and dV.

    ``parts``: among how many blocks the queries of the same keys are divided, each with sums of its own.
    """
    rows, (dim, _) = lying.batch * p.heads_q * lying.queries, gradient_dims(p)
    keys = lying.batch * p.heads_kv * lying.keys
    counts = arithmetic.tiles(lying.batch * p.heads_kv, _ALIGN) * _ALIGN
    turns = arithmetic.tiles(rows // ROWS, _ALIGN) * _ALIGN if ordered(p) else 0
    of_queries = rows if "q" in p.grads else 0
    of_keys = 2 * keys * parts if parts > 1 else 0
    return rows * (2 if p.adds_mask else 1) + counts, rows + turns, of_queries * dim, of_keys * dim
