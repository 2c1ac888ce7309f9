"""All-to-all attention: ranks trade rows for heads, and each computes whole sequences of the heads that it gets.

One exchange before attention and one after; gradients go the same way back. Method: Jacobs et al., "DeepSpeed Ulysses"
(2023). Query heads are dealt evenly. A key head goes to every rank that has a query head of its group (heads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import distributed as dist

from attnswitch.parallel import heads
from attnswitch.parallel.dealing import Dealing

__all__ = ["AllToAll"]


class AllToAll:
    """The way of a call in which ``group`` trades rows for heads."""

    def __init__(self, queries: Dealing, keys: Dealing, rank: int, heads: tuple[int, int], group: Any) -> None:
        self.queries, self.keys, self.rank, self.group = queries, keys, rank, group
        self.ranks = queries.ranks
        self.heads_q, self.heads_kv = heads

    def heads(self, rank: int) -> range:
        """The query heads that ``rank`` computes."""
        return heads.query_heads(self.heads_q, self.ranks, rank)

    def key_heads(self, rank: int) -> Sequence[int]:
        """The key heads that ``rank`` gets, of which each serves as many of its query heads."""
        return heads.key_heads(self.heads_q, self.heads_kv, self.ranks, rank)

    def attend(
        self, query: Any, key: Any, value: Any, compute: Callable[[Any, Any, Any], tuple[Any, Any]], with_lse: bool
    ) -> tuple[Any, Any]:
        """Output and lse (or None) of this rank's rows, (B, H, L, D): ``compute`` has whole rows of its heads.

        Where it fails on one rank, the others, who would wait for it, get NaN of its heads.
        """
        whole = self.there(query, key, value)
        failed: Exception | None = None
        try:
            out, lse = compute(*whole)
        except Exception as error:
            failed = error
            rows, dtype = whole[0].shape[:3], torch.promote_types(query.dtype, torch.float32)
            out = query.new_full((*rows, value.shape[3]), torch.nan)
            lse = query.new_full(rows, torch.nan, dtype=dtype) if with_lse else None
        back = [self.back(x) for x in ([out] if lse is None else [out, lse[..., None]])]
        if failed is not None:
            raise failed
        return back[0], None if lse is None else back[1][..., 0]

    def there(self, query: Any, key: Any, value: Any) -> list[Any]:
        """Whole rows of this rank's heads, of this rank's rows of all heads."""
        ranks, dealt = range(self.ranks), (self.queries, self.keys, self.keys)
        sent = [
            [_heads(query, self.heads(n)), _heads(key, self.key_heads(n)), _heads(value, self.key_heads(n))]
            for n in ranks
        ]
        shapes = [
            [(*x.shape[:2], d.rows(n), x.shape[3]) for x, d in zip(sent[self.rank], dealt, strict=True)] for n in ranks
        ]
        arrived = self.exchange(sent, shapes)
        return [_in_order(list(parts), d) for parts, d in zip(zip(*arrived, strict=True), dealt, strict=True)]

    def back(self, array: Any) -> Any:
        """Whole rows of this rank's heads as this rank's rows of all heads."""
        sent = [[_rows(array, self.queries, n)] for n in range(self.ranks)]
        mine = (*array.shape[:2], self.queries.rows(self.rank), array.shape[3])
        return torch.cat([x for (x,) in self.exchange(sent, [[mine]] * self.ranks)], 1)

    def exchange(self, sent: Sequence[Sequence[Any]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Any]]:
        """``sent[n]`` goes to rank n; from each comes what has ``shapes[n]``."""
        out = [sum(x.numel() for x in group) for group in sent]
        into = [sum(map(prod, group)) for group in shapes]
        flat = torch.cat([x.reshape(-1) for group in sent for x in group])
        received = _Traded.apply(flat, into, out, self.group)
        return [
            [x.view(shape) for x, shape in zip(part.split([*map(prod, group)]), group, strict=True)]
            for part, group in zip(received.split(into), shapes, strict=True)
        ]


class _Traded(torch.autograd.Function):
    """``dist.all_to_all_single``; gradients go back the way that their elements came.

    Of torch's own with a gradient one is deprecated and the other private.
    """

    @staticmethod
    def forward(ctx: Any, flat: Any, into: list[int], out: list[int], group: Any) -> Any:
        ctx.way = out, into, group
        received = flat.new_empty(sum(into))
        dist.all_to_all_single(received, flat, into, out, group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Traded.apply(grad.contiguous(), *ctx.way), None, None, None


def _heads(array: Any, which: Sequence[int]) -> Any:
    if [*which] == [*range(which[0], which[-1] + 1)]:
        return array[:, which[0] : which[-1] + 1]
    return array.index_select(1, torch.tensor([*which], device=array.device))


def _rows(array: Any, dealt: Dealing, rank: int) -> Any:
    """The rows of ``rank``, of all."""
    parts = [array[:, :, part.start : part.stop] for part in dealt.held(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else array[:, :, :0]


def _in_order(parts: list[Any], dealt: Dealing) -> Any:
    """All rows by their position, of what each rank has."""
    pieces = []
    for rank, array in enumerate(parts):
        ranges = dealt.held(rank)
        for part, rows in zip(ranges, array.split([*map(len, ranges)], 2), strict=True) if ranges else ():
            pieces.append((part.start, rows))
    return torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])], 2) if pieces else parts[0]
