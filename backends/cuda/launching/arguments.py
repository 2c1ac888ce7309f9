"""What a launch passes to a kernel: the structures of ``src/arguments.cuh``, field for field, and what fills them."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, ClassVar

from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.problem import Problem
from attnswitch.problem.philox import BITS

from ...own import arithmetic
from ..classes import per_class
from . import memory

__all__ = ["Arguments", "Divisor", "Operand", "constants", "divide", "lying", "mask_kind", "of_call", "put", "seed"]

#: ``Operand``, written in one go.
_OPERAND = struct.Struct("=5q")
#: Query, key and value.
_OPERANDS = struct.Struct("=15q")
_MASK_KINDS = {"bool": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}
#: What an int holds.
_INT = 2**31 - 1
#: From ``batch`` to ``splits``; ``pack``, ``packs`` and ``tiles``; from ``splits`` on, with all divisors.
_COUNTS, _PARTS, _SPLIT = (struct.Struct(f"={fields}") for fields in ("16i", "3i", "2i10I"))


class Operand(ctypes.Structure):
    """An array (batch, heads, rows, columns): its address, and its strides in elements."""

    _fields_: ClassVar = [
        ("at", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
    ]


class Divisor(ctypes.Structure):
    """A number that others below 2^31 are divided by: multiplied by ``multiplier``, and shifted by ``shift`` bits."""

    _fields_: ClassVar = [("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    @classmethod
    def of(cls, number: int) -> Divisor:
        """That of ``number``, or of 1 if it is 0 (Granlund and Montgomery 1994, for 31 bits)."""
        return cls(*_divisor(number))


class Arguments(ctypes.Structure):
    """Every argument of every kernel; what one does not read stays 0. ``src/arguments.cuh`` says what each is."""

    _fields_: ClassVar = [
        *((name, Operand) for name in ("query", "key", "value", "out", "grad_out", "mask")),
        ("lengths", ctypes.c_void_p),
        ("length_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("lse", "grad_lse", "parts", "sums", "base", "delta")),
        *((name, ctypes.c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_mask", "counter")),
        *((name, ctypes.c_void_p) for name in ("mask_sets", "mask_bits")),
        *((name, ctypes.c_double) for name in ("scale", "factor", "cap", "keep_scale")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "group", "pack", "packs", "tiles")),
        *((name, ctypes.c_int32) for name in ("queries", "padded", "keys", "dim", "dim_v")),
        *((name, ctypes.c_int32) for name in ("left", "right", "bottom_right", "section", "splits", "chunk")),
        *((name, Divisor) for name in ("by_splits", "by_tiles", "by_packs", "by_pack", "by_group")),
        *((name, ctypes.c_int32) for name in ("length_bytes", "turned")),
        *((name, ctypes.c_int32) for name in ("mask_batch", "mask_heads", "mask_rows", "mask_columns")),
        *((name, ctypes.c_uint32) for name in ("seed_low", "seed_high", "threshold")),
        *((name, ctypes.c_int32) for name in ("mask_kind", "query_offset_bytes", "key_offset_bytes")),
        *((name, ctypes.c_void_p) for name in ("query_offsets", "key_offsets")),
        *((name, ctypes.c_int64) for name in ("query_rows", "key_rows", "saved_rows")),
        *((name, ctypes.c_void_p) for name in ("sinks", "slopes", "table")),
        *((name, ctypes.c_int64) for name in ("sink_step", "slope_batch", "slope_head", "table_batch", "table_step")),
        *((name, ctypes.c_int32) for name in ("table_bytes", "page")),
        ("by_page", Divisor),
        ("tree", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tree_batch", "tree_row")),
        *((name, ctypes.c_int32) for name in ("values_within", "awaited", "key_tiles")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("key_scale_page", "key_scale_head")),
        *((name, ctypes.c_int64) for name in ("value_scale_page", "value_scale_head")),
    ]


_AT_COUNTS, _AT_PACK, _AT_SPLITS = (getattr(Arguments, name).offset for name in ("batch", "pack", "splits"))


def constants(p: Problem, section: int = 0, *, generic: bool = False) -> Arguments:
    """What every call of a problem passes, with ``section`` heads side by side, to kernels ``generic`` or its own."""
    a = Arguments.from_buffer_copy(_of_class(p, generic))
    left, right = _sight(p)
    sizes = p.seq_q, arithmetic.padded(p), p.seq_k, p.dim_qk, p.dim_v
    heads = p.batch & _INT, p.heads_q & _INT, p.group & _INT  # which are any where nothing is launched
    _COUNTS.pack_into(a, _AT_COUNTS, *heads, 1, 0, 0, *sizes, left, right, p.bottom_right, section & _INT, 1)
    return a


@per_class
def _of_class(p: Problem, generic: bool) -> Arguments:
    """What does not depend on lengths."""
    factor, cap = arithmetic.factors(p)
    in_base_2 = not generic and arithmetic.folds(p) and p.dtype != "float64"
    return Arguments(
        scale=p.softmax_scale,
        factor=factor * arithmetic.LOG2E if in_base_2 else factor,
        cap=cap,
        keep_scale=arithmetic.keep_scale(p),
        threshold=min(round(p.dropout * 2**BITS) << 32 - BITS, 2**32 - 1),  # of a whole word
        mask_kind=mask_kind(p),
        page=p.page,
        by_page=Divisor.of(p.page),
    )


def mask_kind(p: Problem) -> int:
    """``MASK_KIND`` of the kernels: 0 without a mask."""
    return 0 if p.mask is None else _MASK_KINDS[p.mask.dtype]


def divide(a: Arguments, p: Problem, pack: int, packs: int, tiles: int, splits: int, chunk: int) -> None:
    """Have ``a`` tell a block its part: rows are packed, tiled, and their keys split, ``chunk`` to each."""
    _PARTS.pack_into(a, _AT_PACK, pack, packs & _INT, tiles)
    divisors = *_divisor(splits), *_divisor(tiles), *_divisor(packs), *_divisor(pack), *_divisor(p.group)
    _SPLIT.pack_into(a, _AT_SPLITS, splits, chunk, *divisors)


@functools.lru_cache(maxsize=4096)
def _divisor(number: int) -> tuple[int, int]:
    """The fields of a ``Divisor``."""
    number = max(1, number)
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def of_call(constants: Arguments, inputs: Inputs, *, mapped: bool = False) -> Arguments:
    """``constants`` with the arrays of a call; query, key and value are ``mapped`` where tensor maps tell of them."""
    a = Arguments.from_buffer_copy(constants)
    if not mapped:
        places = memory.place(inputs.query), memory.place(inputs.key), memory.place(inputs.value)
        _OPERANDS.pack_into(a, Arguments.query.offset, *places[0], *places[1], *places[2])
    if inputs.attn_mask is not None:
        _put_mask(a, inputs.attn_mask)
    if inputs.key_lengths is not None:
        _put_lengths(a, inputs.key_lengths)
    if inputs.seed is not None:
        seed(a, inputs.seed)
    if inputs.offsets is not None:
        _put_offsets(a, inputs.offsets, inputs.query.shape[2], inputs.key.shape[2])
    if inputs.sinks is not None:
        a.sinks, a.sink_step = memory.place(inputs.sinks)
    if inputs.alibi_slopes is not None:
        a.slopes, by_batch, a.slope_head = memory.place(inputs.alibi_slopes)
        a.slope_batch = 0 if inputs.alibi_slopes.shape[0] == 1 else by_batch
    if inputs.block_table is not None:
        if inputs.key.shape[0] >= 2**32:
            raise Unsupported(f"a cache of {inputs.key.shape[0]} pages: cuda numbers pages in 32 bits")
        a.table, a.table_batch, a.table_step = memory.place(inputs.block_table)
        a.table_bytes = int(inputs.block_table.itemsize)
    if inputs.key_scale is not None:
        a.key_scales, a.key_scale_page, a.key_scale_head = memory.place(inputs.key_scale)
        a.value_scales, a.value_scale_page, a.value_scale_head = memory.place(inputs.value_scale)
    if inputs.tree_mask is not None:
        a.tree, a.tree_batch, a.tree_row, _ = memory.place(inputs.tree_mask)
    return a


def lying(constants: Arguments, mask: Any, lengths: Any) -> Arguments:
    """``constants``, or a copy that has the strides of the calls' mask, and type and stride of their lengths."""
    if mask is lengths is None:
        return constants
    a = Arguments.from_buffer_copy(constants)
    if mask is not None:
        _put_mask(a, mask)
    if lengths is not None:
        _put_lengths(a, lengths)
    return a


