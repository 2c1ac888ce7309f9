"""``Report``: what a run found, counted while it goes on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from attnswitch.verify.demands.figures import Demanded
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.coverage import triggers
from attnswitch.verify.session.shard import WHOLE, Shard

__all__ = ["INTERRUPTED", "TILE", "Found", "Report", "Speed", "Tally"]

INTERRUPTED = "interrupted"
#: Histograms of error / bound have a bin for each power of two from 2**-LOWEST to 1, and one above.
LOWEST = 16
#: Worst elements are placed by their coordinates modulo this, in cells of an eighth of it.
TILE = 128
#: Cases from which on a pace is told.
_SOME = 100


@dataclass(frozen=True, slots=True)
class Found:
    """A distinct failure in its smallest form, where it was saved, and when it was first seen in the run."""

    outcome: Outcome
    path: Path | None
    from_corpus: bool = False
    seconds: float = 0.0
    #: Cases tried until it was seen.
    after: int = 0
    #: Options of ``attnswitch replay`` that it takes to judge it as the run did.
    replayed_with: tuple[str, ...] = ()
    #: The command that runs it again, where ``attnswitch replay`` cannot.
    replayed_by: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """Counts of one device, backend and dtype."""

    verified: int = 0
    refused: int = 0
    mismatched: int = 0
    unavailable: int = 0
    gradients: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    worst_case: Case | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    #: Why it could not run here at all.
    absences: Counter[str] = field(default_factory=Counter)
    #: How often each check held, and did not.
    held: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    #: By result: counts of worst error / bound by power of two, and of the worst element by its place in a tile.
    ratios: dict[str, list[int]] = field(default_factory=dict)
    places: dict[tuple[int, int], float] = field(default_factory=dict)
    variants: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.seconds += outcome.seconds
        if outcome.verdict == "refused":
            self.refused += 1
            self.reasons.update(outcome.reasons)
            return
        if outcome.verdict == "unavailable":
            self.unavailable += 1
            self.absences.update(outcome.reasons)
            return
        self.variants[f"{outcome.chosen or outcome.backend} {outcome.variant}".strip()] += 1
        self._ratios(outcome)
        if outcome.failure is None:
            self.verified += 1
            self.gradients += bool(outcome.case.grads)
            self.held.update(outcome.checks)
            worst = max(outcome.ratios.values(), default=0.0)
            if worst > self.worst:
                self.worst, self.worst_case = worst, outcome.case
        else:
            self.mismatched += 1
            self.held.update(check for check in outcome.checks if check != outcome.failure.check)
            self.broken[outcome.failure.check] += 1

    def _ratios(self, outcome: Outcome) -> None:
        for name, ratio in outcome.ratios.items():
            bins = self.ratios.setdefault(name, [0] * (LOWEST + 2))
            if math.isnan(ratio):
                bins[-1] += 1
            elif ratio > 0.0:
                bins[min(LOWEST + 1, max(0, LOWEST + math.ceil(math.log2(min(ratio, 2.0)))))] += 1
            else:
                bins[0] += 1
        where = outcome.worst.get("out", ())
        if len(where) == 4:
            cell = where[2] % TILE * 8 // TILE, where[3] % TILE * 8 // TILE
            self.places[cell] = max(self.places.get(cell, 0.0), min(outcome.ratios["out"], 2.0))


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of a call of a backend, and of the fastest other one, ``beside`` it; or why it was not timed."""

    problem: str
    milliseconds: float | None = None
    beside: str | None = None
    milliseconds_beside: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast it is as the other."""
        if self.milliseconds is None or self.milliseconds_beside is None:
            return None
        return self.milliseconds_beside / self.milliseconds


@dataclass(slots=True)
class Report:
    """What a run found; ``seconds`` is its duration."""

    seed: int
    cases: int = 0
    #: Of these, the ones that were drawn at random.
    fuzzed: int = 0
    #: Data recipes that were tried on each problem drawn, by device, where it was more than one.
    recipes: dict[str, int] = field(default_factory=dict)
    #: Environment variables under which kernels were emulated, by device.
    emulated: dict[str, dict[str, str]] = field(default_factory=dict)
    replayed: int = 0
    #: What was wrong with files of the corpus that were passed over.
    passed_over: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: When each case that was drawn at random was done, in seconds into the run.
    done: list[float] = field(default_factory=list)
    stopped: str = ""
    #: Whether the verifier itself failed, and the run could not go on.
    broke: bool = False
    #: Which part of a run it is of.
    shard: Shard = WHOLE
    #: What was not done of a run in shards, in sentences.
    missing: list[str] = field(default_factory=list)
    workers: int = 1
    tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    failures: list[Found] = field(default_factory=list)
    #: How often each situation in which kernels have been wrong was met.
    triggers: Counter[str] = field(default_factory=Counter)
    #: Device, backend and name of each divergence whose case was run, and whether it still shows.
    divergences: list[tuple[str, str, str, bool]] = field(default_factory=list)
    #: What the backends had to take.
    demanded: Demanded = field(default_factory=Demanded)
    #: How fast they were, by device and backend, where that was asked for.
    speeds: dict[tuple[str, str], list[Speed]] = field(default_factory=dict)
    #: Versions and devices, as the process that ran the kernels saw them.
    environment: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome under its device, backend and dtype."""
        key = (outcome.device, outcome.backend, outcome.case.dtype)
        self.tallies.setdefault(key, Tally()).add(outcome)

    def drew(self, case: Case) -> None:
        """Count one case and the situations that it is."""
        self.cases += 1
        self.triggers.update(triggers(case))

    @property
    def pace(self) -> float | None:
        """Drawn cases a second once under way: of those in the middle, between the first tenth and the last.

        None where they are too few to say.
        """
        between = sorted(self.done)[len(self.done) // 10 : -(len(self.done) // 10) or None]
        took = between[-1] - between[0] if len(between) >= _SOME else 0.0
        return (len(between) - 1) / took if took else None

    @property
    def verified(self) -> int:
        """Outcomes that were verified."""
        return sum(tally.verified for tally in self.tallies.values())

    @property
    def stale(self) -> list[tuple[str, str, str]]:
        """Divergences of which no case shows any more: their version range can be ended."""
        shows = {entry[:3] for entry in self.divergences if entry[3]}
        return sorted({entry[:3] for entry in self.divergences} - shows)

    @property
    def exit_code(self) -> int:
        """0 good, 1 a mismatch was found, 2 it was interrupted or broke or is not whole, 3 nothing was verified.

        1 as well if a demanded case was refused, and 3 if of a demanded class none was tried.
        """
        if self.failures or self.demanded.refused:
            return 1
        if self.stopped == INTERRUPTED or self.broke or self.missing:
            return 2
        return 0 if self.verified and not self.demanded.never else 3
