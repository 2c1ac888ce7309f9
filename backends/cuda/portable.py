"""Launches of the portable family: laid out once for a problem, and given the arrays of every call."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from attnswitch.machine.backend import Gradients, Inputs
from attnswitch.problem import DTYPES, Memory, Problem

from ..own import arithmetic
from . import arguments, config, memory, run, tiles, workspace
from .arguments import Arguments, put
from .classes import per_class
from .compiling.variant import Variant
from .config import CudaConfig
from .splits import MERGED, PARTS, WHOLE
from .survey import Survey
from .tensor_maps import TensorMap
from .tiles import ROWS_A_BLOCK, Tile, block

__all__ = ["Backward", "Forward", "Launches", "Step", "turned"]

#: Flags that generic kernels are compiled for too: they decide on registers.
_REGISTERS = ("WITH_KEY", "WITH_VALUE")

# -- launches ----------------------------------------------------------------------------------------------------------


class Forward:
    """Writes output and lse: one launch, and another that merges many splits; of few, the last one's block does."""

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        tile, splits = chosen.forward, chosen.splits
        assert isinstance(tile, Tile)
        packed = tiles.packs(p)
        pack = p.group if packed else 1
        heads = p.heads_q // pack
        rows, chunk = arithmetic.tiles(tiles.rows(p), tile.queries), arithmetic.tiles(p.seq_k, splits * tile.keys)
        section = min(arithmetic.heads_a_section(p, packed=packed), max(1, p.batch * heads))
        self.constants = arguments.constants(p, section, generic=tile.generic)
        arguments.divide(self.constants, p, pack, heads, rows, splits, chunk * tile.keys)
        self.blocks = p.batch * heads * rows * splits
        self.variant = _forward(p, tile, chosen.split, config.once(p, tile))
        #: Whether an lse is written, be it asked for or not.
        self.needs_lse = chosen.split == PARTS
        self._problem, self._tile, self._splits, self._split = p, tile, splits, chosen.split

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
        """How to launch it on GPU ``index``, the current one, for tensors that lie like ``inputs``.

        That takes arguments which say where all arrays are, tensor maps, output or lse, and the stream.
        """
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


class Step(NamedTuple):
    """One launch of the backward: a kernel, its blocks, and how many heads run side by side.

    ``mapped``: it is passed tensor maps of query, key, value and the output's gradient. ``beside``: see ``run.start``.
    """

    variant: Variant
    blocks: int
    section: int
    mapped: bool = False
    beside: bool = False


