"""The tree of a case as the bits that ``attention_paged`` takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch import sequences

__all__ = ["bits"]


def bits(case: Case, mask: Any) -> Any:
    """Bytes (B, Lq, W), or (T, W) of packed queries, that stand for ``mask`` (B, 1, Lq, Lk).

    Bits that mean nothing are drawn: of queries that a sequence does not have, of keys that there are not.
    """
    rng = np.random.default_rng(case.data_seed)
    width = -(-case.seq_q // 8) + case.data_seed % 2
    rows = sequences.rows(case, "query") if case.varlen else case.batch * case.seq_q
    seen = rng.random((rows, 8 * width)) < 0.5
    begin = 0
    for b, length in enumerate(case.lengths or ()):
        queries = case.seq_q if case.query_lengths is None else case.query_lengths[b]
        few = min(queries, length)
        own = slice(queries - few, queries)
        seen[begin : begin + queries, own] = mask[b, 0, :queries, length - few : length]
        begin += queries
    packed = np.packbits(seen, axis=-1, bitorder="little")
    return packed if case.varlen else packed.reshape(case.batch, case.seq_q, width)
