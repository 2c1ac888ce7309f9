"""Launches of Hopper's forward of wide heads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments, memory, run
from ..launching.arguments import Arguments, put
from ..launching.forward import ForwardLaunches
from ..launching.merging import Merging
from ..launching.tensor_maps import Remembered, TensorMap, tensor_map
from .tiles import SMS, LatentTile, latent_dims, latent_heads, latent_shared, latent_tiles

__all__ = ["Forward"]

#: SPLIT of the kernel: ``src/hopper/latent/rows.cuh``.
_WHOLE, _PARTS, _EVEN = 0, 1, 2
#: SMs of the emulator, so few that blocks have portions of several sequences.
_EMULATED = 3


class Forward(ForwardLaunches):
    """Writes output and lse: one launch, and another that merges the parts of rows whose keys several blocks have."""

    def __init__(self, p: Problem, tile: LatentTile, splits: int, device: Device) -> None:
        pack = latent_heads(p, tile)
        self._queries = tile.queries // pack
        packs, rows = p.heads_kv * -(-p.group // pack), arithmetic.tiles(p.seq_q, self._queries)
        section = min(arithmetic.heads_a_section(p, packed=True), max(1, p.batch * packs))
        self.constants = arguments.constants(p, section)
        self.blocks, parts = latent_tiles(p, tile) * splits, splits
        if tile.even and self.blocks:
            sms = _EMULATED if device.kind == "cpu" else device.sms or SMS
            self.blocks, parts = sms, self.blocks + sms
        how = _EVEN if tile.even else _PARTS if splits > 1 else _WHOLE
        arguments.divide(self.constants, p, pack, packs, rows, parts, 0)
        self.variant = _forward(p, tile, how)
        self.needs_lse = how != _WHOLE
        self._merging = None
        if self.needs_lse:
            self._merging = Merging(p, parts, folds=True, rows=tile.queries if tile.even else 0)
        self._pack, self._dtype, self._rows = pack, p.dtype, _loaded(p, tile)
        self._narrower = p.dim_v <= p.dim_qk

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        return (self.variant,) if self._merging is None else (self.variant, self._merging.variant)

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        if not all(inputs.query.shape):
            return
        if not all(inputs.key.shape):  # no rows, and maybe no address, which no map takes, and nobody loads any
            inputs = inputs._replace(key=inputs.query, value=inputs.query)
        a = arguments.of_call(self.constants, inputs, mapped=True)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        places = [memory.place(operand) for operand in inputs[:3]]
        a.values_within = places[1][0] == places[2][0] and self._may_lie_within(inputs.key.shape, *places[1:])
        maps = self._maps(_shapes(inputs), places)
        if self._merging is None:
            run.start(self.variant, self.blocks, a, out, maps)
            return
        parts = self._merging.parts(a, inputs, lse)
        run.start(self.variant, self.blocks, a, out, maps)
        run.start(self._merging.variant, self._merging.blocks(inputs), a, out, beside=True)
        del parts  # not before: the next launch's is what it points to from here on

    def bound(self, inputs: Inputs, index: int) -> Callable[[Arguments, Any, Any, int], None]:
        """See ``launching.forward``."""
        send = run.sender(self.variant, self.blocks, index)
        steps = [operand.stride() for operand in inputs[:3]]
        within = self._may_lie_within(inputs.key.shape, (0, *steps[1]), (0, *steps[2]))
        shapes = _shapes(inputs)

        def maps_of(*at: int) -> tuple[TensorMap, ...]:
            return self._maps(shapes, [(to, *step) for to, step in zip(at, steps, strict=True)])

        maps_at = Remembered(maps_of)

        def whole(a: Arguments, at: tuple[int, ...], _: Any, stream: int) -> None:
            a.values_within = within and at[1] == at[2]
            passed = maps_at[at[:3]]
            send(stream, *passed.pointers, ctypes.addressof(a))

        if self._merging is None:
            return whole
        merge = run.sender(self._merging.variant, self._merging.blocks(inputs), index, beside=True)
        parts_for = self._merging.parts_for(inputs)

        def apart(a: Arguments, at: tuple[int, ...], lse: Any, stream: int) -> None:
            parts = parts_for(a, lse)
            whole(a, at, lse, stream)
            merge(stream, ctypes.addressof(a))
            del parts

        return apart

    def _may_lie_within(self, lengths: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> bool:
        """Whether values are the first columns of the keys, of such lengths, if they begin where these do."""
        steps = zip(lengths[:3], key[1:4], value[1:4], strict=True)
        return self._narrower and all(a == b or n == 1 for n, a, b in steps)

    def _maps(self, shapes: Sequence[tuple[int, ...]], places: Sequence[tuple[int, ...]]) -> tuple[TensorMap, ...]:
        """The tensor maps of query, key and value."""
        boxes = (self._queries, self._pack), (self._rows, 1), (self._rows, 1)
        return tuple(
            tensor_map(self._dtype, shape, rows, place, heads)
            for shape, place, (rows, heads) in zip(shapes, places, boxes, strict=True)
        )


def _shapes(inputs: Inputs) -> list[tuple[int, ...]]:
    """Those of query, key and value."""
    return [tuple(operand.shape) for operand in inputs[:3]]


def _loaded(p: Problem, tile: LatentTile) -> int:
    """Rows of keys that a load brings."""
    return min(tile.keys, p.page) if p.page else tile.keys


@per_class
def _forward(p: Problem, tile: LatentTile, how: int) -> Variant:
    return Variant(
        "latent",
        p.dtype,
        tile.queries,
        tile.keys,
        *latent_dims(p),
        warps=12,
        stages=tile.stages,
        shared=latent_shared(p, tile),
        flags=(
            ("SPLIT", how),
            ("PAGED", int(p.page > 0)),
            ("PAGE_ROWS", _loaded(p, tile)),
            ("SOFTCAP", int(arithmetic.capped(p))),
            ("ALIBI", int(p.alibi)),
            ("SINKS", int(p.sinks)),
        ),
        family="hopper",
        varlen=p.varlen,
    )
