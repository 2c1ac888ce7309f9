"""``Split``: ranks that trade rows for heads within groups, and pass keys round a ring of groups; and its two ends.

With all ranks in one group it is all-to-all (Jacobs et al., "DeepSpeed Ulysses", 2023), with one rank in each a ring
(Liu, Zaharia and Abbeel, "Ring Attention", 2023), in between a hybrid of both (Fang and Zhao, "USP", 2024). What is
counted here are calls, bytes sent and bytes held; ``ranks`` makes times of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from attnswitch.parallel.dealing import Dealing, Order
from attnswitch.parallel.heads import key_heads
from attnswitch.parallel.pieces import Band, pieces
from attnswitch.problem import DTYPES, Problem, cost
from attnswitch.problem.cost import STATISTIC

__all__ = ["Split"]

#: Bytes of an element of a sum over parts: float32, and float64 beside operands of that.
_SUM = 4
#: Passes over the sums of a piece's rows by which it is merged; and, in elements of sums and operands, what adding
#: gradients costs: the operand is read, the sum is read and written.
_MERGED, _ADDED = 5, 2
#: Messages in the memory of a rank at once: what it computes with or sends, and what arrives; of gradients, which are
#: summed on the way, also those that it makes.
_HELD, _HELD_SUMS = 2, 3
#: What a rank holds.
_ITEMS = ("operands", "results", "gradients", "gathered", "messages", "accumulators", "parts", "kernels")


@dataclass(frozen=True)
class Split:
    """``problem`` over ``ranks`` of which each ``heads_over`` trade heads, and rows are dealt in ``order``."""

    problem: Problem
    ranks: int
    heads_over: int
    order: Order

    @property
    def ring(self) -> int:
        """How many groups there are, round which keys and values go."""
        return self.ranks // self.heads_over

    @property
    def name(self) -> str:
        """``ring``, ``all-to-all``, or how many ranks do which."""
        if self.heads_over == 1:
            return "ring"
        return "all-to-all" if self.ring == 1 else f"{self.heads_over} all-to-all x {self.ring} ring"

    @property
    def why_not(self) -> str:
        """Why it cannot be, or nothing."""
        p = self.problem
        if p.heads_q % self.heads_over:
            return f"{p.heads_q} query heads are not dealt evenly over {self.heads_over} ranks"
        if self.ring > 1 and p.alibi:
            return "alibi_slopes in a ring: parts count distances from their own corner"
        if self.ring > 1 and p.key_lengths and p.positional and p.bottom_right:
            return "bottom_right with key_lengths in a ring: every batch entry would be cut at other rows"
        return ""

    @cached_property
    def local(self) -> Problem:
        """The heads that a rank computes, of the whole sequence."""
        p = self.problem
        mine = key_heads(p.heads_q, p.heads_kv, self.heads_over, 0)  # on all ranks as many
        return p.replace(heads_q=p.heads_q // self.heads_over, heads_kv=len(mine))

    @cached_property
    def _dealt(self) -> tuple[Dealing, Dealing]:
        return Dealing(self.problem.seq_q, self.ring, self.order), Dealing(self.problem.seq_k, self.ring, self.order)

    @cached_property
    def held(self) -> tuple[int, int]:
        """Rows of queries and of keys that a rank computes with, the most that any has."""
        queries, keys = self._dealt
        return max(map(queries.rows, range(self.ring))), max(map(keys.rows, range(self.ring)))

    @cached_property
    def rows(self) -> tuple[int, int]:
        """Rows of queries and of keys that a rank holds between calls, the most that any has."""
        lengths = self.problem.seq_q, self.problem.seq_k
        dealt = [Dealing(length, self.ranks, self.order) for length in lengths]
        return max(map(dealt[0].rows, range(self.ranks))), max(map(dealt[1].rows, range(self.ranks)))

    def calls(self, rank: int, owner: int) -> Iterator[Problem]:
        """What group ``rank`` computes of the keys of group ``owner``."""
        p = self.local
        if self.ring == 1:
            yield p
            return
        queries, keys = self._dealt
        offset = p.seq_k - p.seq_q if p.bottom_right else 0
        apart = p.mask is not None or p.key_lengths
        band = Band.of(p.causal, p.window, offset)
        for piece in pieces(queries.held(rank), keys.held(owner), band, apart=apart):
            yield p.replace(
                seq_q=len(piece.rows),
                seq_k=len(piece.keys),
                causal=piece.causal,
                window=piece.window,
                alignment="top_left",
                sinks=False,
            )

    def full(self, rows: int) -> Problem:
        """A call of the ring between ``rows`` queries and as many keys of another rank, as most steps have it.

        Causal rows in zigzag see half of them.
        """
        p = self.local
        half = p.causal and self.order == "zigzag"
        return p.replace(
            seq_q=rows,
            seq_k=-(-rows // 2) if half else rows,
            causal=False,
            window=None,
            alignment="top_left",
            sinks=False,
        )

    def message(self, rows: int) -> int:
        """Bytes of ``rows`` keys and values on their way round the ring."""
        return cost.kv_bytes(self.local.replace(seq_k=rows, mask=None))

    def sums(self, rows: int) -> int:
        """Bytes of the sums of their gradients."""
        return self.message(rows) // self.local.element("key") * self._sum

    @property
    def _sum(self) -> int:
        return max(_SUM, DTYPES[self.problem.dtype])

    @cached_property
    def exchanged(self) -> tuple[int, int]:
        """Bytes that a rank sends to trade query, key and value for its heads, and to trade the output back."""
        p, (rows, keys), others = self.problem, self.rows, self.heads_over - 1
        item = DTYPES[p.dtype]
        queries = p.batch * (p.heads_q // self.heads_over) * rows * others
        sent = p.batch * self.local.heads_kv * keys * others * (p.dim_qk + p.dim_v)
        return (queries * p.dim_qk + sent) * item, queries * p.dim_v * item

    def merging(self, call: Problem) -> int:
        """Bytes moved in device memory to add the result of a piece to those before it."""
        return 0 if self.ring == 1 else _MERGED * cost.rows(call) * call.dim_v * self._sum

    def adding(self, call: Problem) -> int:
        """Bytes moved in device memory to add the gradients of a piece to the sums."""
        if self.ring == 1:
            return 0
        elements = cost.rows(call) * call.dim_qk + call.batch * call.heads_kv * call.seq_k * (call.dim_qk + call.dim_v)
        copied = 2 * cost.rows(call) * call.dim_v  # the rows of output and upstream gradient, cut out
        return elements * (_ADDED * self._sum + DTYPES[call.dtype]) + 2 * copied * DTYPES[call.dtype]

    def memory(self, *, backward: bool, kernels: int = 0) -> dict[str, int]:
        """Bytes that a rank holds at the fullest moment of the forward or of the backward, by what they are.

        operands: query, key and value, and the mask. results: output and lse. gradients: those of the output and of the
        operands. gathered: all of these again, for the rank's heads and the rows of its group, and what is packed to be
        sent. messages: keys and values on their way, gradients with them. accumulators: sums over parts. parts: what
        one call of a ring returns, and what cutting its rows out takes for a while. ``kernels``: what a call holds
        beside operands and results.
        """
        moments = self._moments_back(kernels) if backward else self._moments(kernels)
        return dict.fromkeys(_ITEMS, 0) | max(moments, key=lambda items: sum(items.values()))

    def _moments(self, kernels: int) -> Iterator[dict[str, int]]:
        """What is held while it computes, while operands are traded, and while the output is."""
        operands, out, lse = self._bytes(self.problem, *self.rows)
        held = {"operands": operands + cost.mask_bytes(self.problem)}
        mine, part, statistic = self._bytes(self.local, *self.held)
        there, back = self._packed
        if self.ring > 1:
            yield held | {
                "gathered": mine if there else 0,
                "messages": min(_HELD, self.ring - 1) * self.message(self.held[1]),
                "accumulators": part // DTYPES[self.problem.dtype] * self._sum + statistic,
                "parts": part + statistic,
                "kernels": kernels,
            }
        else:
            yield held | {"gathered": mine if there else 0, "results": part + statistic, "kernels": kernels}
        if there:
            yield held | {"gathered": there + max(there, mine)}
            yield held | {"gathered": mine + part + statistic + back, "results": out + lse}

    def _moments_back(self, kernels: int) -> Iterator[dict[str, int]]:
        """What is held while it computes, while the output's gradient is traded, and while those of operands are."""
        operands, out, lse = self._bytes(self.problem, *self.rows)
        held = {"operands": operands + cost.mask_bytes(self.problem), "results": out + lse, "gradients": out}
        p = self.local
        mine, part, statistic = self._bytes(p, *self.held)
        there, back = self._packed
        saved = mine + part + statistic if there else 0
        if self.ring > 1:
            sums = self.sums(self.held[1])
            yield held | {
                "gathered": saved + (part if there else 0),
                "messages": min(_HELD, self.ring - 1) * self.message(self.held[1]) + _HELD_SUMS * sums,
                "accumulators": p.batch * p.heads_q * self.held[0] * p.dim_qk * self._sum,
                "parts": max(map(self._returned, {0, self.ring - 1})),
                "kernels": kernels,
            }
        elif there:
            yield held | {"gathered": saved + part + mine, "kernels": kernels}
        else:
            yield held | {"gradients": out + operands, "kernels": kernels}
        if there:
            yield held | {"gathered": saved + 2 * back}
            yield held | {"gathered": mine + 2 * there}

    def _bytes(self, p: Problem, queries: int, keys: int) -> tuple[int, int, int]:
        """Of the operands, the output and the lse of so many rows."""
        item, lse = DTYPES[p.dtype], max(STATISTIC, DTYPES[p.dtype])
        rows, others = p.batch * p.heads_q * queries, p.batch * p.heads_kv * keys
        return (rows * p.dim_qk + others * (p.dim_qk + p.dim_v)) * item, rows * p.dim_v * item, rows * lse

    @property
    def _packed(self) -> tuple[int, int]:
        """Bytes of what is traded at once, what a rank keeps with what it sends: operands, and the output."""
        there, back = (n * self.heads_over // max(1, self.heads_over - 1) for n in self.exchanged)
        return there, back

    def _returned(self, rank: int) -> int:
        """Bytes of the gradients that a call returns to ``rank``, and of the rows that are cut out for it, at most."""
        most = 0
        for owner in range(self.ring):
            for call in self.calls(rank, owner):
                operands, out, _ = self._bytes(call, call.seq_q, call.seq_k)
                most = max(most, operands + (2 * out if call.seq_q < self.held[0] else 0))
        return most
