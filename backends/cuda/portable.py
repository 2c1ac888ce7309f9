"""Launches of the portable family: laid out once for a problem, and given the arrays of every call."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import DTYPES, Problem

from ..own import arithmetic
from . import tiles
from .classes import per_class
from .compiling.variant import Variant
from .launching import arguments, memory, run, workspace
from .launching.arguments import Arguments, put
from .launching.backward import BackwardLaunches, Step
from .launching.forward import ForwardLaunches
from .splits import MERGED, PARTS, WHOLE, how
from .tiles import ROWS_A_BLOCK, Tile, block

__all__ = ["Backward", "Forward"]

#: Flags that generic kernels are compiled for too: they decide on registers.
_REGISTERS = ("WITH_KEY", "WITH_VALUE")

# -- launches ----------------------------------------------------------------------------------------------------------


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
        self._problem, self._tile, self._splits, self._split = p, tile, splits, split

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        return (self.variant, _merge(self._problem)) if self._split == PARTS else (self.variant,)

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
            parts = self._parts(a, lse)
            run.start(self.variant, self.blocks, a, out)
            run.start(_merge(self._problem), self._lines, a, out)
            del parts  # not before: the next launch's is what it points to from here on

    def bound(self, inputs: Inputs, index: int) -> Callable[[Arguments, Any, Any, int], None]:
        """See ``launching.forward``."""
        function, variant, blocks = run.loaded(self.variant, index), self.variant, self.blocks
        if self._split == WHOLE:

            def whole(a: Arguments, _: Any, like: Any, stream: int) -> None:
                run.send(function, variant, blocks, stream, ctypes.addressof(a))

            return whole
        if self._split == MERGED:
            left = self._left

            def merged(a: Arguments, _: Any, like: Any, stream: int) -> None:
                places = workspace.blank(left, like, stream)
                a.parts = places.address
                run.send(function, variant, blocks, stream, ctypes.addressof(a))

            return merged
        merge, lines = _merge(self._problem), self._lines
        merging = run.loaded(merge, index)

        def apart(a: Arguments, _: Any, lse: Any, stream: int) -> None:
            parts = self._parts(a, lse)
            run.send(function, variant, blocks, stream, ctypes.addressof(a))
            run.send(merging, merge, lines, stream, ctypes.addressof(a))
            del parts

        return apart

    @functools.cached_property
    def _left(self) -> int:
        """Bytes that blocks leave to those of the last splits."""
        return tiles.left(self._problem, self._tile) * (self.blocks - self.blocks // self._splits)

    @functools.cached_property
    def _lines(self) -> int:
        p = self._problem
        return p.batch * p.heads_q * p.seq_q

    def _parts(self, a: Arguments, lse: Any) -> Any:
        """Memory for what splits come to, which ``a`` then points to: numerators, maxima and sums, of lse's type."""
        numerators = self._splits * self._lines * self._problem.dim_v
        parts = memory.empty((numerators + 2 * self._splits * self._lines,), lse)
        at = memory.address(parts)
        a.parts, a.sums = at, at + numerators * lse.itemsize
        return parts


