"""The ways in which an operand may lie in memory; ``attnswitch.verify.launch.layouts`` carries them out."""

from __future__ import annotations

__all__ = ["ALIGNED", "FAR", "FENCED", "PLACINGS", "TURNED"]

#: Plainest first. The expanded ones hold equal values along their axis.
PLACINGS = {
    "contiguous": "row-major, as (B, H, L, D)",
    "transposed": "stored as (B, L, H, D), as most models have it",
    "packed": "the middle of three operands in one (B, L, 3, H, D) buffer",
    "padded-rows": "rows one element apart from the next: an odd row stride",
    "offset": "one element into its buffer: not aligned to 16 bytes",
    "strided": "every second element of the last axis",
    "columns": "the last two axes stored the other way round",
    "garbage": "meaningless strides on axes of length 1",
    "expanded-heads": "one head, repeated by a stride of 0",
    "expanded-batch": "one batch entry, repeated by a stride of 0",
    "expanded-rows": "one row, repeated by a stride of 0",
    "backwards": "the sequence runs backwards in memory",
    "mirrored": "the last axis runs backwards, from multiples of 16 bytes",
}

#: What torch has no strides for; NumPy and CuPy have.
TURNED = ("backwards", "mirrored")

#: Those whose rows have a unit stride and begin at multiples of 16 bytes, if a row's length is such a multiple.
ALIGNED = ("contiguous", "transposed", "packed", "garbage")

#: Not drawn: rows so far apart that the last begins past 2**31 elements. Memory is asked for, and hardly any touched.
FAR = "far"
#: Not drawn either: contiguous, beside memory that nobody may touch.
FENCED = {"at-start": "begins where memory does", "at-end": "ends where memory does"}
