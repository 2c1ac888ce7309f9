"""What a launch passes to a kernel: the structures of ``src/arguments.cuh``, field for field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

__all__ = ["Arguments", "Operand"]


class Operand(ctypes.Structure):
    """An array (batch, heads, rows, columns): its address, and its strides in elements."""

    _fields_: ClassVar = [
        ("at", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
    ]


class Arguments(ctypes.Structure):
    """Every argument of every kernel; what one does not read stays 0. ``src/arguments.cuh`` says what each is."""

    _fields_: ClassVar = [
        *((name, Operand) for name in ("query", "key", "value", "out", "grad_out", "mask")),
        ("lengths", ctypes.c_void_p),
        ("length_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("lse", "grad_lse", "parts", "sums", "base", "delta")),
        *((name, ctypes.c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_mask", "counter")),
        *((name, ctypes.c_double) for name in ("scale", "factor", "cap", "keep_scale")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "group", "pack")),
        *((name, ctypes.c_int32) for name in ("queries", "padded", "keys", "dim", "dim_v")),
        *((name, ctypes.c_int32) for name in ("left", "right", "bottom_right", "section", "splits", "chunk")),
        ("length_bytes", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("mask_batch", "mask_heads", "mask_rows", "mask_columns")),
        *((name, ctypes.c_uint32) for name in ("seed_low", "seed_high", "threshold")),
    ]
