"""The kill of each mutant: what a run as a user would start it, on that mutant alone, ends with, and after how much.

Such runs try the same cases in the same order. They are made side by side: each case is drawn and answered once for all
mutants that no case caught yet. The true backend goes first in each: it is to be right on every case that a mutant is
held to, and its time is what a run on one backend takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.placings import FAR
from attnswitch.verify.judge import examine
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session import order
from attnswitch.verify.session.explore import Drawn, Source, carry_out
from attnswitch.verify.session.plan import Plan, targets

__all__ = ["Kill", "kills", "together"]


class Kill(NamedTuple):
    """The check that ended a run, None if nothing did; the cases until then, and the seconds."""

    check: str | None
    cases: int
    seconds: float


def kills(true: str, mutants: Sequence[str], seed: int, examples: int) -> dict[str, Kill]:
    """The kills of ``mutants``, and what the runs end with on the ``true`` backend, all by target.

    The runs end when every mutant is caught, or the true backend fails; without mutants, that goes through all cases.
    """
    (aim,) = targets(["cpu"], [true])
    plan, runs = Plan((aim,), examples, seed, lattice=True), _Runs(true, list(mutants), until_caught=bool(mutants))
    try:
        for job in order.fresh(plan, aim, partial(Drawn, aim, seed)):
            runs.source = job.source
            carry_out(job, runs.examine, lambda event: None)
    except _Ended:
        pass
    survived = Kill(None, runs.cases, runs.seconds)
    return dict.fromkeys((true, *mutants), survived) | runs.ended


def together(case: Case, targets: Sequence[str]) -> list[tuple[str, ...]]:
    """``targets`` as they try ``case``: at once, unless the operands of each take gigabytes; then one by one."""
    return [(target,) for target in targets] if FAR in astuple(case.placing) else [tuple(targets)]


class _Ended(BaseException):
    """Every mutant is caught, or the true backend fails; not an ``Exception``, so that Hypothesis lets it through."""


@dataclass(slots=True)
class _Runs:
    """The runs on all mutants that are left, as far as they are."""

    true: str
    left: list[str]
    until_caught: bool
    source: Source = Source.DRAWN
    ended: dict[str, Kill] = field(default_factory=dict)
    cases: int = 0
    fixed: set[Case] = field(default_factory=set)
    seconds: float = 0.0
    #: When the last case was done.
    since: float = field(default_factory=time.monotonic)

    def examine(self, case: Case, backends: Sequence[str], device: str, only: bool = False) -> list[Outcome]:
        """Try a case on all that is left. Nothing fails for whoever drew it: the others are to go on."""
        began = [("", self.since)]  # who is looked at from when on; nobody, while the case is drawn

        def before(target: str) -> None:
            began.append((target, time.monotonic()))

        beside = together(case, (self.true, *self.left))
        outcomes = [outcome for some in beside for outcome in examine(case, some, device, only, before)]
        self.since = time.monotonic()
        for (who, start), (_, end) in pairwise((*began, ("", self.since))):
            self.seconds += end - start if who in ("", self.true) else 0.0
        if outcomes and not (self.source is Source.FIXED and case in self.fixed):
            self.cases += 1
        if self.source is Source.FIXED:
            self.fixed.add(case)
        for outcome in outcomes:
            if outcome.failure is not None and outcome.backend not in self.ended:
                self.ended[outcome.backend] = Kill(outcome.failure.check, self.cases, self.seconds)
        self.left = [target for target in self.left if target not in self.ended]
        if self.true in self.ended or (self.until_caught and not self.left):
            raise _Ended
        return []
