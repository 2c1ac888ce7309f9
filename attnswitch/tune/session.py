"""Problems measured one after the other. Results are remembered at once, so that an interrupted run can go on.

Some problems at a time are verified first, in processes side by side, so that a kernel which crashes or hangs is only
a failure. Meanwhile the kernels that were verified are compiled, which takes longer than timing them. Nothing else runs
while candidates are timed.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import Problem
from attnswitch.tune import cases, trial
from attnswitch.tune.trial import Effort, Trial
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import AUTO, Outcome
from attnswitch.verify.session import apart
from attnswitch.verify.session.pool import Isolated
from attnswitch.wisdom import store, view

__all__ = ["Tuned", "known", "run"]

#: The most processes of the verifier, and the free bytes of GPU memory that each needs.
_MOST, _EACH = 16, 2 * 2**30
#: Problems that each process verifies before the first of them is timed. An interruption loses so much work.
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of one problem: the backend chosen before, the trial, and the backend chosen since."""

    problem: Problem
    before: str | None
    after: str | None
    trial: Trial


def known(problem: Problem, where: str, asked: Collection[str] = ()) -> bool:
    """Whether every backend that may be chosen for the class of ``problem`` was measured, or measuring was tried.

    So it is of those that were ``asked`` for.
    """
    plan = planner.make_plan(problem, Device.parse(where))
    missing = any(c.time is None and c.untimed is None for c in plan.candidates if c.backend in asked and c.fits)
    return plan.chosen is not None and not missing and not any(candidate.open for candidate in plan.candidates)


def run(problems: Sequence[Problem], where: str, effort: Effort, timeout: float) -> Iterator[Tuned]:
    """Measure ``problems`` on the device that torch calls ``where``. Verifying one case may take ``timeout`` seconds.

    Raises:
        InvalidProblem: the store cannot be written; nothing was measured.
        OSError: the store could not be written later.
    """
    if not problems:
        return
    store.here().check()
    device = Device.parse(where)
    with _Verifiers(min(_processes(where), len(problems)), where, timeout) as verifiers:
        many = _AHEAD * verifiers.count
        for start in range(0, len(problems), many):
            part = problems[start : start + many]
            for problem, outcomes in zip(part, verifiers.verified(part, device, effort.asked), strict=True):
                before = planner.make_plan(problem, device).backend
                tried = trial.run(problem, where, effort, functools.partial(_known_by_now, outcomes))
                view.remember(tried.records)
                yield Tuned(problem, before, planner.make_plan(problem, device).backend, tried)


def _known_by_now(outcomes: Future[list[Outcome]], *_: object) -> list[Outcome]:
    """An ``Examine`` that returns what another thread examined, or raises what that raised."""
    return outcomes.result()


def _processes(where: str) -> int:
    """The number of processes: one for each core, and no more than the memory of a GPU holds."""
    cores = min(_MOST, os.cpu_count() or 1)
    if where == "cpu":
        return cores
    import torch

    free, _ = torch.cuda.mem_get_info(where)
    return max(1, min(cores, free // _EACH))


class _Verifiers:
    """Threads with one process of the verifier each, which starts with the first case."""

    def __init__(self, count: int, where: str, timeout: float) -> None:
        self.count, self._where = count, where
        self._pools = [apart.pool(where, AUTO, timeout) for _ in range(count)]
        self._idle: SimpleQueue[Isolated] = SimpleQueue()
        for pool in self._pools:
            self._idle.put(pool)
        self._threads = ThreadPoolExecutor(count)

    def verified(
        self, problems: Sequence[Problem], device: Device, asked: Collection[str]
    ) -> list[Future[list[Outcome]]]:
        """For each of ``problems``, the outcomes of all backends that take it and are tried. All futures are done."""
        verifying = dict[Future[list[Outcome]], Problem]()
        # Neighbours share kernels, which the first of them compiles for the others.
        for problem in itertools.chain.from_iterable(problems[first::_AHEAD] for first in range(_AHEAD)):
            plain = trial.plainly(problem)
            fitting = [c.backend for c in planner.make_plan(plain, device).candidates if c.to_try(asked)]
            verifying[self._threads.submit(self._examine, cases.of(plain, device.kind), fitting)] = problem
        for future in as_completed(verifying):
            if future.exception() is None:
                trial.build(verifying[future], self._where, future.result())
        by_problem = {problem: future for future, problem in verifying.items()}
        return [by_problem[problem] for problem in problems]

    def _examine(self, case: Case, backends: list[str]) -> list[Outcome]:
        pool = self._idle.get()
        try:
            return pool.examine(case, backends, self._where)
        finally:
            self._idle.put(pool)

    def __enter__(self) -> _Verifiers:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for pool in self._pools:  # a thread that runs a case ends with its process
            pool.__exit__()
        self._threads.shutdown(cancel_futures=True)
