"""``Split``: ranks that trade rows for heads within groups, and pass keys round a ring of groups; and its two ends.

With all ranks in one group it is all-to-all (Jacobs et al., "DeepSpeed Ulysses", 2023), with one rank in each a ring
(Liu, Zaharia and Abbeel, "Ring Attention", 2023), in between a hybrid of both (Fang and Zhao, "USP", 2024). What is
counted here are calls, bytes sent and bytes held; ``ranks`` makes times of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from attnswitch.parallel.dealing import Dealing, Order
from attnswitch.parallel.pieces import Band, pieces
from attnswitch.problem import DTYPES, Problem, cost
from attnswitch.problem.cost import STATISTIC

__all__ = ["Split", "key_heads"]

#: Bytes of an element of a sum over parts: float32, and float64 beside operands of that.
_SUM = 4
#: Passes over the sums of a piece's rows by which it is merged; and, in elements of sums and operands, what adding
#: gradients costs: the operand is read, the sum is read and written.
_MERGED, _ADDED = 5, 2
#: Messages in the memory of a rank at once: what it computes with or sends, and what arrives; of gradients, which are
#: summed on the way, also those that it makes.
_HELD, _HELD_SUMS = 2, 3


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
        heads = key_heads(p.heads_q, p.heads_kv, self.heads_over)
        return p.replace(heads_q=p.heads_q // self.heads_over, heads_kv=heads)

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

    def memory(self, *, backward: bool) -> dict[str, int]:
        """Bytes that a rank holds at most, in the forward or in the backward, by what they are.

        operands: query, key and value, and the mask. results: output and lse. gradients: those of the output and of the
        operands. gathered: all of these again, for the rank's heads and the rows of its group, and what is packed to be
        sent. messages: keys and values on their way, gradients with them. accumulators: sums over parts. parts: what
        one call of a ring returns, and what cutting its rows out takes for a while.
        """
        p, (rows, keys), (most, far), item = self.problem, self.rows, self.held, DTYPES[self.problem.dtype]
        lse = STATISTIC if item < 8 else item

        def bytes_of(heads_q: int, heads_kv: int, some: int, other: int) -> tuple[int, int, int]:
            q, kv = p.batch * heads_q * some, p.batch * heads_kv * other * (p.dim_qk + p.dim_v)
            operands, out = (q * p.dim_qk + kv) * item, q * p.dim_v * item
            return operands, out + q * lse, operands + out

        operands, results, gradients = bytes_of(p.heads_q, p.heads_kv, rows, keys)
        found = {"operands": operands + cost.mask_bytes(p), "results": results}
        found["gradients"] = gradients if backward else 0
        mine = bytes_of(self.local.heads_q, self.local.heads_kv, most, far)
        found["gathered"] = 0
        if self.heads_over > 1:
            packed = 2 * max(self.exchanged) * self.heads_over // (self.heads_over - 1)
            found["gathered"] = packed + sum(mine[: 3 if backward else 2])
        found |= {"messages": 0, "accumulators": 0}
        queries = p.batch * self.local.heads_q * most
        if self.ring > 1:
            sums = self.sums(far) if backward else 0
            found["messages"] = _HELD * self.message(far) + _HELD_SUMS * sums
            found["accumulators"] = queries * (p.dim_qk * self._sum if backward else p.dim_v * self._sum + lse)
        found["parts"] = 0
        if self.ring > 1:
            copied = 2 * queries * p.dim_v * item
            found["parts"] = mine[0] + copied if backward else mine[1]
        return found


def key_heads(heads_q: int, heads_kv: int, ranks: int) -> int:
    """The most key heads that a rank gets: those of the groups that its query heads are of.

    Where these have unlike numbers of its query heads, each query head brings its own.
    """
    count, group = heads_q // ranks, heads_q // heads_kv
    return max(_brought(range(rank * count, (rank + 1) * count), group) for rank in range(ranks))


def _brought(heads: range, group: int) -> int:
    shares = set(Counter(head // group for head in heads).values())
    return len(heads) // shares.pop() if len(shares) == 1 else len(heads)
