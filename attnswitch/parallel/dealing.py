"""``Dealing``: which rows of a sequence each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of, shown
from attnswitch.parallel import Method

__all__ = ["ORDERS", "USUAL", "Dealing", "Order"]

Order = Literal["zigzag", "contiguous"]
ORDERS: tuple[Order, ...] = get_args(Order)
#: What each way deals by, unless it is told otherwise.
USUAL: dict[Method, Order] = {"ring": "zigzag", "all-to-all": "contiguous"}


@dataclass(frozen=True, slots=True)
class Dealing:
    """A sequence of ``length`` rows, dealt among ``ranks``.

    "contiguous": rank r holds the r-th of n parts. "zigzag": the r-th part of 2n and the r-th from the end, so that
    under a causal mask every rank has as much to compute. Parts differ by one row at most, and may be empty.
    """

    length: int
    ranks: int
    order: Order = "zigzag"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InvalidProblem(f"order={shown(self.order)}: {one_of(self.order, ORDERS)}")
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise InvalidProblem(f"length={shown(self.length)}: expected the rows of the whole sequence")

    def held(self, rank: int) -> tuple[range, ...]:
        """The positions of ``rank`` in ascending order, as ranges that are neither empty nor touch one another."""
        count = self.ranks if self.order == "contiguous" else 2 * self.ranks
        numbers = (rank,) if self.order == "contiguous" else (rank, count - 1 - rank)
        return tuple(_joined(range(self.length * n // count, self.length * (n + 1) // count) for n in numbers))

    def rows(self, rank: int) -> int:
        """How many rows ``rank`` holds."""
        return sum(map(len, self.held(rank)))

    def positions(self) -> list[int]:
        """The position of each row, where the ranks' rows lie one after another."""
        return [position for rank in range(self.ranks) for part in self.held(rank) for position in part]


def _joined(parts: Iterator[range]) -> Iterator[range]:
    last = range(0)
    for part in parts:
        if last and part and last.stop == part.start:
            last = range(last.start, part.stop)
        elif part:
            if last:
                yield last
            last = part
    if last:
        yield last