class Backward(BackwardLaunches):
    """Gradients of what the problem asks for: three launches or four, and one more for a mask.

    The first makes of each row what the others work on beside the inputs: ``base`` of its lse and ``delta`` of output
    and gradients, both (B, Hq, Lq padded to whole tiles). They may be of more keys than there are here.

    ``keys``, ``query`` and ``mask`` are the tiles of the gradients of key and value, of query, and of a float mask.
    ``together``: those of key and value are made by one launch.
    """

    def __init__(self, p: Problem, keys: Tile, query: Tile, mask: Tile, *, together: bool) -> None:
        generic = keys.generic
        rows = p.batch * p.heads_q * arithmetic.padded(p)
        least = DTYPES[p.dtype] if generic else _dense_bytes(p)
        super().__init__(p, arguments.constants(p, generic=generic), (rows, rows, 0, 0), least)
        self._rows = rows
        self.steps = list(self._launches(p, keys, query, mask, together))

    def _launches(self, p: Problem, keys: Tile, query: Tile, mask: Tile, together: bool) -> Iterator[Step]:
        folds = arithmetic.folds(p) and not keys.generic
        yield Step(_of_rows(p, "prepare", folds), arithmetic.tiles(self._rows, ROWS_A_BLOCK), 0)
        heads_q, heads_kv = p.batch * p.heads_q, p.batch * p.heads_kv
        if "q" in p.grads:
            blocks = heads_q * arithmetic.tiles(p.seq_q, query.queries)
            section = min(arithmetic.heads_a_section(p), max(1, heads_q))
            yield Step(_gradient(p, "query_gradient", query), blocks, section)
        section = min(arithmetic.heads_a_section(p, queries=True), max(1, heads_kv))
        wanted = "".join(letter for letter in "kv" if letter in p.grads)
        if wanted and keys.generic and together:  # it makes both, and writes what is asked for
            wanted = "kv"
        for letters in (wanted,) if wanted and together else wanted:
            blocks = heads_kv * arithmetic.tiles(p.seq_k, keys.keys)
            yield Step(_gradient(p, "key_gradients", keys, letters), blocks, section)
        if "m" in p.grads and p.mask_shape is not None:
            b, h, q, k = p.mask_shape
            a = self.constants
            a.mask_batch, a.mask_heads, a.mask_rows, a.mask_columns = b, h, q, k
            down = arithmetic.tiles(q, mask.queries) if q != 1 else 1
            across = arithmetic.tiles(k, mask.keys) if k != 1 else 1
            yield Step(_gradient(p, "mask_gradient", mask), b * h * down * across, 0)


# -- what a kernel is compiled for -------------------------------------------------------------------------------------


@per_class
def _forward(p: Problem, tile: Tile, split: int, once: bool) -> Variant:
    own = {"LENGTHS": int(p.key_lengths), "SPLIT": split, "ONCE": int(once)}
    return _variant("forward", p, tile, {**_flags(p), **own})


@per_class
def _gradient(p: Problem, kernel: str, tile: Tile, letters: str = "") -> Variant:
    """``letters`` are those of ``key_gradients``."""
    own = {"WITH_KEY": int("k" in letters), "WITH_VALUE": int("v" in letters)} if letters else {}
    return _variant(kernel, p, tile, {**_flags(p), **own, "GRAD_OUT_BYTES": _dense_bytes(p)})


@per_class
def _merge(p: Problem) -> Variant:
    return _of_rows(p, "merge", arithmetic.folds(p))._replace(warps=tiles.MERGING_WARPS, shared=tiles.merging_shared(p))


def _variant(kernel: str, p: Problem, tile: Tile, flags: dict[str, int]) -> Variant:
    if tile.generic:
        flags = {name: value for name, value in flags.items() if name in _REGISTERS}
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    return Variant(
        kernel,
        p.dtype,
        rows,
        columns,
        block(p.dim_qk, p, tile),
        block(p.dim_v, p, tile),
        tile.warps,
        tile.stages,
        tile.resident,
        tiles.shared(kernel, tile, p),
        tuple(flags.items()),
        teams=tile.teams,
        generic=tile.generic,
    )


@per_class
def _of_rows(p: Problem, kernel: str, folds: bool) -> Variant:
    """A kernel that has no tiles."""
    return Variant(kernel, p.dtype, warps=ROWS_A_BLOCK, flags=(("FOLD", int(folds)),))


def _flags(p: Problem) -> dict[str, int]:
    return {
        "FOLD": int(arithmetic.folds(p)),
        "SOFTCAP": int(arithmetic.capped(p)),
        "MASK_KIND": arguments.mask_kind(p),
        "MASK_PAIRS": int(_pairs(p)),
        "DROPOUT": int(p.dropout > 0.0),
        "QUERY_BYTES": memory.copied(p.query, p.dtype),
        "KEY_BYTES": memory.copied(p.key, p.dtype),
        "VALUE_BYTES": memory.copied(p.value, p.dtype),
    }


def _dense_bytes(p: Problem) -> int:
    """Bytes that one copy may move of a gradient of the output whose rows lie without gaps."""
    return math.gcd(16, p.dim_v * DTYPES[p.dtype])


def _pairs(p: Problem) -> bool:
    """Whether one load may have two neighbours of a mask's row, of 8 bytes at most, which a thread has of scores."""
    if p.mask is None or "k" not in p.mask.axes or p.attn_mask.strided or not tiles.on_tensor_cores(p):
        return False
    return 2 * p.element("attn_mask") <= min(p.attn_mask.align, 8)
