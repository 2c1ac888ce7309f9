"""The application's clock: calls in a loop that waits for nothing, so that the host counts wherever the device waits.

``measure`` in ``attnswitch.bench.measure`` has the device's. Here candidates take turns as there, each with a loop of
calls, and the device is waited for before and after a loop alone. Caches are as warm as a loop leaves them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnswitch.bench.measure import Budget, Failed, current, wait

__all__ = ["Loop", "loops", "rested"]

#: Calls of a loop: as many as take so many milliseconds, far fewer than a GPU queues; and after a rest, within what the
#: system gives to a thread at a time.
_LOOP, _BURST, _FEWEST, _MOST = 4.0, 1.0, 2, 50
#: Loops of each candidate; and the most where the budget is more than the default.
_LEAST, _ROUNDS, _PATIENT = 3, 15, 60
#: A candidate that takes so many times as long as the fastest, twice, is left at that.
_SLOW = 8.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Milliseconds of one call in a loop: the median, the 20th and 80th percentile of ``loops`` loops.

    ``host`` is how long one call takes to return, the median; on the CPU the same as ``median``. ``rounds`` are the
    milliseconds of each loop in the order in which candidates took turns; of one that was left at its first, none.
    """

    median: float
    low: float
    high: float
    host: float
    loops: int
    rounds: tuple[float, ...] = ()

    def over(self, other: Loop) -> float:
        """How many times as long as ``other`` it takes: the median of what they took in the same rounds.

        A host changes its pace from one round to the next. Without rounds in common it is the ratio of the medians.
        """
        pairs = list(zip(self.rounds, other.rounds, strict=False))
        return statistics.median(one / two for one, two in pairs) if pairs else self.median / other.median


def loops(
    candidates: Mapping[str, Callable[[], object]],
    device: str,
    *,
    budget: Budget | None = None,
    failed: Failed | None = None,
    rest: float = 0.0,
) -> dict[str, Loop]:
    """Time ``candidates`` in turn, on ``device`` as torch spells it, each for about the budget's milliseconds.

    One that raises is left out, and ``failed`` told; without ``failed`` the exception is raised. ``rest`` are the
    milliseconds for which nothing is done before each loop (``rested``).
    """
    budget = budget or Budget()
    found: dict[str, list[tuple[float, float]]] = {}
    live = dict(candidates)

    def run(name: str, calls: int) -> tuple[float, float] | None:
        try:
            return _loop(live[name], calls, device, rest)
        except Exception as error:  # a candidate may fail in any way
            if failed is None:
                raise
            del live[name]
            found.pop(name, None)
            failed(name, error)
            return None

    with current(device):
        for name in candidates:
            for calls in (1, 1, 2):  # what is built at first sight is built in the first
                made = run(name, calls) if name in live else None
            if made is not None:
                found[name] = [made]
        fastest = min((times[0][0] for times in found.values()), default=0.0)
        for name in [name for name in live if found[name][0][0] > _SLOW * fastest]:
            made = run(name, 2)
            if made is not None:
                found[name] = [min(made, found[name][0])]
        worth = [name for name in live if found[name][0][0] <= _SLOW * fastest]
        counts = {name: _calls(found[name][0][0], _BURST if rest else _LOOP) for name in worth}
        rounds = {name: _rounds(budget.run, found[name][0][0] * counts[name]) for name in worth}
        in_turn: dict[str, list[float]] = {name: [] for name in live}
        for name in worth:
            found[name].clear()
        order, deal = list(worth), random.Random(0)
        for turn in range(max(rounds.values(), default=0)):
            deal.shuffle(order)
            for name in order:
                if name in live and turn < rounds[name]:
                    made = run(name, counts[name])
                    if made is not None:
                        found[name].append(made)
                        in_turn[name].append(made[0])
    return {name: _summary(found[name], in_turn[name]) for name in live}


def rested(call: Callable[[], object], rest: float) -> None:
    """Do nothing for ``rest`` milliseconds, then call once, which wakes the threads of libraries.

    Beside a program that keeps every core busy, the system lets threads that have slept run at once, and for about a
    millisecond; else those that share a call wait for each other's turns.
    """
    if rest:
        time.sleep(rest / 1e3)
        call()


def _calls(one: float, loop: float) -> int:
    return max(_FEWEST, min(_MOST, round(loop / max(one, 1e-6))))


def _rounds(budget: float, one: float) -> int:
    most = _PATIENT if budget > Budget().run else _ROUNDS
    return max(_LEAST, min(most, round(budget / max(one, 1e-6))))


def _loop(call: Callable[[], object], calls: int, device: str, rest: float) -> tuple[float, float]:
    """Milliseconds of one of so many calls: until all are done, and until the last has returned."""
    rested(call, rest)
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    returned = time.perf_counter()
    wait(device)
    done = time.perf_counter()
    return (done - start) * 1e3 / calls, (returned - start) * 1e3 / calls


def _summary(times: list[tuple[float, float]], rounds: list[float]) -> Loop:
    done = sorted(whole for whole, _ in times)
    last = len(done) - 1
    low, high = done[round(0.2 * last)], done[round(0.8 * last)]
    host = statistics.median(host for _, host in times)
    return Loop(statistics.median(done), low, high, host, len(done), tuple(rounds))
