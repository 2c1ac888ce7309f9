"""Cases drawn by Hypothesis and tried: what one worker does with one job. Failures are shrunk where they are found."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import HealthCheck, Phase, Verbosity, errors, event, given, seed, settings, target

from attnswitch.verify.drawing import provider
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.strategies import Space, cases, recipe
from attnswitch.verify.launch.unguarded import unguarded
from attnswitch.verify.outcome import Failure, Kind, Outcome
from attnswitch.verify.session.coverage import triggers
from attnswitch.verify.session.events import Done, Event, Examined, Lost, Shrunk, Smaller
from attnswitch.verify.session.plan import Target

__all__ = ["Drawn", "Examine", "Given", "Job", "Source", "carry_out", "draw"]


class Source(enum.Enum):
    """Where the cases of a job come from, in words; what becomes of their outcomes depends on it."""

    SAVED = "saved cases"
    #: Of the corpus too: cases that backends refuse because they get them wrong.
    DIVERGENCE = "known divergences"
    #: Drawn by the workers, which shrink what fails.
    DRAWN = "fuzzing"
    #: Drawn so that each demanded class is met.
    DEMANDED = "what is demanded"
    #: The lattice, where a case comes once for each backend.
    FIXED = "tile edges and great lengths"
    CLIMBED = "searching for the worst"


class Examine(Protocol):
    """Tries a case on some backends of a device; ``only`` looks at ``case.check`` alone."""

    def __call__(self, case: Case, backends: Sequence[str], device: str, only: bool = False) -> list[Outcome]:
        """The verdicts, in the order of the backends."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Cases ``first`` to ``first + count`` of ``seed``, each on every backend of the target.

    ``climb`` then goes on from the worst of them, for as many cases again, towards larger errors. Failures of a
    ``known`` kind are counted and not shrunk.
    """

    target: Target
    seed: int
    first: int
    count: int
    known: frozenset[Kind] = frozenset()
    shrink_tries: int = 500
    climb: bool = False

    @property
    def source(self) -> Source:
        """Drawn at random, or on the way to larger errors."""
        return Source.CLIMBED if self.climb else Source.DRAWN


@dataclass(frozen=True, slots=True)
class Given:
    """Cases that are there already, each with the backends to try."""

    device: str
    cases: tuple[tuple[Case, tuple[str, ...]], ...]
    first: int = 0
    source: Source = Source.FIXED
    #: Look at nothing but the check that each case is there for.
    only: bool = False
    #: Run the backends on what they refuse.
    unguarded: bool = False


Job = Drawn | Given


class _Mismatch(Exception):
    """Carries an outcome through Hypothesis; a subclass for each kind of failure keeps them apart while shrinking."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.failure.message if outcome.failure else "")
        self.outcome = outcome


class _Through(BaseException):
    """Carries what ends the job past Hypothesis, which would try the case again."""

    def __init__(self, cause: BaseException | Event) -> None:
        super().__init__()
        self.cause = cause


def carry_out(job: Job, examine: Examine, tell: Callable[[Event], None]) -> None:
    """Carry out ``job``, telling what happens; the last event is ``Done``, or ``Lost`` if the device is."""
    try:
        if isinstance(job, Given):
            _given(job, examine, tell)
        else:
            _Exploration(job, examine, tell).run()
    except _Through as through:
        if isinstance(through.cause, BaseException):
            raise through.cause from None
        tell(through.cause)
        return
    tell(Done())


def draw(space: Space, seed: int, count: int) -> list[Case]:
    """The first ``count`` cases of ``seed``, tried on nothing."""
    drawn: list[Case] = []

    def keep(case: Case, backends: Sequence[str], device: str, only: bool = False) -> list[Outcome]:
        drawn.append(case)
        return []

    carry_out(Drawn(Target("cpu", (), space), seed, 0, count), keep, lambda event: None)
    return drawn


def _given(job: Given, examine: Examine, tell: Callable[[Event], None]) -> None:
    started = time.monotonic()
    for number, (case, backends) in enumerate(job.cases, job.first):
        with ExitStack() as guards:
            for backend in backends if job.unguarded else ():
                guards.enter_context(unguarded(backend))
            outcomes = examine(case, backends, job.device, job.only)
        tell(Examined(number, tuple(outcomes), time.monotonic() - started))
        _check_alive(outcomes, job.device, number)


def _check_alive(outcomes: Sequence[Outcome], device: str, number: int) -> None:
    """After a crash, find out whether the GPU can go on: an illegal access ends every context of the process."""
    crashes = [o for o in outcomes if o.failure is not None and o.failure.check == "crash"]
    if crashes and device != "cpu":
        import torch

        try:
            torch.zeros(1, device=device).item()
        except RuntimeError:
            raise _Through(Lost(crashes[0], number)) from None


