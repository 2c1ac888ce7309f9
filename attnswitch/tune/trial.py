"""One problem measured: each candidate is verified and tried out, then the good ones are timed in turn.

A time is that of a whole call as an application makes it, in a loop that waits for nothing: the forward, and the
backward too if the problem has gradients. So the host counts wherever the device waits for it; the device's own time is
told beside. A backend that turns out wrong gets a verdict in place of a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnswitch import api
from attnswitch.bench import deviation, workload
from attnswitch.bench.loops import Loop, loops, rested
from attnswitch.bench.measure import Budget, current, measure, release, wait
from attnswitch.bench.steps import first_line
from attnswitch.bench.workload import Workload
from attnswitch.call import recording
from attnswitch.errors import VerificationError, out_of_memory
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import CONTIGUOUS, Problem
from attnswitch.tune import cases
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.verdicts import of_outcome
from attnswitch.wisdom import view
from attnswitch.wisdom.classes import HOPELESS
from attnswitch.wisdom.record import Record, Time, Untimed, Verdict
from attnswitch.wisdom.signature import Signature, sign

__all__ = ["Effort", "Examine", "Trial", "build", "plainly", "run"]

#: Runs a case on some backends of a device, in this process or another; the outcomes are in their order.
Examine = Callable[[Case, Sequence[str], str], list[Outcome]]
#: The most runs when a candidate is tried out, and the milliseconds after which no other run begins.
_TRIES, _TRYING = 5, 100.0
#: How many configs of a backend are timed beside the heuristic's.
_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: the budget of each candidate, and seconds of search for each backend with configs."""

    budget: Budget = field(default_factory=Budget)
    search: float = 2.0
    #: Milliseconds for each candidate by the device's clock, by which nothing is chosen; 0 for not at all.
    device: float = 20.0
    #: Milliseconds of rest before each loop, beside a program that keeps the same cores busy.
    rest: float = 0.0
    #: Backends that are tried though nothing tries them unless it is asked (``Standing.ASKED``).
    asked: tuple[str, ...] = ()


@dataclass(slots=True)
class Trial:
    """The result of one problem. ``failed`` says why a candidate has no time."""

    problem: Problem
    records: list[Record] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    #: Milliseconds by the device's own clock, on a GPU.
    device_ms: dict[str, float] = field(default_factory=dict)
    #: Backends of ``failed`` that lacked memory.
    starved: set[str] = field(default_factory=set)
    #: Backends that were too slow to be timed: how many times as long as the fastest they took when tried out.
    hopeless: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> list[Time]:
        """The times, fastest first."""
        return sorted((record for record in self.records if isinstance(record, Time)), key=lambda time: time.ms)

    @property
    def lasting(self) -> list[Record]:
        """The records that hold whatever else the machine is busy with.

        Where nothing was timed for want of memory, it may be there another time.
        """
        full = self.starved and not self.times
        return [record for record in self.records if not (full and isinstance(record, Untimed))]

    @property
    def wrong(self) -> list[Verdict]:
        """The mismatches."""
        return [record for record in self.records if isinstance(record, Verdict) and not record.right]


@dataclass(slots=True)
class _Entry:
    """A backend with one of its configs, as a call that can be timed."""

    backend: str
    config: str
    call: Callable[[], Any]
    #: Milliseconds of its fastest run when it was tried out.
    tried: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.backend} {self.config}".strip()


def plainly(problem: Problem) -> Problem:
    """``problem`` as it is measured: with contiguous and finite operands."""
    return problem.replace(query=CONTIGUOUS, key=CONTIGUOUS, value=CONTIGUOUS, attn_mask=CONTIGUOUS, nonfinite=False)


@recording.paused()
def run(problem: Problem, where: str, effort: Effort, examine: Examine) -> Trial:
    """Measure ``problem`` on the device that torch calls ``where``. Never raises for what a candidate does."""
    trial = Trial(plainly(problem))
    device = Device.parse(where)
    if not problem.is_empty:
        _measure(trial, device, where, effort, examine)
    done = {record.backend for record in trial.records}
    slow = {name: f"it took {ratio:.3g} times as long as the fastest" for name, ratio in trial.hopeless.items()}
    for backend, why in (trial.failed | slow).items():
        signature = sign(backend, device)  # of a config, whose name is no backend's, there is none
        if backend not in done and isinstance(signature, Signature):
            trial.records.append(Untimed(trial.problem, backend, why, signature, view.now()))
    return trial


