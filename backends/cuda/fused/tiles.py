"""Tiles of the backward in one pass, the shared memory that they take, and what of a problem they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from attnswitch.problem import Problem

__all__ = ["DIMS", "WARPS", "FusedTile", "dim", "shared"]

#: Head dimensions that it is compiled for.
DIMS = (32, 64, 96, 128)
#: Warps of a block: four for values, and four for keys.
WARPS = 8
#: Numbers in 16 bytes, and rows that each lane of a warp has.
_VECTOR, _EACH = 4, 8


@dataclass(frozen=True, slots=True)
class FusedTile:
    """Keys of a block, queries that go by at once, and how many blocks are to fit an SM, which bounds registers."""

    keys: int
    queries: int
    resident: int = 1

    @property
    def stages(self) -> int:
        """Tiles of queries in shared memory: the next one comes when this one's are read."""
        return 1

    def __str__(self) -> str:
        return f"fused {self.keys}x{self.queries} r{self.resident}"


def dim(problem: Problem) -> int:
    """The head dimension of keys and values as the kernel sees it: columns past the last are 0."""
    return next(size for size in DIMS if size >= max(problem.dim_qk, problem.dim_v))


def shared(tile: FusedTile, problem: Problem) -> int:
    """Bytes of shared memory that a block takes; the source asserts the same."""
    pitch = dim(problem) + _VECTOR
    apart = 32 * _EACH * WARPS // 2 // tile.keys  # what keeps a row of scores from the next
    scores = tile.keys * (tile.queries + apart)
    return 4 * 2 * (tile.keys * pitch + scores + tile.queries * (pitch + 1))
