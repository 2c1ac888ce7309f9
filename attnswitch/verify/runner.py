"""A whole run: saved cases first, then drawn ones; every backend of every device on each; failures shrunk and saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, errors, given, seed, settings

from attnswitch.errors import InvalidProblem
from attnswitch.verify import corpus, provider
from attnswitch.verify.case import Case
from attnswitch.verify.checks import Outcome, examine
from attnswitch.verify.compare import Failure
from attnswitch.verify.strategies import Space, cases

__all__ = ["EXAMPLES", "Found", "Plan", "Report", "Run", "run"]

#: Cases drawn by one call of Hypothesis; between two the clock is read and progress is reported.
CHUNK = 50
#: Cases drawn for each device by default: about a minute on two cores.
EXAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Target:
    """One device with the backends to try there and the cases to draw for it."""

    device: str
    backends: tuple[str, ...]
    space: Space


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. ``seconds`` None means no limit; ``max_failures`` ends the run at that many distinct ones."""

    targets: tuple[Target, ...]
    examples: int
    seed: int
    seconds: float | None = None
    max_failures: int = 10
    corpus: Path | None = None
    #: Cases that may be tried to shrink one failure; a count, so that the same seed ends at the same case.
    shrink_tries: int = 500


@dataclass(frozen=True, slots=True)
class Found:
    """A distinct failure in its smallest form, and where it was saved."""

    outcome: Outcome
    path: Path | None
    from_corpus: bool = False


@dataclass(slots=True)
class Tally:
    """Counts of one device, backend and dtype."""

    verified: int = 0
    refused: int = 0
    mismatched: int = 0
    unavailable: int = 0
    gradients: int = 0
    worst: float = 0.0
    worst_case: Case | None = None
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if outcome.verdict == "verified":
            self.verified += 1
            self.gradients += bool(outcome.case.grads)
            worst = max(outcome.ratios.values(), default=0.0)
            if worst > self.worst:
                self.worst, self.worst_case = worst, outcome.case
        elif outcome.verdict == "refused":
            self.refused += 1
            for reason in outcome.reasons:
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
        elif outcome.verdict == "unavailable":
            self.unavailable += 1
        else:
            self.mismatched += 1


@dataclass(slots=True)
class Report:
    """What a run found; ``seconds`` is its duration."""

    seed: int
    cases: int = 0
    replayed: int = 0
    seconds: float = 0.0
    stopped: str = ""
    tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    failures: list[Found] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome under its device, backend and dtype."""
        key = (outcome.device, outcome.backend, outcome.case.dtype)
        self.tallies.setdefault(key, Tally()).add(outcome)

    @property
    def verified(self) -> int:
        """Outcomes that were verified."""
        return sum(tally.verified for tally in self.tallies.values())

    @property
    def exit_code(self) -> int:
        """0 good, 1 a mismatch was found, 2 it was interrupted, 3 nothing was verified."""
        if self.failures:
            return 1
        if self.stopped == INTERRUPTED:
            return 2
        return 0 if self.verified else 3


INTERRUPTED = "interrupted"
#: Called with the report so far and a word on what is being done.
Progress = Callable[[Report, str], None]


class _Mismatch(Exception):
    """Carries an outcome through Hypothesis; a subclass for each kind of failure keeps them apart while shrinking."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.failure.message if outcome.failure else "")
        self.outcome = outcome


