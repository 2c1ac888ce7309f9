"""Sequences that lie one after another (``Problem.varlen``), as ``src/sequences.cuh`` has them."""

from __future__ import annotations

from attnswitch.problem import Problem

from ...own.arithmetic import PADDING

__all__ = ["launched", "saved_rows"]


def launched(p: Problem) -> Problem:
    """The problem whose grid is launched: with varlen, one entry more, which has the rows past the last sequence.

    It has a tile where no sequence has a query, or a key, since there may be such rows then, too.
    """
    if not p.varlen:
        return p
    return p.replace(batch=p.batch + 1, seq_q=max(1, p.seq_q), seq_k=max(p.page, 1, p.seq_k))


def saved_rows(rows: int, sequences: int) -> int:
    """Rows of a head in what the backward keeps of ``rows``: whole tiles for each sequence, however long they are."""
    return (rows // PADDING + sequences) * PADDING if sequences else 0
