"""Launches of the portable backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments
from ..launching.backward import BackwardLaunches, Step
from ..launching.key_grid import key_grid
from . import sequences, variants
from .shares import shares
from .tiles import ROWS_A_BLOCK, Tile

__all__ = ["Backward", "rows_added"]

#: Keys of a tile of ``prepare_added``, at most: where no row is far from 0 it has none, and registers to spare.
_FEW_KEYS = 32


class Backward(BackwardLaunches):
    """Gradients of what the problem asks for: three launches or four, and one more for a mask.

    Where few blocks have long ways, several share each (``shares``), and one more launch adds up their sums.

    The first makes of each row what the others work on beside the inputs: ``base`` of its lse and ``delta`` of output
    and gradients, both (B, Hq, Lq padded to whole tiles). They may be of more keys than there are here.

    ``keys``, ``query`` and ``mask`` are the tiles of the gradients of key and value, of query, and of a float mask.
    ``together``: those of key and value are made by one launch. ``all_rows`` are the queries of all sequences, and past
    the last one, of a problem with varlen (``sequences.launched``): there both are (Hq, whole tiles of each).
    """

    def __init__(
        self, p: Problem, device: Device, keys: Tile, query: Tile, mask: Tile, *, together: bool, all_rows: int = 0
    ) -> None:
        generic = keys.generic
        saved = sequences.saved_rows(all_rows, p.batch - 1) if p.varlen else p.batch * arithmetic.padded(p)
        rows = p.heads_q * saved
        least = DTYPES[p.dtype] if generic else variants.dense_bytes(p)
        bases = 2 * rows if p.adds_mask else rows  # `rest` lies behind
        constants = arguments.constants(p, generic=generic)
        constants.saved_rows = saved
        of_query, of_key, of_value = (
            p.batch * heads * length * dim if letter in p.grads else 0
            for letter, heads, length, dim in (
                ("q", p.heads_q, p.seq_q, p.dim_qk),
                ("k", p.heads_kv, p.seq_k, p.dim_qk),
                ("v", p.heads_kv, p.seq_k, p.dim_v),
            )
        )
        by_query, by_keys = shares("query_gradient", p, device, query), shares("key_gradients", p, device, keys)
        #: Numbers of the gradient of query, and of those of key and value; and among how many blocks each is shared.
        self._numbers, self._shares = (of_query, of_key + of_value), (by_query, by_keys)
        # Parts of query are taken before those of key are left.
        parts = max(_left(of_query, by_query), _left(of_key, by_keys))
        super().__init__(p, constants, (bases, rows, _left(of_value, by_keys), parts), least)
        self._rows = rows
        self.steps = list(self._launches(p, keys, query, mask, together))

    def _launches(self, p: Problem, keys: Tile, query: Tile, mask: Tile, together: bool) -> Iterator[Step]:
        heads_q, heads_kv = p.batch * p.heads_q, p.batch * p.heads_kv
        if p.adds_mask:
            yield rows_added(p, query)
        else:
            folds = arithmetic.folds(p) and not keys.generic
            yield Step(variants.of_rows(p, "prepare", folds), arithmetic.tiles(self._rows, ROWS_A_BLOCK), 0)
        by_query, by_keys = self._shares
        if "q" in p.grads:
            blocks = heads_q * arithmetic.tiles(p.seq_q, query.queries)
            section = min(arithmetic.heads_a_section(p), max(1, heads_q))
            yield Step(_gradient(p, "query_gradient", query, by_query), blocks * by_query, section, splits=by_query)
            yield from self._added(p, by_query, of_keys=False)
        section = min(arithmetic.heads_a_section(p, queries=True), max(1, heads_kv))
        wanted = "".join(letter for letter in "kv" if letter in p.grads)
        if wanted and keys.generic and together:  # it makes both, and writes what is asked for
            wanted = "kv"
        grid = key_grid(p, keys.keys, section, by_keys)
        self.clears = grid.clears
        for letters in (wanted,) if wanted and together else wanted:
            variant = _gradient(p, "key_gradients", keys, by_keys, letters)
            yield Step(variant, grid.blocks, grid.section, splits=by_keys)
        if wanted:
            yield from self._added(p, by_keys, of_keys=True)
        if "m" in p.grads and p.mask_shape is not None:
            b, h, q, k = p.mask_shape
            a = self.constants
            a.mask_batch, a.mask_heads, a.mask_rows, a.mask_columns = b, h, q, k
            down = arithmetic.tiles(q, mask.queries) if q != 1 else 1
            across = arithmetic.tiles(k, mask.keys) if k != 1 else 1
            yield Step(_gradient(p, "mask_gradient", mask), b * h * down * across, 0)

    def _added(self, p: Problem, parts: int, *, of_keys: bool) -> Iterator[Step]:
        if parts > 1:
            blocks = arithmetic.tiles(self._numbers[of_keys], 32 * ROWS_A_BLOCK)
            yield Step(variants.of_numbers(p, "add_parts", of_keys), blocks, 0, splits=parts)


def _left(numbers: int, parts: int) -> int:
    """How many numbers ``parts`` blocks leave for each gradient of so many."""
    return numbers * parts if parts > 1 else 0


def rows_added(p: Problem, query: Tile) -> Step:
    """What every backward of a float mask has first: base, rest and delta of each row."""
    rows = replace(query, keys=min(query.keys, _FEW_KEYS), stages=1)
    blocks = p.batch * p.heads_q * arithmetic.tiles(arithmetic.padded(p), rows.queries)
    return Step(_gradient(p, "prepare_added", rows), blocks, 0)


@per_class
def _gradient(p: Problem, kernel: str, tile: Tile, parts: int = 1, letters: str = "") -> Variant:
    """``parts`` are blocks that share what one has to do; ``letters`` are those of ``key_gradients``."""
    own = {"WITH_KEY": int("k" in letters), "WITH_VALUE": int("v" in letters)} if letters else {}
    if kernel in ("key_gradients", "query_gradient"):
        own["SPLIT"] = int(parts > 1)
    if kernel == "prepare_added":  # elsewhere the lse tells of a sink
        own["SINKS"] = int(p.sinks)
    return variants.of_tile(kernel, p, tile, {**variants.flags(p), **own, "GRAD_OUT_BYTES": variants.dense_bytes(p)})
