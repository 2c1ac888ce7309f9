"""Numbers from an integer hash: the same bits in NumPy, CuPy and torch, on every machine.

Element i of a stream is splitmix64(i, seed, stream): integer operations that wrap alike everywhere. Values are made
from it by float64 operations that IEEE 754 rounds in one way only, then rounded to the storage type's precision before
the cast, so that the cast is exact and cannot differ between libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from attnswitch.arrays import Array

__all__ = ["float64", "hashed", "normal", "rounded", "shifted", "uniform"]

#: Bits of precision of the storage types.
_PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_BLOCK = 2**15  # numbers that are made at a time: 256 kB


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN, _MIX1, _MIX2 = (_signed(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def hashed(xp: Any, seed: int, stream: int, count: int, first: int = 0) -> Array:
    """``count`` 64-bit hashes from number ``first`` on as int64, in the array library ``xp`` (numpy, cupy or torch)."""
    start = _signed((seed * 0xD1342543DE82EF95 + stream * 0xA0761D6478BD642F) % 2**64)
    x = xp.arange(first + 1, first + count + 1, dtype=xp.int64)
    x *= _GOLDEN
    x += start
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x ^= shifted(x, shift)
        x *= factor
    x ^= shifted(x, 31)
    return x


def shifted(x: Array, shift: int) -> Array:
    """Logical shift right of int64."""
    if isinstance(x, np.ndarray):
        return (x.view(np.uint64) >> np.uint64(shift)).view(np.int64)
    if shift == 0:
        return x
    return (x >> shift) & (2 ** (64 - shift) - 1)


def _in_parts(xp: Any, count: int, make: Callable[[int, int], Array]) -> Array:
    """``count`` float64 of ``make(first, size)``: in NumPy by parts that a processor's cache holds."""
    size = _BLOCK if xp is np else max(1, count)
    parts = [make(first, min(size, count - first)) for first in range(0, max(1, count), size)]
    return parts[0] if len(parts) == 1 else xp.concatenate(parts)


def float64(xp: Any, x: Array) -> Array:
    """``x`` in float64."""
    return x.to(xp.float64) if hasattr(x, "to") and xp.__name__ == "torch" else x.astype(xp.float64)


def uniform(xp: Any, seed: int, stream: int, shape: tuple[int, ...]) -> Array:
    """float64 in [0, 1), multiples of 2**-53."""

    def make(first: int, size: int) -> Array:
        return float64(xp, shifted(hashed(xp, seed, stream, size, first), 11)) * 2.0**-53

    return _in_parts(xp, math.prod(shape), make).reshape(shape)


def normal(xp: Any, seed: int, stream: int, shape: tuple[int, ...]) -> Array:
    """float64, close to N(0, 1): the sum of twelve 16-bit uniforms (Irwin-Hall), multiples of 2**-16 within +-6."""
    count = math.prod(shape)

    def make(first: int, size: int) -> Array:
        words = (hashed(xp, seed, stream, size, first + n * count) for n in range(3))
        total = sum(shifted(word, shift) & 0xFFFF for word in words for shift in (0, 16, 32, 48))
        return float64(xp, total - 6 * 0xFFFF) * 2.0**-16

    return _in_parts(xp, count, make).reshape(shape)


def rounded(x: Array, dtype: str) -> Array:
    """float64 values rounded to the precision of ``dtype`` (Dekker's splitting), so that the cast to it is exact."""
    bits = _PRECISION[dtype]
    if bits == 53:
        return x
    if dtype == "float16":  # its subnormals are multiples of 2**-24, which adding and subtracting 1.5 * 2**28 leaves
        x = (x + 1.5 * 2.0**28) - 1.5 * 2.0**28
    c = x * (2.0 ** (53 - bits) + 1.0)
    return c - (c - x)
