"""Launches of the portable family: each is prepared once for a problem, and given the arrays of every call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attnswitch.machine.backend import Inputs
from attnswitch.problem import DTYPES, Memory, Problem

from ..own import arithmetic
from . import arguments, config, memory, run, tiles
from .arguments import Arguments, Divisor, put
from .config import CudaConfig
from .prepared import Alone
from .splits import MERGED, WHOLE
from .tiles import ROWS_A_BLOCK, Tile, block
from .variant import Variant

__all__ = ["Forward", "KeyGradients", "MaskGradient", "Prepare", "QueryGradient", "Saved"]

_MASK_KINDS = {"bool": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}


class Saved(NamedTuple):
    """What the backward works on beside the inputs: dO, and for each row what ``Prepare`` made of lse and dO.

    ``base`` and ``delta`` are (B, Hq, Lq padded to whole tiles).
    """

    grad_out: Any
    base: Any
    delta: Any


# -- launches ----------------------------------------------------------------------------------------------------------


class Forward:
    """Writes output and lse: one launch, and another that merges many splits; of few, the last one's block does."""

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        tile, splits = chosen.forward, chosen.splits
        assert isinstance(tile, Tile)
        a = arguments.constants(p)
        a.pack = p.group if tiles.packs(p) else 1
        heads = p.heads_q // a.pack
        a.section = min(arithmetic.heads_a_section(p, packed=a.pack > 1), max(1, p.batch * heads))
        a.splits, a.chunk = splits, arithmetic.tiles(p.seq_k, splits * tile.keys) * tile.keys
        a.packs, a.tiles = heads, arithmetic.tiles(tiles.rows(p), tile.queries)
        a.by_splits, a.by_tiles, a.by_packs = Divisor.of(splits), Divisor.of(a.tiles), Divisor.of(heads)
        a.by_pack, a.by_group = Divisor.of(a.pack), Divisor.of(p.group)
        self._blocks = p.batch * heads * a.tiles * splits
        self._constants = a
        own = {"LENGTHS": int(p.key_lengths), "SPLIT": chosen.split, "ONCE": int(config.once(p))}
        self._variant = _variant("forward", p, tile, {**_flags(p), **own})
        self._rows = (splits, p.batch, p.heads_q, p.seq_q)
        self._left = tiles.left(p, tile) * (self._blocks - self._blocks // splits)
        self._dim = p.dim_v
        self._split = chosen.split
        self.alone = Alone(self._variant, self._blocks, a) if self._split == WHOLE else None
        self._merge = _of_rows("merge", p, {"FOLD": int(arithmetic.folds(p))})._replace(
            warps=tiles.MERGING_WARPS, shared=tiles.merging_shared(p)
        )

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        a = arguments.of_call(self._constants, inputs)
        put(a, Arguments.out.offset, out)
        a.lse = memory.address(lse)
        if self._split == WHOLE:
            run.start(self._variant, self._blocks, a, out)
            return
        if self._split == MERGED:
            run.start(self._variant, self._blocks, a, out, left=self._left)
            return
        parts = memory.empty((*self._rows, self._dim), lse)
        sums = memory.empty((2, *self._rows), lse)
        a.parts, a.sums = memory.address(parts), memory.address(sums)
        run.start(self._variant, self._blocks, a, out)
        run.start(self._merge, math.prod(self._rows[1:]), a, out)


class Prepare:
    """D of every row, and its lse as the other kernels want it."""

    def __init__(self, p: Problem) -> None:
        self._constants = arguments.constants(p)
        self._variant = _of_rows("prepare", p, {"FOLD": int(arithmetic.folds(p))})
        self._shape = (p.batch, p.heads_q, arithmetic.padded(p))

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
        """Launch it."""
        saved = Saved(grad_out, memory.empty(self._shape, lse), memory.empty(self._shape, lse))
        a = _with(self._constants, inputs, saved)
        lse, grad_lse = _contiguous(lse), _contiguous(grad_lse)
        put(a, Arguments.out.offset, out)
        a.lse, a.grad_lse = memory.address(lse), None if grad_lse is None else memory.address(grad_lse)
        run.start(self._variant, arithmetic.tiles(math.prod(self._shape), ROWS_A_BLOCK), a, lse)
        return saved


class QueryGradient:
    """Gradient of query, (B, Hq, Lq, D)."""

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        a = arguments.constants(p)
        heads = p.batch * p.heads_q
        a.section = min(arithmetic.heads_a_section(p), max(1, heads))
        self._constants = a
        self._variant = _variant("query_gradient", p, chosen.query_gradient, _flags(p))
        self._blocks = heads * arithmetic.tiles(p.seq_q, chosen.query_gradient.queries)
        self._shape = (p.batch, p.heads_q, p.seq_q, p.dim_qk)

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        grad = memory.empty(self._shape, inputs.query)
        a = _with(self._constants, inputs, saved)
        a.grad_query = memory.address(grad)
        run.start(_for(self._variant, saved), self._blocks, a, grad)
        return grad


class KeyGradients:
    """Gradients of key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv), those that are asked for, by one launch or two."""

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        a = arguments.constants(p)
        heads = p.batch * p.heads_kv
        a.section = min(arithmetic.heads_a_section(p, queries=True), max(1, heads))
        self._constants = a
        wanted = "".join(letter for letter in "kv" if letter in p.grads)
        self._variants = [
            _variant(
                "key_gradients",
                p,
                chosen.key_gradients,
                {**_flags(p), "WITH_KEY": int("k" in letters), "WITH_VALUE": int("v" in letters)},
            )
            for letters in ((wanted,) if chosen.key_and_value else wanted)
        ]
        self._blocks = heads * arithmetic.tiles(p.seq_k, chosen.key_gradients.keys)
        rows = (p.batch, p.heads_kv, p.seq_k)
        self._key = (*rows, p.dim_qk) if "k" in wanted else None
        self._value = (*rows, p.dim_v) if "v" in wanted else None

    def __call__(self, inputs: Inputs, saved: Saved) -> tuple[Any, Any]:
        """Launch it."""
        a = _with(self._constants, inputs, saved)
        key = value = None
        if self._key is not None:
            key = memory.empty(self._key, inputs.key)
            a.grad_key = memory.address(key)
        if self._value is not None:
            value = memory.empty(self._value, inputs.key)
            a.grad_value = memory.address(value)
        for variant in self._variants:
            run.start(_for(variant, saved), self._blocks, a, inputs.key)
        return key, value


class MaskGradient:
    """Gradient of a float mask, in its shape."""

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        assert p.mask_shape is not None
        tile = chosen.mask_gradient
        a = arguments.constants(p)
        b, h, q, k = p.mask_shape
        a.mask_batch, a.mask_heads, a.mask_rows, a.mask_columns = b, h, q, k
        self._constants = a
        self._variant = _variant("mask_gradient", p, tile, _flags(p))
        self._shape = (b, h, q, k)
        self._blocks = (
            b
            * h
            * (arithmetic.tiles(q, tile.queries) if q != 1 else 1)
            * (arithmetic.tiles(k, tile.keys) if k != 1 else 1)
        )

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        assert inputs.attn_mask is not None
        grad = memory.empty(self._shape, inputs.attn_mask)
        a = _with(self._constants, inputs, saved)
        a.grad_mask = memory.address(grad)
        run.start(_for(self._variant, saved), self._blocks, a, grad)
        return grad


# -- what a kernel is compiled for -------------------------------------------------------------------------------------


def _variant(kernel: str, p: Problem, tile: Tile, flags: dict[str, int]) -> Variant:
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    return Variant(
        kernel,
        p.dtype,
        rows,
        columns,
        block(p.dim_qk, p),
        block(p.dim_v, p),
        tile.warps,
        tile.stages,
        tile.resident,
        tiles.shared(kernel, tile, p),
        tuple(flags.items()),
        teams=tile.teams,
    )


def _of_rows(kernel: str, p: Problem, flags: dict[str, int]) -> Variant:
    """A kernel that has no tiles."""
    return Variant(kernel, p.dtype, warps=ROWS_A_BLOCK, flags=tuple(flags.items()))


def _for(variant: Variant, saved: Saved) -> Variant:
    """The variant for the upstream gradient of one call, which is no part of the problem."""
    copied = _copied(_memory(saved.grad_out), variant.dtype)
    return variant._replace(flags=(*variant.flags, ("GRAD_OUT_BYTES", copied)))


def _flags(p: Problem) -> dict[str, int]:
    return {
        "FOLD": int(arithmetic.folds(p)),
        "SOFTCAP": int(arithmetic.capped(p)),
        "MASK_KIND": 0 if p.mask is None else _MASK_KINDS[p.mask.dtype],
        "MASK_PAIRS": int(_pairs(p)),
        "DROPOUT": int(p.dropout > 0.0),
        "QUERY_BYTES": _copied(p.query, p.dtype),
        "KEY_BYTES": _copied(p.key, p.dtype),
        "VALUE_BYTES": _copied(p.value, p.dtype),
    }


def _copied(operand: Memory, dtype: str) -> int:
    """Bytes that one copy may move."""
    return DTYPES[dtype] if operand.strided else max(operand.align, DTYPES[dtype])


def _pairs(p: Problem) -> bool:
    """Whether one load may have two neighbours of a mask's row, of 8 bytes at most, which a thread has of scores."""
    if p.mask is None or "k" not in p.mask.axes or p.attn_mask.strided or not tiles.on_tensor_cores(p):
        return False
    return 2 * p.element("attn_mask") <= min(p.attn_mask.align, 8)


def _memory(array: Any) -> Memory:
    """How ``array`` lies, as far as copies care."""
    address, *steps = memory.place(array)
    size = array.itemsize
    strided = array.shape[3] > 1 and steps[3] != 1
    return Memory(align=math.gcd(16, address, *(stride * size for stride in steps[:3])), strided=strided)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _with(constants: Arguments, inputs: Inputs, saved: Saved) -> Arguments:
    """``constants`` with the arrays of a call of the backward."""
    a = arguments.of_call(constants, inputs)
    put(a, Arguments.grad_out.offset, saved.grad_out)
    a.base, a.delta = memory.address(saved.base), memory.address(saved.delta)
    return a


def _contiguous(array: Any) -> Any:
    """(B, H, L) without gaps, as the kernels read it."""
    if array is None:
        return None
    _, h, length = array.shape
    wanted = (h * length, length, 1)
    steps = memory.place(array)[1:]
    if all(step == want for size, step, want in zip(array.shape, steps, wanted, strict=True) if size > 1):
        return array
    return array.contiguous() if hasattr(array, "contiguous") else array.copy(order="C")
