"""Tiles of Hopper's kernels, and the shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass

from attnswitch.problem import Problem

__all__ = ["SMS", "HopperGradients", "HopperTile", "block", "gradients_shared", "shared"]

#: SMs where a device of compute capability 9.0 does not say: what every H100 and H200 has that is not the PCIe card.
SMS = 132
#: Head dimensions of Hopper's forward.
_DIMS = (64, 128, 256)


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

    ``begin``, ``step``: microseconds that a block takes to begin and to end with, and for each tile of queries.
    """

    keys: int
    queries: int
    stages: int
    begin: float = 0.0
    step: float = 0.0

    def __str__(self) -> str:
        return f"hopper {self.queries}x{self.keys} s{self.stages}"


def block(problem: Problem) -> int:
    """The head dimension as Hopper's forward sees it, of key and value alike: TMA fills up with zeros."""
    return min(dim for dim in _DIMS if dim >= max(problem.dim_qk, problem.dim_v))


def shared(tile: HopperTile, dim: int) -> int:
    """Bytes of shared memory that a block of Hopper's forward takes, barriers included."""
    queries = tile.queries * (2 if dim <= 128 else 1)
    return 2 * dim * (queries + 2 * tile.stages * tile.keys) + 1024


def gradients_shared(tile: HopperGradients, dim: int) -> int:
    """Bytes of shared memory that a block of Hopper's backward takes, barriers included."""
    rows = 2 * dim * (2 * tile.keys + 2 * tile.stages * tile.queries)  # keys and values, queries and their gradients
    scores, sums = 2 * 2 * tile.keys * tile.queries, 4 * tile.queries * dim
    return rows + scores + sums + 2 * 4 * tile.stages * tile.queries + 1024
