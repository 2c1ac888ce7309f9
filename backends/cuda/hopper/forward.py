"""Launches of Hopper's forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments, memory, run, workspace
from ..launching.arguments import Arguments, put
from ..launching.forward import ForwardLaunches
from ..launching.tensor_maps import Remembered, TensorMap, tensor_map
from .survey import Survey
from .tiles import SMS, HopperTile, bias, dims, shared

__all__ = ["Forward"]

#: Rows of a warpgroup, which has the loads of its queries to itself.
_ROWS = 64


class Forward(ForwardLaunches):
    """Writes output and lse: one launch of as many blocks as SMs, which take tiles of queries as they are done.

    A bool mask takes a launch before it, and memory meanwhile: see ``Survey``. With varlen it is laid out for
    ``all_rows`` of queries and of keys, those of all sequences together, and needs none to tell of its variants.
    """

    def __init__(self, p: Problem, tile: HopperTile, device: Device, all_rows: tuple[int, int] = (1, 1)) -> None:
        heads = p.heads_q if p.varlen else p.batch * p.heads_q
        self.constants = arguments.constants(p, min(arithmetic.heads_a_section(p), max(1, heads)))
        batch, queries, rows_k = (1, *all_rows) if p.varlen else (p.batch, p.seq_q, p.seq_k)
        keys = batch, p.heads_kv, max(1, rows_k)
        #: Shapes of query, key, value and a float mask, and rows of each that a load brings.
        self._mapped = [
            ((batch, p.heads_q, queries, p.dim_qk), _ROWS),
            ((*keys, p.dim_qk), tile.keys),
            ((*keys, p.dim_v), tile.keys),
        ]
        self._biased = p.adds_mask
        if p.mask_shape is not None and p.adds_mask:
            self._mapped.append((p.mask_shape, _ROWS if bias(p) == 1 else 1))
        self._dtype = p.dtype
        rows = heads * arithmetic.tiles(p.seq_q, tile.queries)
        if p.varlen:  # numbers of tiles, some of which are of none: src/sequences.cuh
            rows = p.heads_q * (queries // tile.queries + p.batch) if queries else 0
        self.blocks = min(rows, device.sms or SMS)
        self._counts = rows > self.blocks
        self.variant = _forward(p, tile)
        self._survey = Survey(p, tile.keys) if p.mask is not None and p.mask.is_bool else None

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        return (self.variant,) if self._survey is None else (self._survey.variant, self.variant)

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        a = arguments.of_call(self.constants, inputs, mapped=True)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        operands = list(inputs[: len(self._mapped)])
        if not inputs.key.shape[2]:  # no rows, and maybe no address, which no map takes, and nobody loads any
            operands[1:3] = [inputs.query] * 2
        maps = self._maps(*map(memory.place, operands))
        if self._survey is not None:
            space = self._survey(inputs.attn_mask, a)
            run.start(self.variant, self.blocks, a, out, maps, beside=True)
            del space  # not before: what it points to is the next launch's from here on
            return
        run.start(self.variant, self.blocks, a, out, maps, self._counts)

    def bound(self, inputs: Inputs, index: int) -> Callable[[Arguments, Any, Any, int], None]:
        """See ``launching.forward``."""
        send = run.sender(self.variant, self.blocks, index, beside=self._survey is not None)
        operands: tuple[Any, ...] = inputs[: len(self._mapped)]
        steps = [operand.stride() for operand in operands]

        biased = self._biased
        maps_at = Remembered(lambda *at: self._maps(*((to, *step) for to, step in zip(at, steps, strict=True))))

        if self._survey is not None:
            look = self._survey.bound(inputs.attn_mask, index)

            def masked(a: Arguments, at: tuple[int, ...], like: Any, stream: int) -> None:
                passed = maps_at[at]
                space = look(a, stream)
                send(stream, *passed.pointers, ctypes.addressof(a))
                del space

            return masked
        if self._counts:

            def counted(a: Arguments, at: tuple[int, ...], like: Any, stream: int) -> None:
                passed = maps_at[(*at, a.mask.at) if biased else at]
                places = workspace.blank(run.COUNTER, like, stream)
                a.counter = places.address
                send(stream, *passed.pointers, ctypes.addressof(a))

            return counted

        def alone(a: Arguments, at: tuple[int, ...], like: Any, stream: int) -> None:
            passed = maps_at[(*at, a.mask.at) if biased else at]
            send(stream, *passed.pointers, ctypes.addressof(a))

        return alone

    def _maps(self, *places: tuple[int, ...]) -> tuple[TensorMap, ...]:
        """The tensor maps of query, key and value, and of a float mask."""
        pairs = zip(self._mapped, places, strict=True)
        return tuple(tensor_map(self._dtype, shape, box, place) for (shape, box), place in pairs)


@per_class
def _forward(p: Problem, tile: HopperTile) -> Variant:
    return Variant(
        "forward",
        p.dtype,
        tile.queries,
        tile.keys,
        *dims(p),
        warps=4 * (1 + tile.queries // _ROWS),
        stages=tile.stages,
        shared=shared(tile, p),
        flags=(
            ("CONTINUED", int(tile.continued)),
            ("MASKED", int(p.mask is not None and p.mask.is_bool)),
            ("SOFTCAP", int(arithmetic.capped(p))),
            ("DROPOUT", int(p.dropout > 0.0)),
            ("BIAS", bias(p)),
            ("ALIBI", int(p.alibi)),
            ("SINKS", int(p.sinks)),
        ),
        family="hopper",
        varlen=p.varlen,
    )
