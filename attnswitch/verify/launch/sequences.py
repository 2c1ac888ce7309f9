"""Sequences of a case one after another, as ``attention_varlen`` takes them, and its results padded again.

A case holds its sequences padded, (B, H, L, D), whose rows past a length no result may depend on.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.verify.drawing.case import Case

__all__ = ["OF_KEYS", "joined", "offsets", "padded", "rows"]

#: What has a row for each key; all else has one for each query.
OF_KEYS = ("key", "value", "grad key", "grad value")
#: Rows past the last sequence, at most.
_PAST = 3


def offsets(case: Case, role: str) -> list[int]:
    """Where the sequences of ``role`` begin, and where the last one ends."""
    lengths = (case.lengths if role in OF_KEYS else case.query_lengths) or ()
    return [0, *itertools.accumulate(lengths)]


def rows(case: Case, role: str) -> int:
    """Rows of ``role``: of its sequences, and some past the last."""
    return offsets(case, role)[-1] + case.data_seed % (_PAST + 1)


def joined(case: Case, role: str, values: Array) -> Array:
    """``values`` (B, H, L, ...) without their padding, (1, H, T, ...); NaN past the last sequence."""
    edges = offsets(case, role)
    found = np.full((1, values.shape[1], rows(case, role), *values.shape[3:]), math.nan)
    for b, (begin, end) in enumerate(itertools.pairwise(edges)):
        found[0, :, begin:end] = values[b, :, : end - begin]
    return found


def padded(case: Case, name: str, result: Any) -> Any:
    """A result (T, H, D), or an lse (H, T), as (B, H, L, ...): rows of no sequence are 0, in an lse -inf.

    Raises ``ValueError`` where rows past the last sequence are not.
    """
    of_lse = name == "lse"
    edges, longest = offsets(case, name), case.seq_k if name in OF_KEYS else case.seq_q
    result = result if of_lse else result.swapaxes(0, 1)
    filled = -math.inf if of_lse else 0.0
    if not bool((result[:, edges[-1] :] == filled).all()):
        raise ValueError(f"{name}: rows past the last sequence are not {filled}")
    heads, _, *columns = result.shape
    shape = (case.batch, heads, longest, *columns)
    if arrays.library_of(result) == "torch":
        found = result.new_full(shape, filled)
    else:
        found = sys.modules[arrays.library_of(result)].full(shape, filled, result.dtype)
    for b, (begin, end) in enumerate(itertools.pairwise(edges)):
        found[b, :, : end - begin] = result[:, begin:end]
    return found
