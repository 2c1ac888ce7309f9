"""The dropout mask that a seed means: Philox4x32-7, counted by position, the same in every backend.

Element (b, h, i, j) is kept when the high 23 bits of word ``j % 4`` of Philox(counter = (j // 4, i, h, b), key = seed)
are at least p * 2**23: as many bits as make a float32 from 1 to 2, with which a kernel need not compare integers. The
generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011); seven rounds,
which FlashAttention-2 takes too, are the fewest that pass all of BigCrush there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BITS", "ROUNDS", "keep_mask", "philox4x32"]

ROUNDS = 7
#: Bits of a word that decide, from the highest: p is rounded to a multiple of 2**-BITS.
BITS = 23
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[int, int],
    rounds: int = ROUNDS,
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Philox4x32: four 32-bit words (held in uint64) for each broadcast element of ``counter``."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(
    seed: int, p: float, batch: npt.ArrayLike, head: npt.ArrayLike, rows: npt.ArrayLike, first_key: int, keys: int
) -> npt.NDArray[np.bool_]:
    """Which weights are kept: indices broadcast together, and ``keys`` keys from ``first_key`` are the last axis."""
    block = np.arange(first_key // 4, -(-(first_key + keys) // 4) if keys else first_key // 4, dtype=np.uint64)
    b, h, i = (np.asarray(index, dtype=np.uint64)[..., None] for index in (batch, head, rows))
    words = np.stack(np.broadcast_arrays(*philox4x32((block, i, h, b), (seed & 0xFFFFFFFF, seed >> 32))), axis=-1)
    flat = words.reshape(*words.shape[:-2], 4 * len(block))
    skip = first_key % 4
    high = flat[..., skip : skip + keys] >> np.uint64(32 - BITS)
    kept: npt.NDArray[np.bool_] = high >= np.uint64(round(p * 2**BITS))
    return kept
