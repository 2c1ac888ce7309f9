"""Launches of the portable forward."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import CACHES, Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments, memory, run, workspace
from ..launching.arguments import Arguments, put
from ..launching.forward import ForwardLaunches
from ..launching.merging import Merging
from . import tiles, variants
from .splits import MERGED, PARTS, WHOLE, how
from .tiles import Tile

__all__ = ["Forward"]


class Forward(ForwardLaunches):
    """Writes output and lse: one launch, and another that merges many splits; of few, the last one's block does."""

    def __init__(self, p: Problem, tile: Tile, splits: int) -> None:
        packed = tiles.packs(p)
        pack = p.group if packed else 1
        heads = p.heads_q // pack
        rows, chunk = arithmetic.tiles(tiles.rows(p), tile.queries), arithmetic.tiles(p.seq_k, splits * tile.keys)
        section = min(arithmetic.heads_a_section(p, packed=packed), max(1, p.batch * heads))
        self.constants = arguments.constants(p, section, generic=tile.generic)
        arguments.divide(self.constants, p, pack, heads, rows, splits, chunk * tile.keys)
        self.blocks = p.batch * heads * rows * splits
        split = how(tile, splits)
        self.variant = _forward(p, tile, split, tiles.once(p, tile))
        self.needs_lse = split == PARTS
        self._merging = Merging(p, splits, folds=arithmetic.folds(p))
        self._problem, self._tile, self._splits, self._split = p, tile, splits, split

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        return (self.variant, self._merging.variant) if self._split == PARTS else (self.variant,)

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        a = arguments.of_call(self.constants, inputs)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        if self._split == WHOLE:
            run.start(self.variant, self.blocks, a, out)
        elif self._split == MERGED:
            run.start(self.variant, self.blocks, a, out, left=self._left)
        else:
            parts = self._merging.parts(a, inputs, lse)
            run.start(self.variant, self.blocks, a, out)
            run.start(self._merging.variant, self._merging.blocks(inputs), a, out)
            del parts  # not before: the next launch's is what it points to from here on

    def bound(self, inputs: Inputs, index: int) -> Callable[[Arguments, Any, Any, int], None]:
        """See ``launching.forward``."""
        send = run.sender(self.variant, self.blocks, index)
        if self._split == WHOLE:

            def whole(a: Arguments, _: Any, like: Any, stream: int) -> None:
                send(stream, ctypes.addressof(a))

            return whole
        if self._split == MERGED:
            left = self._left

            def merged(a: Arguments, _: Any, like: Any, stream: int) -> None:
                places = workspace.blank(left, like, stream)
                a.parts = places.address
                send(stream, ctypes.addressof(a))

            return merged
        send_merge = run.sender(self._merging.variant, self._merging.blocks(inputs), index)
        parts_for = self._merging.parts_for(inputs)

        def apart(a: Arguments, _: Any, lse: Any, stream: int) -> None:
            parts = parts_for(a, lse)
            send(stream, ctypes.addressof(a))
            send_merge(stream, ctypes.addressof(a))
            del parts

        return apart

    @functools.cached_property
    def _left(self) -> int:
        """Bytes that blocks leave to those of the last splits."""
        return tiles.left(self._problem, self._tile) * (self.blocks - self.blocks // self._splits)


@per_class
def _forward(p: Problem, tile: Tile, split: int, once: bool) -> Variant:
    own = {"LENGTHS": int(p.key_lengths), "SPLIT": split, "ONCE": int(once)}
    own |= {"SINKS": int(p.sinks), "PAGED": tiles.paged(p, tile)}
    own |= {"TREE": 1} if p.tree else {}  # which nearly no problem has, so that the others do not name it
    own |= {"CACHE": 1 + CACHES.index(p.cache)} if p.cache else {}
    return variants.of_tile("forward", p, tile, {**variants.flags(p), **own})
