"""Launches of the Hopper family: the forward, and a look at its mask. Gradients come from the portable kernels."""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own import arithmetic
from . import arguments, memory, run, tensor_maps
from .arguments import Arguments, put
from .config import CudaConfig
from .prepared import Alone
from .tiles import HOPPER_SMS, HopperTile, hopper_block, hopper_shared
from .variant import Variant

__all__ = ["Forward", "Survey"]

#: Rows of a warpgroup, which has the loads of its queries to itself, and of a group of rows of a mask.
_ROWS = 64
#: Warps of a block of ``Survey``, its blocks on an SM, and their tiles of keys.
_WARPS, _RESIDENT, _TILES = 16, 2, 8
#: Tiles of keys to a word of what it finds, and words to 16 bytes, at multiples of which each part begins.
_BITS, _HEAD = 32, 4


class Survey:
    """One look at a bool mask before the forward: which tiles of keys it hides, and its bits (``src/hopper/mask.cuh``).

    Memory that it takes, until the forward is done: 16 bytes for each row of the mask and tile of ``keys`` keys, which
    is an eighth of the mask where ``keys`` is 128, a fifth at 80, a quarter at 64. An axis that the mask is broadcast
    over, be it of length 1 or of stride 0, counts once.
    """

    def __init__(self, p: Problem, keys: int) -> None:
        self._tiles = arithmetic.tiles(p.seq_k, keys)
        # One build for every type of query and key, which it does not read.
        self.variant = Variant(
            "survey",
            "bfloat16",
            _ROWS,
            keys,
            warps=_WARPS,
            resident=_RESIDENT,
            shared=_WARPS * 4,
            family="hopper",
        )

    def __call__(self, mask: Any, a: Arguments) -> Any:
        """Launch it. Returns the memory that ``a`` then points to, the forward's counter included, which is 0."""
        _, *steps = memory.place(mask)
        b, h, rows = (n if step else 1 for n, step in zip(mask.shape[:3], steps[:3], strict=True))
        a.mask_batch, a.mask_heads, a.mask_rows = b, h, rows
        words, groups = arithmetic.tiles(self._tiles, _BITS), arithmetic.tiles(rows, _ROWS)
        sets = arithmetic.tiles(2 * b * h * groups * words, _HEAD) * _HEAD
        bits = 4 * b * h * self._tiles * (1 if rows == 1 else groups * _ROWS)
        found = memory.empty((_HEAD + sets + bits,), mask, "int32")
        at = memory.address(found)
        a.counter, a.mask_sets, a.mask_bits = at, at + 4 * _HEAD, at + 4 * (_HEAD + sets)
        run.start(self.variant, b * h * groups * words * (_BITS // _TILES), a, found)
        return found


class Forward:
    """Writes output and lse: one launch of as many blocks as SMs, which take tiles of queries as they are done.

    A bool mask takes a launch before it, and memory meanwhile: see ``Survey``.
    """

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
        self._blocks = min(tiles, device.sms or HOPPER_SMS)
        self._counts = tiles > self._blocks
        dim = hopper_block(p)
        self.variant = Variant(
            "forward",
            p.dtype,
            tile.queries,
            tile.keys,
            dim,
            dim,
            warps=4 * (1 + tile.queries // _ROWS),
            stages=tile.stages,
            shared=hopper_shared(tile, dim),
            flags=(
                ("CONTINUED", int(tile.continued)),
                ("MASKED", int(p.mask is not None)),
                ("SOFTCAP", int(arithmetic.capped(p))),
            ),
            family="hopper",
        )
        self.alone = None if self._counts else Alone(self.variant, self._blocks, a, self._maps)
        self._survey = Survey(p, tile.keys) if p.mask is not None else None

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        a = arguments.of_call(self._constants, inputs, mapped=True)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        maps = tuple(of(memory.place(array)) for of, array in zip(self._maps, inputs[:3], strict=True))
        # A counter for each launch, zeroed on its stream and so in a captured graph: two streams, or a graph and a
        # stream, may run one kernel at once, and what a launch that failed has left is of no account.
        if self._survey is not None:
            found = self._survey(inputs.attn_mask, a)
            run.start(self.variant, self._blocks, a, out, maps, beside=True)
            del found  # not before: what it points to is the next launch's from here on
            return
        counter = memory.empty((1,), lse, "int32") if self._counts else None
        a.counter = None if counter is None else memory.address(counter)
        run.start(self.variant, self._blocks, a, out, maps, counter)
