"""Which heads a rank computes, where ranks trade rows for heads."""

from __future__ import annotations

from math import gcd

__all__ = ["key_heads", "query_heads"]


def query_heads(count: int, ranks: int, rank: int) -> range:
    """Those of ``count`` query heads that ``rank`` computes; ``ranks`` divide them."""
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def key_heads(heads_q: int, heads_kv: int, ranks: int, rank: int) -> list[int]:
    """The key head of every so many query heads of ``rank``, on all ranks of as many, so that they choose alike.

    Where a group ends among these, its key head comes more than once: 12 heads on 2 over 3 ranks are 0 0, 0 1, 1 1.
    """
    group, mine = heads_q // heads_kv, query_heads(heads_q, ranks, rank)
    return [head // group for head in mine[:: gcd(group, len(mine))]]
