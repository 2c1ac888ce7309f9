"""Where jobs run: ``Here`` in this process, ``Isolated`` in worker processes of each device, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from types import TracebackType
from typing import Protocol

from attnswitch.errors import InvalidProblem, VerificationError
from attnswitch.machine import builds
from attnswitch.machine.device import Device
from attnswitch.verify import emulation, terms
from attnswitch.verify.court import limits
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.events import Done, Event, Examined, Lost, Smaller
from attnswitch.verify.session.explore import Examine, Given, Job, Source, carry_out
from attnswitch.verify.session.plan import Plan
from attnswitch.verify.session.process import Died, Process
from attnswitch.verify.session.worker import recording

__all__ = ["Here", "Isolated", "Late", "Pool"]

#: Workers of the CPU at the most, and of a GPU, with bytes of its memory for each.
_MOST, _MOST_OF_GPU, _MEMORY = 8, 16, 4 * 2**30
#: Seconds between two looks at workers that send nothing.
_GLANCE = 0.5
#: Jobs by the device to carry them out on.
Jobs = dict[str, Iterator[Job]]
Stop = Callable[[], bool]
Take = Callable[[str, Source, Event], None]


class Late(Exception):
    """A case was dropped, as there was no more time for it."""


def _never() -> bool:
    return False


class Pool(Protocol):
    """Carries out jobs, and runs single cases."""

    #: Worker processes of all devices together; 1 for this process.
    size: int

    def carry_out(self, jobs: Jobs, stop: Stop, take: Take) -> None:
        """Carry out ``jobs``; give each event to ``take``, after its device and the source of its cases.

        Once ``stop()`` is true, drop what runs.
        """

    def attempt(
        self,
        case: Case,
        backend: str,
        device: str,
        only: bool = False,
        timeout: float | None = None,
        stop: Stop = _never,
    ) -> Outcome:
        """The outcome of one case on one backend, also if it crashes or hangs the process that it runs in.

        Raises ``Late`` once ``stop()`` is true.
        """

    @property
    def provenance(self) -> dict[str, str]:
        """Versions and devices as the worker processes saw them; empty if kernels ran in this process."""

    def __enter__(self) -> Pool:
        """Begin."""

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """End all processes."""


class Here:
    """Jobs in this process, one after the other: for tests and debuggers."""

    size = 1

    def __init__(self, plan: Plan, examine: Examine | None = None) -> None:
        """``examine`` tries cases in place of this process."""
        self._plan = plan
        self._examine = examine or recording(None)

    def carry_out(self, jobs: Jobs, stop: Stop, take: Take) -> None:
        """See ``Pool``."""
        queues = dict(jobs)
        try:
            while queues:
                for device in list(queues):
                    job = next(queues[device], None)
                    if job is None:
                        del queues[device]
                        continue
                    with terms.within(self._plan.terms):
                        carry_out(job, self._examine, partial(_give, stop, take, device, job.source))
        except _Stopped:
            return

    def attempt(
        self,
        case: Case,
        backend: str,
        device: str,
        only: bool = False,
        timeout: float | None = None,
        stop: Stop = _never,
    ) -> Outcome:
        """See ``Pool``. A case that crashes the process ends the run."""
        if stop():
            raise Late
        with terms.within(self._plan.terms):
            return _only(self._examine(case, (backend,), device, only), case, backend, device)

    @property
    def provenance(self) -> dict[str, str]:
        """Empty: there is no worker process."""
        return {}

    def __enter__(self) -> Here:
        for target in self._plan.targets:
            others = [other.device for other in self._plan.targets if other.on_gpu]
            if target.emulation and others:
                raise InvalidProblem(
                    f"one process cannot emulate {', '.join(target.backends)} on the CPU and run on {', '.join(others)}"
                    " as well: name one device, or leave out --no-isolate"
                )
            emulation.begin(target.emulation)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass


class _Stopped(BaseException):
    """Ends a job in this process; not an ``Exception``, so that Hypothesis lets it through."""


def _give(stop: Stop, take: Take, device: str, source: Source, event: Event) -> None:
    take(device, source, event)
    if stop():
        raise _Stopped


@dataclass(slots=True)
class _Seat:
    """A place for one worker: its device, its process while that lives, and its current job."""

    device: str
    number: int
    #: Started with the first job.
    process: Process | None = None
    job: Job | None = None
    #: The number of the next case of the job. It has not begun while an earlier failure is shrunk.
    at: int = 0
    shrinking: bool = False

    @property
    def running(self) -> Process:
        """The process of a seat that has a job."""
        assert self.process is not None
        return self.process

    def end(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.end()
            self.process = None


class Isolated:
    """Jobs in worker processes. A process that dies is a failure of its case; a new one goes on with the next case."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seats: list[_Seat] = []
        self._spare: dict[str, Process] = {}
        self._emulation = {target.device: target.emulation for target in plan.targets}
        for target in plan.targets:
            self._seats += [_Seat(target.device, n) for n in range(_workers(plan, target.device))]
        self.size = len(self._seats)
        self._provenance: dict[str, str] = {}
        self._closed = False
        self._limits = limits.held()

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed = True
        for seat in self._seats:
            seat.end()
        for process in self._spare.values():
            process.end()

    def _process(self, device: str, number: int = 1) -> Process:
        """A new process. On the CPU each has one thread; the first has two, as some faults need two threads to show."""
        self._go_on()
        threads = (2 if number == 0 else 1) if device == "cpu" else max(1, builds.cores() // self.size)
        return Process(device, threads, self._emulation[device], self._plan.terms)

    def _go_on(self) -> None:
        """Raise ``VerificationError`` if the pool was closed while another thread ran a case."""
        if self._closed:
            raise VerificationError("the verifier was ended")

    @property
    def provenance(self) -> dict[str, str]:
        """That of the worker that reports most: one with a GPU, if there is any."""
        return self._provenance

    def carry_out(self, jobs: Jobs, stop: Stop, take: Take) -> None:
        """See ``Pool``."""
        queues = dict(jobs)
        for seat in self._seats:
            self._begin(seat, None if stop() else self._next(seat, queues))
        while busy := {seat.running.events: seat for seat in self._seats if seat.job is not None}:
            ready = wait(list(busy), timeout=_GLANCE)
            limits.restored(self._limits)  # which a kernel may lower for any process
            for connection, seat in busy.items():
                assert seat.job is not None
                source = seat.job.source
                try:
                    # It may have become ready since, as the event of another worker can take long to handle.
                    if connection in ready or connection.poll(0):
                        self._hear(seat, queues, take)
                    else:
                        seat.running.watch(self._plan.timeout)
                except Died as death:
                    take(seat.device, source, self._buried(seat, death))
            if stop():
                self._drop()

    def _next(self, seat: _Seat, queues: Jobs) -> Job | None:
        return next(queues[seat.device], None) if seat.device in queues else None

    def _begin(self, seat: _Seat, job: Job | None) -> None:
        seat.job = job
        if job is not None:
            seat.at = job.first
            seat.process = seat.process or self._process(seat.device, seat.number)
            seat.process.send(job)

    def _hear(self, seat: _Seat, queues: Jobs, take: Take) -> None:
        assert seat.job is not None
        event, source = seat.running.receive(), seat.job.source
        self._provenance = max(self._provenance, seat.running.provenance, key=len)
        if isinstance(event, Examined):
            seat.at = max(seat.at, event.number + (not event.more))
        seat.shrinking = isinstance(event, Smaller)
        if isinstance(event, Done):
            self._begin(seat, self._next(seat, queues))
        elif isinstance(event, Lost):
            seat.at = max(seat.at, event.number + 1)
            self._replace(seat)
        if not isinstance(event, Done):
            take(seat.device, source, event)

    def _buried(self, seat: _Seat, death: Died) -> Lost:
        """The failure that a death is. The seat gets a new process and goes on."""
        if death.entry is None:
            raise VerificationError(f"a worker process was lost before it ran anything: {death.how}")
        number = seat.at
        if not seat.shrinking:
            seat.at += 1
        self._replace(seat)
        entry = death.entry
        return Lost(Outcome(entry.case, entry.backend, seat.device, "mismatch", failure=death.failure), number)

    def _replace(self, seat: _Seat) -> None:
        """Start a new process with the rest of the job."""
        seat.end()
        self._begin(seat, None if seat.job is None else _rest(seat.job, seat.at))

    def _drop(self) -> None:
        """End all processes that have a job."""
        for seat in self._seats:
            if seat.job is not None:
                seat.end()
                seat.job = None

    def attempt(
        self,
        case: Case,
        backend: str,
        device: str,
        only: bool = False,
        timeout: float | None = None,
        stop: Stop = _never,
        unguarded: bool = False,
    ) -> Outcome:
        """See ``Pool``. ``unguarded`` runs the backend on what it refuses."""
        ran = self._launch(Given(device, ((case, (backend,)),), only=only, unguarded=unguarded), timeout, stop)
        return ran if isinstance(ran, Outcome) else _only(ran, case, backend, device)

    def examine(self, case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
        """The outcomes of one case on several backends, which share the reference.

        If one of them ends the process, each backend is run again alone, so that every one has an outcome.
        """
        ran = self._launch(Given(device, ((case, tuple(backends)),)), None)
        if isinstance(ran, Outcome):
            return [self.attempt(case, backend, device) for backend in backends]
        return list(ran)

    def _launch(self, job: Given, timeout: float | None, stop: Stop = _never) -> tuple[Outcome, ...] | Outcome:
        """The outcomes of a job of one case, or the single outcome of a backend that ended the process."""
        if stop():
            raise Late
        device, ((case, backends),) = job.device, job.cases
        process = self._spare.pop(device, None) or self._process(device)
        timeout = timeout or self._plan.timeout
        outcomes: tuple[Outcome, ...] | None = None
        try:
            process.send(job)
            while True:
                while not wait([process.events], timeout=_GLANCE):
                    self._go_on()
                    if stop():
                        raise Late
                    process.watch(timeout)
                event = process.receive()
                if isinstance(event, Examined):
                    outcomes = event.outcomes
                elif isinstance(event, Done):
                    assert outcomes is not None
                    self._spare[device] = process
                    return outcomes
                elif isinstance(event, Lost):
                    return event.outcome
        except Died as death:
            return Outcome(case, backends[0], device, "mismatch", failure=death.failure)
        finally:
            if self._spare.get(device) is not process:
                process.end()


def _only(outcomes: Sequence[Outcome], case: Case, backend: str, device: str) -> Outcome:
    """The outcome of a case. It is "refused" if only its own check was run and that does not apply to it."""
    if outcomes:
        return outcomes[0]
    return Outcome(case, backend, device, "refused", reasons=(f"{case.check} says nothing about it",))


def _rest(job: Job, at: int) -> Job | None:
    """The rest of a job from case ``at`` on, or None."""
    if isinstance(job, Given):
        cases = job.cases[at - job.first :]
        return replace(job, cases=cases, first=at) if cases else None
    left = job.first + job.count - at
    return replace(job, first=at, count=left) if left > 0 else None


def _workers(plan: Plan, device: str) -> int:
    """The number of workers of a device: as asked for, else one for each CPU core, up to eight.

    Those of a GPU mostly compile: they share the cores and its memory among as many GPUs as there are to try.
    """
    if plan.workers is not None:
        return plan.workers
    cores = builds.cores()
    if device == "cpu":
        return min(_MOST, cores)
    gpus = sum(target.on_gpu for target in plan.targets)
    return max(1, min(_MOST_OF_GPU, cores // gpus, Device.parse(device).memory // _MEMORY))
