"""The bits of a tree of queries as the mask that they stand for."""

from __future__ import annotations

import sys
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.problem import Problem

__all__ = ["as_mask", "mask_bytes"]


def as_mask(bits: Array, keys: int) -> Array:
    """Which of so many keys the queries of one sequence see, (1, 1, Lq, keys), from ``bits`` (1, Lq, W).

    Their own keys are the last; where there are fewer keys than queries, the first queries have none.
    """
    library = arrays.library_of(bits)
    xp: Any = sys.modules[library]
    queries = bits.shape[1]
    if library == "torch":
        places = xp.arange(8, dtype=bits.dtype, device=bits.device)
        seen = (bits[..., None] >> places & 1).flatten(-2)[..., :queries].bool()
        mask = seen.new_ones(1, 1, queries, keys)
    else:
        seen = xp.unpackbits(bits, axis=-1, bitorder="little")[..., :queries].astype(bool)
        mask = xp.ones((1, 1, queries, keys), bool)
    own = min(queries, keys)
    mask[..., keys - own :] = seen[:, None, :, queries - own :]
    return mask


def mask_bytes(problem: Problem) -> int:
    """Bytes of the mask of the longest sequence of ``problem``, 0 where it has no tree."""
    return problem.seq_q * problem.seq_k if problem.tree else 0