class _DeviceLost(BaseException):
    """Carries the outcome that cost the device; not an ``Exception``, so that Hypothesis does not try it again."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _kind(outcome: Outcome) -> tuple[str, str, str]:
    assert outcome.failure is not None
    return outcome.device, outcome.backend, outcome.failure.check


class Run:
    """One run in progress."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan = plan
        self.report = Report(plan.seed)
        self.progress = progress
        self.started = time.monotonic()
        self.known: set[tuple[str, str, str]] = set()
        self.kinds: dict[tuple[str, str, str], type[_Mismatch]] = {}
        self.focus: tuple[str, str, str] | None = None
        self.smallest: Outcome | None = None  # of the failure that is being shrunk

    def __call__(self) -> Report:
        """Corpus, then drawn cases. Ctrl-C ends it with what was found."""
        try:
            self._replay()
            self._draw()
        except KeyboardInterrupt:
            self.report.stopped = INTERRUPTED
            if self.smallest is not None:
                self._record(self.smallest, None)
        self.report.seconds = time.monotonic() - self.started
        return self.report

    # -- saved cases ---------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        if self.plan.corpus is None or not self.plan.corpus.is_dir():
            return
        for saved in corpus.read_all(self.plan.corpus):
            for target in self.plan.targets:
                backends = [name for name in target.backends if saved.backend in (name, "auto")]
                if target.device.split(":")[0] != saved.device.split(":")[0] or not backends:
                    continue
                for outcome in examine(saved.case, backends, target.device):
                    self.report.add(outcome)
                    if outcome.verdict == "mismatch":
                        self._record(outcome, saved.path)
                self.report.replayed += 1
            self.progress(self.report, f"replaying {saved.path.name}")

    # -- drawn cases ---------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Rounds of one chunk for each target, so that a time limit does not starve the last one."""
        left = dict.fromkeys(self.plan.targets, self.plan.examples)
        while any(left.values()) and not self._enough():
            for target in self.plan.targets:
                chunk = min(CHUNK, left[target])
                if chunk and not self._enough():
                    self._chunk(target, self.plan.examples - left[target], chunk)
                    left[target] -= chunk

    def _enough(self) -> bool:
        if self.plan.seconds is not None and time.monotonic() - self.started > self.plan.seconds:
            self.report.stopped = f"time limit of {self.plan.seconds:g} s"
        elif len({_kind(found.outcome) for found in self.report.failures}) >= self.plan.max_failures:
            self.report.stopped = f"{self.plan.max_failures} distinct failures"
        return bool(self.report.stopped)

    def _chunk(self, target: Target, first: int, count: int) -> None:
        """Cases ``first`` to ``first + count`` of the seed; after a failure is shrunk, the rest of them."""
        done = first
        while done < first + count and not self._enough():
            provider.start(self.plan.seed, done)
            self.focus = None
            drawn = self._explore(target, first + count - done)
            done += drawn
            self.progress(self.report, f"fuzzing {target.device}")

    def _explore(self, target: Target, count: int) -> int:
        """Let Hypothesis draw up to ``count`` cases; how many it drew before it turned to shrinking a failure."""
        failed: set[Case] = set()
        tries = 0
        first = last = provider.position()

        def execute(case: Case) -> None:
            nonlocal last, tries
            if self.focus is None:
                if provider.position() == last:
                    return  # Hypothesis begins with the plainest case of all, which is none of the seed's
                last = provider.position()
                self.report.cases += 1
                outcomes = examine(case, target.backends, target.device)
                for outcome in outcomes:
                    self.report.add(outcome)
                self._check_alive(target, outcomes)
                fresh = [o for o in outcomes if o.verdict == "mismatch" and _kind(o) not in self.known]
            else:  # shrinking: only the backend that failed, and past its tries only what is known to fail
                tries += 1
                if case not in failed and tries > self.plan.shrink_tries:
                    return
                outcomes = examine(case, (self.focus[1],), target.device)
                self._check_alive(target, outcomes)
                fresh = [o for o in outcomes if o.verdict == "mismatch" and _kind(o) == self.focus]
            if fresh:
                self.focus = self.focus or _kind(fresh[0])
                failed.add(case)
                self.smallest = fresh[0]
                raise self._carrier(_kind(fresh[0]))(fresh[0])

        profile = settings(
            max_examples=count + 1,
            backend=provider.NAME,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        try:
            seed(self.plan.seed)(profile(given(cases(target.space))(execute)))()
        except _Mismatch as found:
            self._record(found.outcome, None)
        except _DeviceLost as lost:
            self.report.stopped = (
                f"{target.device} was lost: a kernel broke its context, and nothing more can run on it"
            )
            self._record(lost.outcome, None)
        except errors.Flaky as flaky:
            self._record(self._flaky(target, flaky), None)
        return max(last - first, 1)

    def _check_alive(self, target: Target, outcomes: list[Outcome]) -> None:
        """After a crash, find out whether the GPU can go on: an illegal access ends every context of the process."""
        crashes = [o for o in outcomes if o.failure is not None and o.failure.check == "crash"]
        if crashes and target.device != "cpu":
            import torch

            try:
                torch.zeros(1, device=target.device).item()
            except RuntimeError:
                raise _DeviceLost(crashes[0]) from None

    def _carrier(self, kind: tuple[str, str, str]) -> type[_Mismatch]:
        return self.kinds.setdefault(kind, type(f"Mismatch in {kind[2]} of {kind[1]}", (_Mismatch,), {}))

    def _flaky(self, target: Target, flaky: errors.Flaky) -> Outcome:
        """A failure that did not come again when its case was run again: the kernel does not repeat itself."""
        found = next((error for error in _leaves(flaky) if isinstance(error, _Mismatch)), None)
        assert found is not None, flaky
        old = found.outcome.failure
        assert old is not None
        failure = Failure(old.check, f"{old.message}; it did not fail again when run again", old.index)
        return Outcome(found.outcome.case, found.outcome.backend, target.device, "mismatch", None, failure=failure)

    def _record(self, outcome: Outcome, path: Path | None) -> None:
        self.known.add(_kind(outcome))
        from_corpus = path is not None
        if path is None and self.plan.corpus is not None:
            path = corpus.save(outcome, self.plan.corpus)
        self.report.failures.append(Found(outcome, path, from_corpus))
        self.focus, self.smallest = None, None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """An exception with everything that it groups, contains or was caused by."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__cause__, error.__context__):
        if inner is not None:
            yield from _leaves(inner)


def run(plan: Plan, progress: Progress = lambda report, doing: None) -> Report:
    """Carry out ``plan``.

    Raises:
        InvalidProblem: a corpus file is damaged, or there is nothing to run.
        VerificationError: the references disagree.
    """
    if not plan.targets or not any(target.backends for target in plan.targets):
        raise InvalidProblem("nothing to verify: no backend was named that this machine has")
    return Run(plan, progress)()


def targets(devices: Sequence[str], backends: Sequence[str]) -> tuple[Target, ...]:
    """The usual targets: every backend on each device, small cases on the CPU and larger ones on a GPU."""
    found = []
    for device in devices:
        if device == "cpu":
            space = Space()
        else:
            space = Space(libraries=("torch", "cupy") if _has_cupy() else ("torch",), work=2**22, longest=2100)
        found.append(Target(device, tuple(backends), space))
    return tuple(found)


def _has_cupy() -> bool:
    """Whether CuPy is here and sees a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # not installed, or no driver: either way there are no CuPy arrays to test with
        return False
