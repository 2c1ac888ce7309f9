"""How fast a backend is beside the fastest of others, by the clock of this process.

Every turn has numbers that none has met, and one call of each: who remembers answers gains nothing. Each result is held
against the answer after its time was taken. What stands before the verifier's court is timed as its judge sees it, with
what it takes to hand arrays over.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnswitch.bench import deviation, workload
from attnswitch.bench.candidates import of_backend
from attnswitch.bench.measure import current, wait
from attnswitch.bench.steps import first_line, step, wrong
from attnswitch.problem import Problem

__all__ = ["Beside", "beside"]

#: Turns whose times count, where a turn takes no more than so many seconds, and where it does; what is built at first
#: sight is built in one before.
_TURNS, _LONG, _FEW = 15, 1.0, 3
#: One that takes so many times as long as the fastest in those few has no part in the others, if not asked of.
_SLOW = 8.0


@dataclass(slots=True)
class Beside:
    """Milliseconds of a call by backend, the median of turns; and why others have none."""

    problem: Problem
    milliseconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def fastest(self, apart_from: Sequence[str]) -> str | None:
        """Of the backends that are not named."""
        others = (name for name in self.milliseconds if name not in apart_from)
        return min(others, key=self.milliseconds.__getitem__, default=None)


def beside(problem: Problem, where: str, asked: Sequence[str], others: Sequence[str]) -> Beside:
    """Time the backends ``asked`` of and ``others`` in turns, on ``where`` as torch spells it.

    Never raises for what one of them does.
    """
    found, names, deal = Beside(problem), [*asked, *others], random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    turns, turn = _TURNS, 0
    with current(where):
        while turn <= turns:
            deal.shuffle(names)
            began = time.perf_counter()
            _turn(found, where, names, times, workload.SEED + turn)
            took = time.perf_counter() - began
            names = [name for name in names if name not in found.failed]
            if turn == _FEW:
                turns = _TURNS if took < _LONG else _FEW
                least = {name: min(times[name][1:]) for name in names}
                fastest = min(least.values(), default=0.0)
                names = [name for name in names if name in asked or least[name] <= _SLOW * fastest]
            turn += 1
    found.milliseconds = {name: statistics.median(times[name][1:]) for name in names}
    return found


def _turn(found: Beside, where: str, names: Sequence[str], times: dict[str, list[float]], seed: int) -> None:
    work = workload.of(found.problem, where, seed=seed)
    reference = deviation.make(work)
    for name in names:
        try:
            call = step(of_backend(name, work), work)
            wait(where)
            start = time.perf_counter()
            results = call()
            wait(where)
            times[name].append((time.perf_counter() - start) * 1e3)
            why = wrong(results, reference)
        except Exception as error:  # kernels fail in many ways
            why = first_line(error)
        if why:
            found.failed[name] = why
