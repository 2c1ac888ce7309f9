"""A whole run: saved cases, the lattice, drawn cases, then the search for the worst case. Failures are saved."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from attnswitch.errors import InvalidProblem, VerificationError
from attnswitch.verify import emulation
from attnswitch.verify.demands.figures import Demanded
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import AUTO, Kind, Outcome
from attnswitch.verify.session import corpus, known, order
from attnswitch.verify.session.counting import Counts
from attnswitch.verify.session.events import Event, Examined, Lost, Shrunk, Smaller
from attnswitch.verify.session.explore import Drawn, Given, Job, Source
from attnswitch.verify.session.plan import Plan, Target
from attnswitch.verify.session.pool import Here, Isolated, Late, Pool
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.session.reduce import reduced
from attnswitch.verify.session.tally import INTERRUPTED, Found, Report
from attnswitch.verify.session.verdicts import of_outcome
from attnswitch.wisdom import view

__all__ = ["Progress", "run"]

#: Tries to shrink a failure where kernels are emulated and a case takes a second or more.
_SLOW_TRIES = 100
#: The search for the worst case runs one case for every so many examples.
_CLIMB = 20
#: Problems that one search begins with, at most: it goes on from the worst of them, and so in one process.
_BEGINNINGS = 16
#: Tries to shrink a case: one that was given (""), one that ends its process, one that does not end.
_TRIES = {"": 200, "crash": 30, "hang": 12}

#: Seconds for one try while a case is shrunk. Most need a hundredth of it.
_TRY_TIMEOUT = 15.0

#: Called with the report so far, where the cases come from, the device, and the new outcomes.
Progress = Callable[[Report, Source, str, tuple[Outcome, ...]], None]


def run(
    plan: Plan,
    progress: Progress = lambda report, source, device, outcomes: None,
    pool: Callable[[Plan], Pool] | None = None,
) -> Report:
    """Carry out ``plan``, in the ``pool`` that this makes of it; left out, as the plan says.

    Raises:
        InvalidProblem: a corpus file is damaged, there is nothing to run, or a requirement admits nothing.
        VerificationError: the references disagree, or a worker could not start.
    """
    if not plan.targets or not any(target.backends for target in plan.targets):
        raise InvalidProblem("nothing to verify: no backend was named that this machine has")
    recipes = {target.device: target.recipes for target in plan.targets if target.recipes > 1}
    emulated = {target.device: dict(target.emulation) for target in plan.targets if target.emulation}
    held = [(target.device, name) for target in plan.targets for name in plan.held_on(target)]
    demands = {target.device: order.demanded(plan, target) for target in plan.targets}
    demanded = Demanded(plan.requirements, held)
    report = Report(plan.seed, recipes=recipes, emulated=emulated, demanded=demanded, shard=plan.shard)
    return _Run(plan, progress, report, demands, pool or (Isolated if plan.isolate else Here))()


@dataclass
class _Run:
    """One run in progress."""

    plan: Plan
    progress: Progress
    report: Report
    #: Jobs of cases that are demanded, by device.
    demands: dict[str, Iterator[Given]]
    pool: Callable[[Plan], Pool]
    started: float = field(default_factory=time.monotonic)
    #: When the first worker was ready: a time limit does not count how long that takes.
    began: float | None = None
    kinds: set[Kind] = field(default_factory=set)
    #: Failures that are being shrunk, in the smallest form so far.
    smallest: dict[Kind, Outcome] = field(default_factory=dict)
    #: When each of them was first seen: seconds into the run, and cases.
    seen: dict[Kind, tuple[float, int]] = field(default_factory=dict)
    paths: dict[Case, Path] = field(default_factory=dict)
    counts: Counts = field(init=False)
    divergences: dict[tuple[str, Case], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = Counts(self.report)

    def __call__(self) -> Report:
        """Carry the plan out. Ctrl-C ends it, and the report has what was done until then."""
        try:
            with self.pool(self.plan) as pool:
                self.report.workers = pool.size
                jobs = {target.device: self._jobs(target) for target in self.plan.targets}
                pool.carry_out(jobs, self._enough, partial(self._take, pool))
                self.report.environment = pool.provenance
        except KeyboardInterrupt:
            self.report.stopped = INTERRUPTED
        except VerificationError as error:
            if not self.report.cases:
                raise
            self.report.stopped, self.report.broke = str(error), True  # the report keeps what was done until then
        for outcome in list(self.smallest.values()):
            self._record(outcome)
        self.report.environment = self.report.environment or provenance()
        for emulated in self.report.emulated.values():
            self.report.environment = {**self.report.environment, **emulation.fact(emulated)}
        if self.plan.keep_worst and self.plan.corpus is not None:
            corpus.save_worst(self.report, self.plan.corpus)
        self.report.seconds = time.monotonic() - self.started
        return self.report

    # -- what there is to do -------------------------------------------------------------------------------------------

    def _jobs(self, target: Target) -> Iterator[Job]:
        """All jobs of a device. A worker that is done takes the next: none waits for what another compiles."""
        mine = self.plan.shard.dealt
        if self._corpus:
            yield from self._saved(target, self._corpus)
            if self.plan.isolate:  # what they do to a process is not for this one
                yield from self._divergences(target, self._corpus)
        yield from mine(self.demands[target.device])
        yield from mine(order.fresh(self.plan, target, partial(self._drawn, target)))
        if self.plan.targeted and self.plan.drawn(target) is not None:
            yield from mine(self._climbs(target))

    @functools.cached_property
    def _corpus(self) -> list[corpus.Saved]:
        """Read once, before the first job. Raises ``InvalidProblem``, unless the plan passes over what is damaged."""
        if self.plan.corpus is None or not self.plan.corpus.is_dir():
            return []
        folders = self.plan.corpus, self.plan.corpus / corpus.WORST
        passed_over = self.report.passed_over if self.plan.pass_over else None
        every = (saved for folder in folders for saved in corpus.read_all(folder, passed_over))
        return [saved for saved in every if self.plan.shard.has(corpus.digest(saved.case))]

    def _saved(self, target: Target, every: list[corpus.Saved]) -> Iterator[Job]:
        """Saved cases of the target's backends. All run cases of the dispatcher's choice, and that runs all cases."""
        for number, saved in enumerate(every):
            backends = tuple(name for name in target.backends if AUTO in (name, saved.backend) or name == saved.backend)
            if target.device.split(":")[0] == saved.device.split(":")[0] and backends:
                self.paths[saved.case] = saved.path
                yield Given(target.device, ((saved.case, backends),), number, Source.SAVED)

    def _divergences(self, target: Target, every: list[corpus.Saved]) -> Iterator[Job]:
        """Cases of known divergences, run on the backends that refuse them."""
        for backend, entry, saved in known.cases(target, every):
            self.divergences[backend, saved.case] = entry.id
            yield Given(target.device, ((saved.case, (backend,)),), source=Source.DIVERGENCE, unguarded=True)

    def _climbs(self, target: Target) -> Iterator[Job]:
        limit = self.plan.problems(target)
        assert limit is not None
        for number, backend in enumerate(target.backends):
            alone = replace(target, backends=(backend,), space=replace(target.space, checks=()))
            count = max(5, limit // _CLIMB // len(target.backends))
            first, searches = 2**40 + number * 2**20, -(-count // _BEGINNINGS)
            for n in range(searches):
                begun = (count + n) // searches  # which add up to count
                yield self._drawn(alone, first, begun, climb=True)
                first += 2 * begun  # it goes on for as many again

    def _drawn(self, target: Target, first: int, count: int, climb: bool = False) -> Drawn:
        known, tries = frozenset(self.kinds), self._tries(target.device)
        return Drawn(target, self.plan.seed, first, count, known, tries, climb)

    def _tries(self, device: str) -> int:
        """How many cases may be tried to shrink one failure."""
        return min(self.plan.shrink_tries, _SLOW_TRIES if device in self.report.emulated else 2**31)

    def _late(self) -> bool:
        """Whether the time is over."""
        now = time.monotonic()
        return self.plan.seconds is not None and now - (self.began or now) > self.plan.seconds

    def _enough(self) -> bool:
        if self._late():
            self.report.stopped = f"time limit of {self.plan.seconds:g} s"
        elif len({failure.outcome.kind for failure in self.report.failures}) >= self.plan.max_failures:
            self.report.stopped = f"{self.plan.max_failures} distinct failures"
        return bool(self.report.stopped)

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def _take(self, pool: Pool, device: str, source: Source, event: Event) -> None:
        self.began = self.began or time.monotonic()
        self._count(pool, source, event)
        if source is Source.DRAWN and isinstance(event, Examined):
            self.report.done.append(time.monotonic() - self.started)
        new = event.outcomes if isinstance(event, Examined) else (event.outcome,) if isinstance(event, Lost) else ()
        self.progress(self.report, source, device, new)

    def _count(self, pool: Pool, source: Source, event: Event) -> None:
        if source is Source.DIVERGENCE:
            if isinstance(event, Examined):
                self._diverged(*event.outcomes)
            elif isinstance(event, Lost):
                self._diverged(event.outcome)
        elif isinstance(event, Examined):
            for outcome in event.outcomes:
                self.counts.add(source, outcome)
            if event.outcomes:
                self._examined(pool, source, event.outcomes)
        elif isinstance(event, Smaller):
            self._see(event.outcome)
        elif isinstance(event, Shrunk):
            self._record(event.outcome)
        elif isinstance(event, Lost):
            self._lost(pool, source, event.outcome)

    def _diverged(self, *outcomes: Outcome) -> None:
        """Count whether known divergences still show."""
        for outcome in outcomes:
            name, shows = self.divergences[outcome.backend, outcome.case], outcome.verdict == "mismatch"
            self.report.divergences.append((outcome.device, outcome.backend, name, shows))

    def _examined(self, pool: Pool, source: Source, outcomes: tuple[Outcome, ...]) -> None:
        """Count one case, and record what failed of a case that was not drawn: no worker shrinks that."""
        self.counts.case(source, outcomes[0].case)
        if source in (Source.DRAWN, Source.CLIMBED):
            return
        for outcome in outcomes:
            if source is Source.SAVED and outcome.verdict == "verified":
                self._remember(outcome, self.paths[outcome.case].name)
            if outcome.verdict == "mismatch" and outcome.kind not in self.kinds:
                self._record(outcome if source is Source.SAVED else self._smaller(pool, outcome, ""))

    def _lost(self, pool: Pool, source: Source, outcome: Outcome) -> None:
        """A failure that ended its process."""
        assert outcome.failure is not None
        if source is not Source.SAVED:
            self.counts.drew(source, outcome.case)
        self.counts.add(source, outcome)
        if outcome.kind in self.kinds:
            return
        if isinstance(pool, Here):
            self.report.stopped = f"{outcome.device} was lost: a kernel broke its context; nothing more can run on it"
        elif outcome.case not in self.paths:
            outcome = self._smaller(pool, outcome, outcome.failure.check)
        self._record(outcome)

    def _smaller(self, pool: Pool, outcome: Outcome, ending: str) -> Outcome:
        """The outcome of the smallest case that fails in the same way."""
        best, failure = outcome, outcome.failure
        assert failure is not None
        slow = outcome.device in self.report.emulated
        timeout = self.plan.timeout if slow else min(_TRY_TIMEOUT, self.plan.timeout)

        def fails(case: Case) -> bool:
            nonlocal best
            only = failure.check == case.check
            try:
                again = pool.attempt(case, outcome.backend, outcome.device, only, timeout, self._late)
            except Late:  # the smallest so far is kept
                return False
            if again.verdict == "mismatch" and again.kind == outcome.kind:
                best = again
                self._see(again)
                return True
            return False

        self._see(outcome)
        reduced(outcome.case, fails, min(_TRIES.get(ending, 60), self._tries(outcome.device)))
        return best

    def _see(self, outcome: Outcome) -> None:
        """Note a failure that is still being shrunk."""
        self.smallest[outcome.kind] = outcome
        self.seen.setdefault(outcome.kind, (time.monotonic() - self.started, self.report.cases))

    def _remember(self, outcome: Outcome, case: str) -> None:
        """Put the outcome in this machine's wisdom, unless it ran under an emulation, or its numbers were right."""
        misbehaved = outcome.failure is not None and outcome.failure.check == "conduct"
        if self.plan.remember and not misbehaved and outcome.device not in self.report.emulated:
            with contextlib.suppress(OSError):  # the failure is reported even if it cannot be saved
                view.remember(of_outcome(outcome, case))

    def _record(self, outcome: Outcome) -> None:
        self.smallest.pop(outcome.kind, None)
        if outcome.kind in self.kinds:
            return
        self.kinds.add(outcome.kind)
        path = self.paths.get(outcome.case)
        from_corpus = path is not None
        if path is None and self.plan.corpus is not None:
            try:
                facts = emulation.fact(self.report.emulated.get(outcome.device, {}))
                if self.plan.replayed_with:
                    facts["judged with"] = shlex.join(self.plan.replayed_with)
                path = corpus.save(outcome, self.plan.corpus, facts)
            except OSError:
                path = None  # the failure is reported even if it cannot be saved
        self._remember(outcome, path.name if path is not None else corpus.digest(outcome.case))
        seconds, cases = self.seen.get(outcome.kind, (time.monotonic() - self.started, self.report.cases))
        again = self.plan.replayed_with, self.plan.replayed_by
        self.report.failures.append(Found(outcome, path, from_corpus, seconds, cases, *again))
