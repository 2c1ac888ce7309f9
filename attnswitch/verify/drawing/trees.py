"""Trees of queries over a cache in pages, as the mask that their bits stand for."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.verify.drawing.case import Case

__all__ = ["TREE_KINDS", "mask"]

#: What a query sees of the keys of the queries: those on its way to the root of a drawn tree, and its own; any; none.
TREE_KINDS = ("ancestors", "random", "none")
_SHARES = {"random": 0.6, "none": 0.0}


def mask(case: Case, draws: Any) -> Any:
    """Which keys each query sees by the tree of ``case``, (B, 1, Lq, Lk): all that are older than the queries.

    ``draws`` (B, Lq, Lq) are from [0, 1).
    """
    batch, _, lq, lk = case.scores
    own = _ancestors(draws) if case.tree == "ancestors" else draws < _SHARES[case.tree]
    seen = np.ones((batch, 1, lq, lk), bool)
    for b, length in enumerate(case.lengths or ()):
        queries = lq if case.query_lengths is None else case.query_lengths[b]
        few = min(queries, length)
        seen[b, 0, :, length - few : length] = own[b, :, queries - few : queries]
    return seen


def _ancestors(draws: Any) -> Any:
    """Of trees whose query t hangs on an earlier one."""
    seen = np.zeros(draws.shape, bool)
    for t in range(draws.shape[1]):
        for b in range(len(draws)):
            if t:
                seen[b, t] = seen[b, int(draws[b, t, 0] * t)]
            seen[b, t, t] = True
    return seen