@recording.paused()
def build(problem: Problem, where: str, outcomes: Iterable[Outcome]) -> None:
    """Call the verified backends that build something for each shape, so that it is built before ``run``.

    Failures are ignored: they occur again in ``run``, which reports them.
    """
    problem = plainly(problem)
    right = {outcome.backend for outcome in outcomes if outcome.verdict == "verified"}
    building = [name for name in right if registry.loaded(name).builds_per_shape]
    if not building or problem.is_empty:
        return
    with current(where), contextlib.suppress(Exception):
        work = workload.of(problem, where)
        plan = _lying(work)
        for candidate in plan.candidates:
            if candidate.backend in building and candidate.fits and candidate.fault is None:
                with contextlib.suppress(Exception):
                    _whole(replace(plan, chosen=Candidate(candidate.backend)), work)
                    wait(where)
    if where != "cpu":
        torch.cuda.empty_cache()  # the verifier's processes want the memory


def _measure(trial: Trial, device: Device, where: str, effort: Effort, examine: Examine) -> None:
    """Verify, try out and time the candidates."""
    problem = trial.problem
    plan = planner.make_plan(problem, device)
    fitting = [candidate for candidate in plan.candidates if candidate.to_try(effort.asked)]
    try:
        outcomes = examine(cases.of(problem, device.kind), [candidate.backend for candidate in fitting], where)
    except VerificationError as error:  # the verifier could not tell
        trial.failed |= {candidate.backend: str(error) for candidate in fitting}
        return
    right = [c for c, outcome in zip(fitting, outcomes, strict=True) if _verified(c, outcome, trial)]
    with current(where):
        try:
            work = workload.of(problem, where)
            reference = deviation.make(work)
        except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as error:
            for candidate in right:
                _failed(trial, candidate.backend, candidate.backend, error)
            return
        plan = _lying(work)
        taking = [candidate for candidate in right if _taken(candidate, plan, trial)]
        entries = [
            entry
            for candidate in taking
            for entry in _tried(candidate.backend, [""], plan, work, reference, trial, effort.rest)
        ]
        best = min((entry.tried for entry in entries), default=0.0)
        for backend in [entry.backend for entry in entries if entry.tried <= HOPELESS * best]:
            entries += _searched(backend, plan, work, reference, trial, effort)
        _time(entries, trial, device, where, effort)
        del work, reference
        for entry in entries:
            entry.call = _gone
    release(where, graphs=bool(problem.grads))


def _verified(candidate: Candidate, outcome: Outcome, trial: Trial) -> bool:
    """Whether the verifier got the right answer from the backend. What is wrong, or right again, is recorded."""
    verdicts = list(of_outcome(outcome, f"tune {trial.problem}"))
    trial.records += verdicts
    if outcome.verdict != "verified":
        why = outcome.failure.message if outcome.failure else "; ".join(outcome.reasons)
        trial.failed[candidate.backend] = f"{outcome.verdict}: {why}"
        if outcome.starved:
            trial.starved.add(candidate.backend)
        return False
    if candidate.fault is not None and not verdicts:
        trial.failed[candidate.backend] = (
            f"it was wrong here before: {candidate.fault.why} (case {candidate.fault.case})"
        )
        return False
    return True


def _lying(work: Workload) -> Plan:
    """The plan for the tensors as they lie in memory: rows of contiguous ones need not be multiples of 16 bytes."""
    return api.explain(work.query, work.key, work.value, policy=Policy.ESTIMATE, **work.keywords())


def _taken(candidate: Candidate, plan: Plan, trial: Trial) -> bool:
    """Whether the backend takes the tensors as they lie in memory; if not, the reasons are recorded."""
    here = next(other for other in plan.candidates if other.backend == candidate.backend)
    if not here.fits:
        trial.failed[candidate.backend] = "; ".join(plan.why_not(here))
    return here.fits


def _tried(
    backend: str,
    configs: Iterable[str],
    plan: Plan,
    work: Workload,
    reference: deviation.Reference,
    trial: Trial,
    rest: float,
) -> Iterator[_Entry]:
    """The configs of a backend that give the right answer on the whole problem, twice."""
    for config in configs:
        forced = replace(plan, chosen=Candidate(backend, config=config))
        entry = _Entry(backend, config, functools.partial(_whole, forced, work))
        try:
            for _ in range(2):
                if why := reference.wrong(entry.call()):
                    _wrong(entry, trial, work.device, why)
                    break
            else:
                entry.tried = _least(entry.call, work.device, rest)
                yield entry
        except Exception as error:  # kernels fail in many ways
            _failed(trial, entry.backend, entry.name, error)