@dataclass(slots=True)
class _Exploration:
    """One ``Drawn`` job in progress."""

    job: Drawn
    examine: Examine
    tell: Callable[[Event], None]
    known: set[Kind] = field(default_factory=set)
    kinds: dict[Kind, type[_Mismatch]] = field(default_factory=dict)
    focus: Kind | None = None
    tries: int = 0
    seen_at: int = 0
    last: int = 0
    extra: int = 0
    failed: set[Case] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """All cases; after a failure is shrunk, the rest of them."""
        self.known = set(self.job.known)
        done = self.job.first
        while done < self.job.first + self.job.count:
            provider.start(self.job.seed, done)
            self.last, self.focus, self.tries = done, None, 0
            self.failed = set()
            self._explore(self.job.first + self.job.count - done)
            done = max(self.last, done + 1)

    def _explore(self, count: int) -> None:
        """Let Hypothesis draw up to ``count`` cases, until one fails and is shrunk."""
        climb = self.job.climb
        phases = [
            Phase.generate,
            *([Phase.target] if climb else []),
            *([Phase.shrink] if self.job.shrink_tries else []),
        ]
        profile = settings(
            max_examples=(2 if climb else 1) * count + 1,
            backend=provider.NAME,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        body = given(cases(self.job.target.space))(self._execute)
        try:
            seed(self.job.seed)(profile(body))()
        except _Mismatch as mismatch:
            self._shrunk(mismatch.outcome)
        except errors.Flaky as flaky:
            self._shrunk(self._flaky(flaky))

    def _execute(self, case: Case) -> None:
        if self.focus is None:
            fresh = self._try(case)
        else:  # shrinking: only the backend that failed, and past its tries only what is known to fail
            self.tries += 1
            if case not in self.failed and self.tries > self.job.shrink_tries:
                return
            outcomes = self._examined(case, (self.focus[1],))
            fresh = [o for o in outcomes if o.verdict == "mismatch" and o.kind == self.focus]
        if fresh:
            if self.focus is None:
                self.focus, self.seen_at = fresh[0].kind, self.last - 1
            self.failed.add(case)
            self.tell(Smaller(fresh[0]))
            raise self._carrier(fresh[0].kind)(fresh[0])

    def _try(self, case: Case) -> list[Outcome]:
        """One more case of the run; the outcomes that failed in a new way."""
        position = provider.position()
        if position == self.last:
            # Hypothesis begins with the plainest case of all, which is none of the seed's; and while it climbs, the
            # cases are its own.
            if not self.job.climb or position < self.job.first + self.job.count:
                return []
            self.extra += 1
        self.last = position
        number = position - 1 + self.extra
        outcomes = self._examined(case, self.job.target.backends, number)
        if self.job.climb:
            try:
                _aim(outcomes)
            except Exception as error:
                raise _Through(error) from error
        return [o for o in outcomes if o.verdict == "mismatch" and o.kind not in self.known]

    def _examined(self, case: Case, backends: Sequence[str], number: int | None = None) -> list[Outcome]:
        """Outcomes of a drawn problem with each recipe of data; those of case ``number`` of the run are told."""
        target, every = self.job.target, []
        for n in range(target.recipes):
            try:
                outcomes = self.examine(recipe(case, n, target.space.checks), backends, target.device)
                _check_alive(outcomes, target.device, self.last - 1)
            except Exception as error:  # the verifier's own mistake: Hypothesis would take it for a finding
                raise _Through(error) from error
            every += outcomes
            # Other numbers do not change a refusal.
            more = n + 1 < target.recipes and any(o.verdict in ("verified", "mismatch") for o in outcomes)
            if number is not None:
                self.tell(Examined(number, tuple(outcomes), time.monotonic() - self.started, more))
            if not more:
                break
        return every

    def _carrier(self, kind: Kind) -> type[_Mismatch]:
        return self.kinds.setdefault(kind, type(f"Mismatch in {kind[2]} {kind[3]} of {kind[1]}", (_Mismatch,), {}))

    def _flaky(self, flaky: errors.Flaky) -> Outcome:
        """A failure that did not come again when its case was run again: the kernel does not repeat itself."""
        mismatch = next((error for error in _leaves(flaky) if isinstance(error, _Mismatch)), None)
        assert mismatch is not None, flaky
        old = mismatch.outcome.failure
        assert old is not None
        message = f"{old.message}; it did not fail again when run again"
        failure = Failure(old.check, message, old.result, old.index, old.got, old.expected, old.bound)
        return Outcome(
            mismatch.outcome.case, mismatch.outcome.backend, self.job.target.device, "mismatch", None, failure=failure
        )

    def _shrunk(self, outcome: Outcome) -> None:
        self.known.add(outcome.kind)
        self.tell(Shrunk(outcome, self.seen_at))


def _aim(outcomes: Sequence[Outcome]) -> None:
    """Tell Hypothesis how close to the bound a case came, and which kernel and tile edges it reached."""
    worst: dict[str, float] = {}  # by backend: Hypothesis takes one number a case for each
    for outcome in outcomes:
        if outcome.verdict == "verified":
            ratio = max(outcome.ratios.values(), default=0.0)
            worst[outcome.backend] = max(ratio, worst.get(outcome.backend, 1e-12))
            event(f"{outcome.chosen} {outcome.variant} {outcome.case.dtype}")
            for met in triggers(outcome.case):
                event(met)
    for backend, ratio in worst.items():
        target(math.log2(ratio), label=f"error / bound of {backend}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """An exception with everything that it groups, contains or was caused by."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__cause__, error.__context__):
        if inner is not None:
            yield from _leaves(inner)
