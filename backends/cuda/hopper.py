"""Launches of the Hopper family: the forward. A problem's gradients come from the portable kernels."""

from __future__ import annotations

from typing import Any

from attnswitch import arithmetic
from attnswitch.backend import Inputs
from attnswitch.device import Device
from attnswitch.problem import Problem

from . import arguments, config, memory, run, tensor_maps
from .arguments import Arguments, put
from .config import CudaConfig, HopperTile
from .prepared import Alone
from .variant import Variant

__all__ = ["Forward"]

#: Rows of a warpgroup, which has the loads of its queries to itself.
_ROWS = 64
#: SMs where the device does not say: what every H100 and H200 has that is not the PCIe card.
_SMS = 132


class Forward:
    """Writes output and lse: one launch of as many blocks as SMs, which take tiles of queries as they are done."""

    def __init__(self, p: Problem, chosen: CudaConfig, device: Device) -> None:
        tile = chosen.forward
        assert isinstance(tile, HopperTile)
        heads = p.batch * p.heads_q
        a = arguments.constants(p)
        a.section = min(arithmetic.heads_a_section(p), max(1, heads))
        self._constants = a
        keys = p.batch, p.heads_kv, p.seq_k
        self._maps = (
            tensor_maps.mapper(p.dtype, (p.batch, p.heads_q, p.seq_q, p.dim_qk), _ROWS),
            tensor_maps.mapper(p.dtype, (*keys, p.dim_qk), tile.keys),
            tensor_maps.mapper(p.dtype, (*keys, p.dim_v), tile.keys),
        )
        tiles = heads * arithmetic.tiles(p.seq_q, tile.queries)
        self._blocks = min(tiles, device.sms or _SMS)
        self._counts = tiles > self._blocks
        dim = config.hopper_block(p)
        self.variant = Variant(
            "forward",
            p.dtype,
            tile.queries,
            tile.keys,
            dim,
            dim,
            warps=4 * (1 + tile.queries // _ROWS),
            stages=tile.stages,
            shared=config.hopper_shared(tile, dim),
            flags=(("CONTINUED", int(tile.continued)),),
            family="hopper",
        )
        self.alone = None if self._counts else Alone(self.variant, self._blocks, a, self._maps)

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        a = arguments.of_call(self._constants, inputs, mapped=True)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        # A counter for each launch, zeroed on its stream and so in a captured graph: two streams, or a graph and a
        # stream, may run one kernel at once, and what a launch that failed has left is of no account.
        counter = memory.empty((1,), lse, "int32") if self._counts else None
        a.counter = None if counter is None else memory.address(counter)
        maps = tuple(of(memory.place(array)) for of, array in zip(self._maps, inputs[:3], strict=True))
        run.start(self.variant, self._blocks, a, out, maps, counter)