def _least(call: Callable[[], Any], device: str, rest: float) -> float:
    """Milliseconds of the fastest of a few runs, as other work on the machine may slow down some of them."""
    times: list[float] = []
    while len(times) < _TRIES and sum(times) < _TRYING:
        rested(call, rest)
        start = time.perf_counter()
        call()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def _whole(plan: Plan, work: Workload) -> tuple[torch.Tensor, ...]:
    """One call as an application makes it, with the backward if the problem has gradients."""
    p = work.problem
    result = plan(work.query, work.key, work.value, **work.arrays())
    out = result[0] if p.lse else result
    if not p.grads:
        return (out,)
    return torch.autograd.grad(out, work.leaves, work.grad_out)


def _searched(
    backend: str, plan: Plan, work: Workload, reference: deviation.Reference, trial: Trial, effort: Effort
) -> list[_Entry]:
    """The best configs of a backend, beside the heuristic's, that a random search tries in its time."""
    loaded: Any = registry.load(backend)
    configs = loaded.configs(one_by_one.asked(loaded, plan.problem), plan.device)
    others = [str(config) for config in itertools.islice(configs, 1, None)]
    random.Random(str(trial.problem)).shuffle(others)
    end = time.monotonic() + effort.search
    trying = itertools.takewhile(lambda _: time.monotonic() < end, others)
    right = list(_tried(backend, trying, plan, work, reference, trial, effort.rest))
    return sorted(right, key=lambda entry: entry.tried)[:_FINALISTS]


def _time(entries: list[_Entry], trial: Trial, device: Device, where: str, effort: Effort) -> None:
    """Time the candidates that are not hopeless in turn, and record the best config of each backend."""
    best = min((entry.tried for entry in entries), default=0.0)
    worth = {entry.name: entry for entry in entries if entry.tried <= HOPELESS * best}

    def failed(name: str, error: Exception) -> None:
        _failed(trial, worth[name].backend, name, error)

    calls = {name: entry.call for name, entry in worth.items()}
    times = loops(calls, where, budget=effort.budget, failed=failed, rest=effort.rest)
    on_device = {}
    if where != "cpu" and effort.device:
        calls = {name: calls[name] for name in times}
        on_device = measure(calls, where, budget=Budget(0.0, effort.device), failed=failed)
    ranked = sorted(times, key=lambda name: times[name].median)
    for backend in dict.fromkeys(entry.backend for entry in entries):
        mine = [entry for entry in entries if entry.backend == backend]
        name = next((name for name in ranked if worth[name].backend == backend), None)
        if name is not None:
            trial.records += _record(worth[name], trial.problem, device, times[name])
            if name in on_device:
                trial.device_ms[backend] = on_device[name].median
        elif not any(
            entry.name in worth for entry in mine
        ):  # those that failed while they were timed are in ``failed``
            trial.hopeless[backend] = min(entry.tried for entry in mine) / best


def _record(entry: _Entry, problem: Problem, device: Device, t: Loop) -> Iterator[Record]:
    signature = sign(entry.backend, device)
    if isinstance(signature, Signature):
        figures = t.median, t.low, t.high, t.loops, torch.get_num_threads()
        yield Time(problem, entry.backend, entry.config, *figures, signature, view.now())


def _wrong(entry: _Entry, trial: Trial, where: str, why: str) -> None:
    """Record a wrong result: for the backend if the config is the heuristic's, else only as a failure of the config."""
    trial.failed[entry.name] = f"mismatch: {why}"
    signature = sign(entry.backend, Device.parse(where))
    if isinstance(signature, Signature) and not entry.config:
        case = f"tune {trial.problem}"
        trial.records.append(Verdict(trial.problem, entry.backend, False, case, why, signature, view.now()))


def _failed(trial: Trial, backend: str, name: str, error: Exception) -> None:
    """Record that the candidate ``name`` of ``backend`` raised."""
    trial.failed[name] = first_line(error)
    if out_of_memory(error):
        trial.starved.add(backend)


def _gone() -> None:
    """In place of a call that held memory."""