def seed(a: Arguments, number: int) -> None:
    """Write the seed of dropout."""
    a.seed_low, a.seed_high = number & 0xFFFFFFFF, number >> 32


def _put_lengths(a: Arguments, lengths: Any) -> None:
    size = int(lengths.itemsize)
    a.lengths, stride = memory.place(lengths)
    a.length_stride = stride * size
    a.length_bytes = size if memory.dtype_name(lengths).startswith("u") else -size


def _put_offsets(a: Arguments, offsets: Offsets, query_rows: int, key_rows: int) -> None:
    a.query_offsets, a.key_offsets = memory.address(offsets.query), memory.address(offsets.key)
    a.query_offset_bytes, a.key_offset_bytes = int(offsets.query.itemsize), int(offsets.key.itemsize)
    a.query_rows, a.key_rows = query_rows, key_rows


def _put_mask(a: Arguments, mask: Any) -> None:
    address, *steps = memory.place(mask)  # 0 along the axes that it is broadcast over
    kept = (0 if size == 1 else stride for size, stride in zip(mask.shape, steps, strict=True))
    _OPERAND.pack_into(a, Arguments.mask.offset, address, *kept)


def put(a: Arguments, offset: int, array: Any) -> None:
    """Write an operand."""
    _OPERAND.pack_into(a, offset, *memory.place(array))


def _sight(p: Problem) -> tuple[int, int]:
    """Keys that a query sees before and after its own; more than there are, where nothing limits them."""
    unlimited = p.seq_q + p.seq_k
    left, right = p.reach
    return unlimited if left is None else left, unlimited if right is None else right
