"""Is the choice right? Every candidate of problems that nobody tuned for, timed by the application's clock.

Nothing that runs here changes what the choice rests on: what this machine has measured, what is shipped, the model.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import attnswitch
from attnswitch import child
from attnswitch.bench import deviation, workload
from attnswitch.bench.candidates import AUTO, Refused, fitting, of_backend
from attnswitch.bench.loops import Loop, loops
from attnswitch.bench.measure import Budget, current, release, wait
from attnswitch.bench.peers import PEERS
from attnswitch.bench.steps import first_line, step, wrong
from attnswitch.problem import Problem

__all__ = ["TORCH", "Judged", "Summary", "build", "judge", "summaries"]

#: Torch's own call, which chooses by itself.
TORCH = "torch"


@dataclass(slots=True)
class Judged:
    """One problem: what was chosen and why, the times by candidate, and why others have none.

    Candidates are the backends that take the problem, the choice as a program meets it ("auto"), and "torch".
    """

    problem: Problem
    chosen: str | None
    why: str
    times: dict[str, Loop] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        """The backend with the least time, beside the chosen one in the same rounds where that was timed."""
        backends = [name for name in self.times if name not in (AUTO, TORCH)]
        if self.chosen not in backends:
            return min(backends, key=lambda name: self.times[name].median, default=None)
        chosen = self.times[self.chosen]
        return min(backends, key=lambda name: self.times[name].over(chosen))

    @property
    def regret(self) -> float | None:
        """How many times as long the chosen backend takes as the fastest; None where one of them has no time."""
        if self.fastest is None or self.chosen not in self.times:
            return None
        return self.times[self.chosen].over(self.times[self.fastest])

    @property
    def beside_torch(self) -> float | None:
        """The time of the choice over that of torch's own call; None where torch cannot say it, or is wrong."""
        if TORCH not in self.times or AUTO not in self.times:
            return None
        return self.times[AUTO].over(self.times[TORCH])

    def to_json(self) -> dict[str, Any]:
        """The fields by name, times in milliseconds to five digits."""
        times = {
            name: {key: float(f"{value:.5g}") for key, value in asdict(loop).items() if key != "rounds"}
            for name, loop in self.times.items()
        }
        ratios = {"regret": self.regret, "beside_torch": self.beside_torch}
        rounded = {name: None if ratio is None else round(ratio, 4) for name, ratio in ratios.items()}
        plain = {"problem": str(self.problem), "chosen": self.chosen, "why": self.why, **rounded}
        return {**plain, "times": times, "failed": self.failed}


@dataclass(frozen=True, slots=True)
class Summary:
    """Of problems in one direction: geometric mean and worst of a ratio, and the problem of that."""

    ratio: str
    direction: str
    count: int
    mean: float
    worst: float
    problem: str


def summaries(judged: Iterable[Judged]) -> list[Summary]:
    """The regrets, and the ratios to torch's own call, of forwards and of training steps."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for each in judged:
        direction = "training" if each.problem.grads else "forward"
        for name in ("regret", "beside_torch"):
            ratio = getattr(each, name)
            if ratio is not None:
                found.setdefault((name, direction), []).append((ratio, str(each.problem)))
    return [
        Summary(name, direction, len(all_), statistics.geometric_mean(ratio for ratio, _ in all_), *max(all_))
        for (name, direction), all_ in found.items()
    ]


def build(problems: Sequence[Problem], where: str, processes: int) -> Iterator[Problem]:
    """Run every candidate once in other processes, so that what they compile is kept for this one; as each is done.

    A process that dies takes the rest with it: they are compiled when they are timed.
    """
    with contextlib.suppress(Exception):
        with child.safe_path():
            pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
            asked = {pool.submit(_run_all, str(problem), where): problem for problem in problems}
        with pool:
            for done in as_completed(asked):
                done.result()
                yield asked[done]


def _run_all(text: str, where: str) -> None:
    """In a process of its own: each candidate once."""
    with current(where), contextlib.suppress(Exception):
        work = workload.of(Problem.parse(text), where)
        for name in fitting(work):
            with contextlib.suppress(Exception):
                step(of_backend(name, work), work)()
                wait(where)
    if where != "cpu":
        torch.cuda.empty_cache()


def judge(problem: Problem, where: str, budget: Budget) -> Judged:
    """Time the candidates of ``problem``, and see that each is right. Never raises for what one of them does."""
    with current(where):
        try:
            work = workload.of(problem, where)
            plan = attnswitch.explain(work.query, work.key, work.value, **work.keywords())
            judged = Judged(problem, plan.backend, plan.why)
            reference = deviation.make(work)
        except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as error:
            return Judged(problem, None, "", failed={"": first_line(error)})
        calls: dict[str, Callable[[], Any]] = {}
        for name in (*fitting(work), AUTO, TORCH):
            try:
                attend = PEERS[TORCH](work) if name == TORCH else of_backend(name, work)
                call = step(attend, work)
                why = wrong(call(), reference)
            except Refused as refusal:
                why = str(refusal)
            except Exception as error:  # kernels fail in many ways
                why = first_line(error)
            if why:
                judged.failed[name] = why
            else:
                calls[name] = call

        def failed(name: str, error: Exception) -> None:
            judged.failed[name] = first_line(error)

        judged.times = loops(calls, where, budget=budget, failed=failed)
        calls.clear()
        del work, reference
    release(where, graphs=bool(problem.grads))
    return judged
