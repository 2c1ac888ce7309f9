"""Launches of Hopper's backward: laid out once for a problem, and given the arrays of every call."""

from __future__ import annotations

from typing import Any

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments, memory
from ..launching.backward import BackwardLaunches, Step
from ..launching.key_grid import KeyGrid, key_grid
from ..launching.tensor_maps import TensorMap, tensor_map
from .choice import alike, splits
from .survey import Survey
from .tiles import (
    ROWS,
    SMS,
    HopperGradients,
    bias,
    gradient_dims,
    gradient_kernel,
    gradients_shared,
    lengths,
    ordered,
    saved,
)

__all__ = ["Backward"]

#: Warps of a block before and after, and of a warpgroup; warpgroups that compute.
_WARPS, _WORKERS = 4, 2
#: Bytes of the L2 that heads may share which run side by side: their queries, upstream gradients and sums of dQ.
_SECTION = 24 * 2**20
#: Heads that run side by side at least where blocks add in turn: the fewer blocks of a head run at once, the less they
#: wait for one another; and as they follow one another, they share tiles in the L2 however many these are.
_TOGETHER = 32
#: SMs of the emulator, so few that blocks go on with other keys there too.
_EMULATED = 2


class Backward(BackwardLaunches):
    """Gradients of query, key and value: three launches, of which the second computes, and one more for a mask.

    The first makes base and delta of each row, as the portable backward's does, and fills with 0 what dQ is added up
    in: float32 (B, Hq, Lq padded, D padded). The last makes gradients of these sums, and of those of dK and dV where
    the queries of the same keys are split among blocks. For a float mask, ``added`` makes what is known of each row
    before, and rest, which lies behind base. With varlen it is laid out for ``all_rows`` of queries and of keys, those
    of all sequences together, each sequence padded. Its variants are the same for any.
    """

    def __init__(
        self,
        p: Problem,
        tile: HopperGradients,
        device: Device,
        added: Step | None = None,
        all_rows: tuple[int, int] = (1, 1),
    ) -> None:
        padded, (dim, _) = arithmetic.padded(p), gradient_dims(p)
        parts = splits(alike(p, all_rows[1]), device, tile)
        lying = lengths(p, all_rows)
        kept = saved(p, lying, parts)
        super().__init__(p, arguments.constants(p), kept, least=16)
        side_by_side = max(1, _SECTION // (p.group * padded * (p.dim_qk + p.dim_v) * 4))
        if ordered(p):
            side_by_side = max(side_by_side, _TOGETHER)
        heads = max(1, lying.batch * p.heads_kv)
        grid = _grid(p, tile, min(side_by_side, heads), parts, all_rows[1])
        self.constants.saved_rows = lying.queries
        self.clears, self.constants.key_tiles = grid.clears, grid.blocks
        sms = _EMULATED if device.kind == "cpu" else device.sms or SMS
        blocks = min(grid.blocks, sms) if tile.continued else grid.blocks
        rows_left = (kept[2] + kept[3] // parts) // dim  # of queries, and of keys where they are parts
        self.steps = [
            *(() if added is None else (added,)),
            Step(_prepare(p), lying.batch * p.heads_q * lying.queries // ROWS, 0),
            Step(_backward(p, tile), blocks, grid.section, mapped=True, beside=True, splits=parts),
            Step(_finish(p), rows_left // ROWS, 0, beside=True, splits=parts, awaited=grid.blocks // heads),
        ]
        if p.mask is not None and p.mask.is_bool:
            self.look = Survey(p, tile.keys)
        batch, rows_q, rows_k = (1, *all_rows) if p.varlen else (p.batch, p.seq_q, p.seq_k)
        if p.varlen and not (rows_q and rows_k):
            self.steps = []
        queries, by_keys = (batch, p.heads_q, rows_q), (batch, p.heads_kv, rows_k)
        #: Shapes of query, key, value, the output's gradient and maybe a mask, and rows of each that a load brings.
        self._mapped = [
            ((*queries, p.dim_qk), tile.queries),
            ((*by_keys, p.dim_qk), ROWS),
            ((*by_keys, p.dim_v), ROWS),
            ((*queries, p.dim_v), tile.queries),
        ]
        self.maps_mask = bias(p) == 1
        if p.mask_shape is not None and self.maps_mask:
            self._mapped.append((p.mask_shape, tile.queries))
        self._dtype = p.dtype

    def readable(self, rows: Any) -> Any:
        """The same for TMA, to which rows that are one row, or go backwards, are none."""
        forwards = all(step > 0 for size, step in zip(rows.shape, memory.place(rows)[1:], strict=True) if size > 1)
        return super().readable(rows) if forwards else memory.dense(rows)

    def maps(self, *places: tuple[int, ...]) -> tuple[TensorMap, ...]:
        """The tensor maps of query, key, value, the output's gradient and maybe a mask, which are at these places."""
        pairs = zip(self._mapped, places, strict=True)
        return tuple(tensor_map(self._dtype, shape, box, place) for (shape, box), place in pairs)


def _grid(p: Problem, tile: HopperGradients, section: int, parts: int, rows: int) -> KeyGrid:
    """``key_grid``; with varlen of numbers of tiles, some of which are of none (``src/sequences.cuh``)."""
    if not p.varlen:
        return key_grid(p, tile.keys, section, parts)
    return KeyGrid(p.heads_kv * (rows // tile.keys + p.batch) * parts, section)


@per_class
def _backward(p: Problem, tile: HopperGradients) -> Variant:
    dim, dim_v = gradient_dims(p)
    return Variant(
        gradient_kernel(p),
        p.dtype,
        tile.keys,
        tile.queries,
        dim,
        dim_v,
        warps=_WARPS * (1 + _WORKERS),
        stages=tile.stages,
        shared=gradients_shared(tile, p),
        flags=(
            ("MASKED", int(p.mask is not None and p.mask.is_bool)),
            ("SOFTCAP", int(arithmetic.capped(p))),
            ("BIAS", bias(p)),
            ("ALIBI", int(p.alibi)),
            ("DROPOUT", int(p.dropout > 0.0)),
            *((("CONTINUED", 1),) if tile.continued else ()),
        ),
        family="hopper",
        varlen=p.varlen,
    )


@per_class
def _prepare(p: Problem) -> Variant:
    return _of_rows(p, "prepare", ("ORDERED", int(ordered(p))), ("ADDED", int(p.adds_mask)))


@per_class
def _finish(p: Problem) -> Variant:
    return _of_rows(p, "finish")


def _of_rows(p: Problem, kernel: str, *flags: tuple[str, int]) -> Variant:
    dim, dim_v = gradient_dims(p)
    return Variant(kernel, p.dtype, ROWS, ROWS, dim, dim_v, warps=_WARPS, flags=flags, family="hopper", varlen=p.varlen)
