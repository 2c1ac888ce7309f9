"""Launches of the backward in one pass."""

from __future__ import annotations

from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments
from ..launching.backward import BackwardLaunches, Step
from ..launching.key_grid import key_grid
from .tiles import WARPS, FusedTile, dim, shared

__all__ = ["Backward"]

#: Rows of a block that prepares, and its warps.
_ROWS, _PREPARING = 64, 4


class Backward(BackwardLaunches):
    """Gradients of query, key and value: two launches.

    The first makes ``base`` and ``delta`` of each row, (B, Hq, Lq padded), and fills the gradient of the query with
    zeros, to which the blocks of the second add.
    """

    def __init__(self, p: Problem, tile: FusedTile) -> None:
        rows = p.batch * p.heads_q * arithmetic.padded(p)
        super().__init__(p, arguments.constants(p), (rows, rows, 0, 0), least=16)
        heads = p.batch * p.heads_kv
        grid = key_grid(p, tile.keys, min(arithmetic.heads_a_section(p, queries=True), max(1, heads)))
        self.clears = grid.clears
        self.steps = [
            Step(_prepare(p), rows // _ROWS, 0),
            Step(_backward(p, tile), grid.blocks, grid.section),
        ]


@per_class
def _prepare(p: Problem) -> Variant:
    return Variant("prepare", p.dtype, _ROWS, _ROWS, dim(p), dim(p), warps=_PREPARING, family="fused")


@per_class
def _backward(p: Problem, tile: FusedTile) -> Variant:
    return Variant(
        "backward",
        p.dtype,
        tile.keys,
        tile.queries,
        dim(p),
        dim(p),
        warps=WARPS,
        resident=tile.resident,
        shared=shared(tile, p),
        family="fused",
    )