class Launches:
    """A backward in several launches, and the memory between them.

    ``counts`` are the numbers, of lse's type, that lie in it: of base, of delta, of the sums of dQ, and of the parts of
    dK and dV. ``least`` is how many bytes one copy of the gradient of the output moves at least.
    """

    def __init__(self, p: Problem, constants: Arguments, counts: tuple[int, int, int, int], least: int) -> None:
        self.constants = constants
        dims = zip("qkv", (p.dim_qk, p.dim_qk, p.dim_v), strict=True)
        #: Columns of the gradients of query, key and value, and the shape of the mask's; None where nobody asks for it.
        self.dims = tuple(dim if letter in p.grads else None for letter, dim in dims)
        self.mask_shape = p.mask_shape if "m" in p.grads else None
        #: Numbers of the memory, and where in it base, delta, sums and parts begin, in bytes.
        self.space = sum(counts)
        size = 8 if p.dtype == "float64" else 4
        self.begins = tuple(size * sum(counts[:n]) for n in range(len(counts)))
        self._dtype, self._bytes = p.dtype, least
        #: What is launched, in that order; before it, a look at a mask.
        self.steps: list[Step] = []
        self.survey: Survey | None = None

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        steps = tuple(step.variant for step in self.steps)
        return steps if self.survey is None else (self.survey.variant, *steps)

    def maps(self, *places: tuple[int, ...]) -> tuple[TensorMap, ...]:
        """Those that ``Step.mapped`` launches are passed, of operands at these places."""
        return ()

    def readable(self, rows: Any) -> Any:
        """The output, or its gradient; or a dense copy where rows lie so that the kernels would read less at once.

        How they lie is no part of the problem, and each way would be one more kernel to compile.
        """
        return rows if _copied(_memory(rows), self._dtype) >= self._bytes else memory.dense(rows)

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Launch it."""
        a = arguments.of_call(self.constants, inputs)
        out, grad_out = self.readable(out), self.readable(grad_out)
        put(a, Arguments.out.offset, out)
        put(a, Arguments.grad_out.offset, grad_out)
        lse, grad_lse = _contiguous(lse), _contiguous(grad_lse)
        a.lse, a.grad_lse = memory.address(lse), None if grad_lse is None else memory.address(grad_lse)
        space = memory.empty((self.space,), lse)
        a.base, a.delta, a.sums, a.parts = (memory.address(space) + begin for begin in self.begins)
        a.turned = turned(inputs)
        q, k, v = (
            None if dim is None else memory.like(operand, dim)
            for operand, dim in zip(inputs[:3], self.dims, strict=True)
        )
        grads = Gradients(q, k, v, self.mask_shape and memory.empty(self.mask_shape, inputs.attn_mask))
        a.grad_query, a.grad_key, a.grad_value, a.grad_mask = (
            None if grad is None else memory.address(grad) for grad in grads
        )
        looked = None if self.survey is None else self.survey(inputs.attn_mask, a)
        maps = self.maps(*(memory.place(array) for array in (*inputs[:3], grad_out)))
        for step in self.steps:
            a.section = step.section
            run.start(step.variant, step.blocks, a, lse, maps if step.mapped else (), beside=step.beside)
        del looked  # not before: what it points to is the next launch's from here on
        return grads


class Backward(Launches):
    """Gradients of what the problem asks for: three launches or four, and one more for a mask.

    The first makes of each row what the others work on beside the inputs: ``base`` of its lse and ``delta`` of output
    and gradients, both (B, Hq, Lq padded to whole tiles). They may be of more keys than there are here.
    """

    def __init__(self, p: Problem, chosen: CudaConfig) -> None:
        generic = chosen.key_gradients.generic
        rows = p.batch * p.heads_q * arithmetic.padded(p)
        least = DTYPES[p.dtype] if generic else _dense_bytes(p)
        super().__init__(p, arguments.constants(p, generic=generic), (rows, rows, 0, 0), least)
        self._rows = rows
        self.steps = list(self._launches(p, chosen))

    def _launches(self, p: Problem, chosen: CudaConfig) -> Iterator[Step]:
        folds = arithmetic.folds(p) and not chosen.key_gradients.generic
        yield Step(_of_rows(p, "prepare", folds), arithmetic.tiles(self._rows, ROWS_A_BLOCK), 0)
        heads_q, heads_kv = p.batch * p.heads_q, p.batch * p.heads_kv
        if "q" in p.grads:
            tile = chosen.query_gradient
            section = min(arithmetic.heads_a_section(p), max(1, heads_q))
            yield Step(_gradient(p, "query_gradient", tile), heads_q * arithmetic.tiles(p.seq_q, tile.queries), section)
        tile = chosen.key_gradients
        section = min(arithmetic.heads_a_section(p, queries=True), max(1, heads_kv))
        wanted = "".join(letter for letter in "kv" if letter in p.grads)
        if wanted and tile.generic and chosen.key_and_value:  # it makes both, and writes what is asked for
            wanted = "kv"
        for letters in (wanted,) if wanted and chosen.key_and_value else wanted:
            blocks = heads_kv * arithmetic.tiles(p.seq_k, tile.keys)
            yield Step(_gradient(p, "key_gradients", tile, letters), blocks, section)
        if "m" in p.grads and p.mask_shape is not None:
            tile = chosen.mask_gradient
            b, h, q, k = p.mask_shape
            a = self.constants
            a.mask_batch, a.mask_heads, a.mask_rows, a.mask_columns = b, h, q, k
            down = arithmetic.tiles(q, tile.queries) if q != 1 else 1
            across = arithmetic.tiles(k, tile.keys) if k != 1 else 1
            yield Step(_gradient(p, "mask_gradient", tile), b * h * down * across, 0)


def turned(inputs: Inputs) -> int:
    """Bits of the gradients of query, key and value whose heads lie inside L, as those of their operands."""
    return sum(memory.turned(operand) << at for at, operand in enumerate(inputs[:3]))


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
        "QUERY_BYTES": _copied(p.query, p.dtype),
        "KEY_BYTES": _copied(p.key, p.dtype),
        "VALUE_BYTES": _copied(p.value, p.dtype),
    }


def _copied(operand: Memory, dtype: str) -> int:
    """Bytes that one copy may move."""
    return DTYPES[dtype] if operand.strided else max(operand.align, DTYPES[dtype])


def _dense_bytes(p: Problem) -> int:
    """Bytes that one copy may move of a gradient of the output whose rows lie without gaps."""
    return math.gcd(16, p.dim_v * DTYPES[p.dtype])


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
