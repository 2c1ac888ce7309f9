"""Ring attention: queries stay, keys and values of all ranks come by, and in the backward their gradients with them.

Each rank computes attention over what it has at hand while the next keys arrive, and merges the parts by their lse.
The backward goes round once more, with the output and lse of all keys. Method: Liu, Zaharia and Abbeel, "Ring
Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from attnswitch.parallel.call import Call

__all__ = ["Ring", "attend"]


def attend(ring: Ring, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Output and lse of this rank's queries, (B, H, L, Dv) and (B, H, L); differentiable."""
    both: tuple[Any, Any] = _Attention.apply(query, key, value, ring)
    return both


class Ring:
    """The way of one call round the ranks of ``group``."""

    def __init__(self, call: Call, group: Any, sinks: Any = None) -> None:
        self.call, self.group, self.sinks = call, group, sinks
        self.rank, self.ranks = call.rank, call.keys.ranks

    def forward(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Output and lse of this rank's queries."""
        wide = _wide(query.dtype)
        out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=wide, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=wide, device=query.device)
        failed: Exception | None = None
        for owner, (keys, values) in self.passing((key, value)):
            try:
                for piece in self.call.pieces(owner) if failed is None else ():
                    self.merge(out, lse, piece.rows, *self.call.attend(piece, owner, query, keys, values))
            except Exception as error:  # others wait for what this rank passes on
                failed = error
        if failed is not None:
            raise failed
        if self.sinks is not None:  # a part of its own, of keys whose value is 0
            self.merge(out, lse, range(query.shape[2]), torch.zeros_like(out), self.sunk(lse))
        return out.to(query.dtype), lse

    def sunk(self, lse: Any) -> Any:
        """The lse of the sinks alone; rows past the last packed sequence see none."""
        alone = self.sinks.to(lse.dtype)[:, None].expand(lse.shape).clone()
        if self.call.cu_seqlens:
            at = 0
            for part in self.call.queries.held(self.rank):
                alone[:, :, at + max(0, self.call.cu_seqlens[-1] - part.start) : at + len(part)] = -torch.inf
                at += len(part)
        return alone

    def merge(self, out: Any, lse: Any, rows: range, part: Any, part_lse: Any) -> None:
        """Add what ``rows`` see of more keys to ``out`` and ``lse``, which are float32 or float64."""
        some, seen = out[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop]
        both = torch.logaddexp(seen, part_lse)
        # Each share by itself: of a part that weighs next to nothing, 1 - share would have no digits.
        before, share = (torch.where(both == -torch.inf, 0.0, torch.exp(x - both))[..., None] for x in (seen, part_lse))
        some.mul_(before).addcmul_(part, share)
        seen.copy_(both)

    def backward(
        self, operands: Sequence[Any], results: Sequence[Any], upstream: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Gradients of what this rank holds of query, key and value, from ``results`` of all keys.

        A sum of gradients follows its keys from rank to rank, one step behind them, and ends with their owner. Where
        this rank fails, others have NaN of the keys that it owed a share of: nobody is to go on with half a sum.
        """
        query, key, value = operands
        wide = _wide(query.dtype)
        of_query = torch.zeros_like(query, dtype=wide)
        arriving: _Message | None = None
        failed: Exception | None = None
        for owner, held in self.passing((key, value)):
            grads = [torch.zeros_like(x, dtype=wide) for x in held]
            try:
                for piece in self.call.pieces(owner) if failed is None else ():
                    found = self.call.differentiate(piece, owner, (query, *held), results, upstream)
                    for into, grad, rows in zip(
                        (of_query, *grads), found, (piece.rows, piece.keys, piece.keys), strict=True
                    ):
                        into[:, :, rows.start : rows.stop] += grad
            except Exception as error:  # as in the forward
                failed = error
            if failed is not None:
                grads = [grad.fill_(torch.nan) for grad in grads]
            if arriving is not None:
                grads = [grad.add_(sums) for grad, sums in zip(grads, arriving.take(), strict=True)]
            if self.ranks > 1:
                arriving = self.send(grads, self.rank - 1 - self.step(owner))
        if arriving is not None:
            grads = arriving.take()
        if failed is not None:
            raise failed
        return of_query.to(query.dtype), grads[0].to(key.dtype), grads[1].to(value.dtype)

    def step(self, owner: int) -> int:
        """How many steps after the first the keys of ``owner`` are here."""
        return (self.rank - owner) % self.ranks

    def passing(self, tensors: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """What each rank holds of ``tensors``, (B, H, L, D), beginning with this one. The next arrives meanwhile."""
        held: Sequence[Any] = [x.contiguous() for x in tensors]
        for step in range(self.ranks):
            owner, message = (self.rank - step) % self.ranks, None
            if step + 1 < self.ranks:
                message = self.send(held, owner - 1)
            yield owner, held
            if message is not None:
                held = message.take()

    def send(self, tensors: Sequence[Any], owner: int) -> _Message:
        """Pass ``tensors`` on to the next rank, and receive the like for the keys of ``owner`` from the one before."""
        rows = self.call.keys.rows(owner % self.ranks)
        received = [x.new_empty((*x.shape[:2], rows, x.shape[3])) for x in tensors]
        after, before = (dist.get_global_rank(self.group, (self.rank + n) % self.ranks) for n in (1, self.ranks - 1))
        sent = [dist.P2POp(dist.isend, x, after, self.group) for x in tensors if x.numel()]
        taken = [dist.P2POp(dist.irecv, x, before, self.group) for x in received if x.numel()]
        operations = [*sent, *taken]
        return _Message(dist.batch_isend_irecv(operations) if operations else [], tensors, received)


class _Message:
    """Tensors on their way. Those that were sent are held until they are there."""

    def __init__(self, works: Sequence[Any], sent: Sequence[Any], received: list[Any]) -> None:
        self._works, self._sent, self._received = works, sent, received

    def take(self) -> list[Any]:
        """What arrives, once it has."""
        for work in self._works:
            work.wait()
        self._sent = ()
        return self._received


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, ring: Ring) -> tuple[Any, Any]:
        ctx.ring = ring
        operands = query.detach(), key.detach(), value.detach()
        out, lse = ring.forward(*operands)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        *operands, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = ctx.ring.backward([x.detach() for x in operands], (out, lse), (grad_out, grad_lse))
        return *grads, None


def _wide(dtype: Any) -> Any:
    return torch.float64 if dtype == torch.float64 else torch.float32
