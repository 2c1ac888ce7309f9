"""What a case and its outcomes count for in a report, which depends on where the case comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.explore import Source
from attnswitch.verify.session.tally import Report

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Counts into a report, as a run goes on and as its log is read."""

    report: Report
    #: Cases of the lattice so far: each comes once for every backend.
    fixed: set[Case] = field(default_factory=set)

    def case(self, source: Source, case: Case) -> None:
        """Count a case that was tried."""
        if source is Source.SAVED:
            self.report.replayed += 1
        else:
            self.drew(source, case)

    def drew(self, source: Source, case: Case) -> None:
        """Count a case that was not saved; one of the lattice once for all backends."""
        self.report.fuzzed += source is Source.DRAWN
        if source is not Source.FIXED or case not in self.fixed:
            self.report.drew(case)
        if source is Source.FIXED:
            self.fixed.add(case)

    def add(self, source: Source, outcome: Outcome) -> None:
        """Count an outcome, and whether what is demanded was taken; a probe alone does not say."""
        self.report.add(outcome)
        if source in (Source.DEMANDED, Source.DRAWN, Source.CLIMBED):
            self.report.demanded.add(outcome)
