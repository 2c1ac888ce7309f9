"""``Task``: what all ranks are to compute; ``Answer``: what one of them says to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnswitch.parallel import Method
from attnswitch.parallel.dealing import ORDERS, USUAL, Dealing, Order
from attnswitch.problem import Problem
from attnswitch.verify.drawing.case import Case

__all__ = ["Answer", "Task", "fitted"]

#: One case in so many keeps heads that ranks cannot share evenly, to see that it is refused.
_UNEVEN = 8
#: One case in so many has its rows in the order that is not the method's usual one.
_OTHER_ORDER = 4


@dataclass(frozen=True, slots=True)
class Task:
    """A case for all ranks, by ``method``. ``fault`` names a mutant of the parallel layer, "" for the true one."""

    case: Case
    method: Method
    fault: str = ""
    #: Counts process groups: after a rank was lost, all begin again.
    generation: int = 0

    @property
    def order(self) -> Order:
        """Which rows a rank holds: that of the method, or now and then the other."""
        usual = USUAL[self.method]
        if self.case.data_seed % _OTHER_ORDER < _OTHER_ORDER - 1:
            return usual
        return next(order for order in ORDERS if order != usual)

    def dealt(self, ranks: int) -> tuple[Dealing, Dealing]:
        """How queries and keys are dealt; packed sequences are dealt as one."""
        case = self.case
        rows = sum(case.query_lengths) if case.query_lengths is not None else 0
        lengths = (rows, rows) if case.varlen else (case.seq_q, case.seq_k)
        return Dealing(lengths[0], ranks, self.order), Dealing(lengths[1], ranks, self.order)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank computed of its rows, by name, as NumPy arrays (B, H, rows, ...); or why it did not.

    ``calls`` are the problems of its parts, with the backend that was chosen for each. ``refused`` is a reason,
    ``failed`` a finding; ``hung`` if that is for want of an answer, ``after`` if another had failed before, so that it
    may have waited for that one.
    """

    results: dict[str, Any] = field(default_factory=dict)
    calls: tuple[tuple[Problem, str], ...] = ()
    refused: str = ""
    failed: str = ""
    hung: bool = False
    after: bool = False


def fitted(case: Case, method: str, ranks: int) -> Case:
    """``case`` as ranks can be asked for it: without pages and parts, and of packed sequences as many keys as queries.

    All-to-all mostly gets heads that so many ``ranks`` can share.
    """
    case = case.replace(parts=0)
    if method == "all-to-all" and case.heads_q % ranks and case.data_seed % _UNEVEN:
        case = case.replace(group=case.group * ranks)
    if case.page:
        lengths = case.lengths if case.varlen else None
        case = case.replace(page=0, splits=0, cache="", scales="", tree="", latent=False, lengths=lengths)
    if case.query_lengths is None or case.lengths is None:
        return case
    few, longest = tuple(map(min, case.query_lengths, case.lengths)), min(case.seq_q, case.seq_k)
    return case.replace(query_lengths=few, lengths=few, seq_q=longest, seq_k=longest)
