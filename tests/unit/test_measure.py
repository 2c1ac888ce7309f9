"""The timing protocol: turns, medians, budgets, candidates that fail, and the limits of a device."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from attnswitch.bench.measure import LEAST, MOST, Budget, Timing, limits, measure
from attnswitch.errors import InvalidProblem


class FakeClock:
    """A clock that candidates advance themselves: the answers can be read only once ``finish`` was called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = True
        self.host: list[float] = []

    def run(self, call: Callable[[], object]) -> Callable[[], float]:
        start = self.now
        call()
        elapsed = self.now - start
        self.waited = False

        def answer() -> float:
            assert self.waited
            return elapsed

        return answer

    def finish(self) -> None:
        self.waited = True

    def head_start(self, host: float) -> None:
        self.host.append(host)


def takes(clock: FakeClock, log: list[str], name: str, times: Iterator[float]) -> Callable[[], None]:
    def call() -> None:
        log.append(name)
        clock.now += next(times)

    return call


def forever(*times: float) -> Iterator[float]:
    while True:
        yield from times


def test_candidates_take_turns_in_another_order_each_round() -> None:
    clock, log = FakeClock(), list[str]()
    calls = {name: takes(clock, log, name, forever(1.0)) for name in "abc"}
    measure(calls, "cpu", budget=Budget(5.0, 20.0), clock=clock)
    rounds = ["".join(log[start : start + 3]) for start in range(len(log) - 75, len(log), 3)]  # five to warm up
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert len(clock.host) == 1
    again = list[str]()
    again_calls = {name: takes(clock, again, name, forever(1.0)) for name in "abc"}
    measure(again_calls, "cpu", budget=Budget(5.0, 20.0), clock=clock)
    assert again == log


def test_fewer_runs_are_spread_over_all_rounds() -> None:
    clock, log = FakeClock(), list[str]()
    calls = {"fast": takes(clock, log, "fast", forever(1.0)), "slow": takes(clock, log, "slow", forever(5.0))}
    found = measure(calls, "cpu", budget=Budget(1.0, 100.0), clock=clock)
    assert (found["fast"].runs, found["slow"].runs) == (100, 20)
    for start in range(0, 120, 24):  # each fifth of the time has a fifth of both
        assert Counter(log[-120:][start : start + 24]) == {"fast": 20, "slow": 4}


def test_the_median_and_its_neighbours() -> None:
    clock = FakeClock()
    times = iter([1.0] * 5 + [float(n) for n in range(10, 0, -1)])  # a first run, trials and warm-up, then 10 to 1
    (timing,) = measure({"a": takes(clock, [], "a", times)}, "cpu", budget=Budget(1.0, 10.0), clock=clock).values()
    assert (timing.median, timing.runs) == (5.5, 10)
    assert (timing.low, timing.high) == pytest.approx((2.8, 8.2))


@pytest.mark.parametrize(("one", "runs"), [(1000.0, LEAST), (1.0, 100), (1e-9, MOST)])
def test_a_budget_has_least_and_most_runs(one: float, runs: int) -> None:
    assert Budget(25.0, 100.0).runs(one) == runs
    assert Budget(25.0, 100.0).warm(1000.0) == 1
    assert (Budget(1e308, 1e308).warm(1e-9), Budget(1e308, 1e308).runs(1e-9)) == (MOST, MOST)


@pytest.mark.parametrize("ms", [float("inf"), float("nan"), -1.0])
def test_a_budget_is_a_time(ms: float) -> None:
    with pytest.raises(InvalidProblem, match="expected a finite number of milliseconds"):
        Budget(1.0, ms)


@pytest.mark.parametrize("good_runs", [0, 2, 5, 9])
def test_a_candidate_that_fails_is_left_out(good_runs: int) -> None:
    """At its first run, in its trials, in its warm-up, or while it is measured."""
    clock, left = FakeClock(), [good_runs]

    def fails() -> None:
        clock.now += 1.0
        left[0] -= 1
        if left[0] < 0:
            raise ZeroDivisionError("not today")

    failures: dict[str, Exception] = {}
    calls = {"bad": fails, "good": takes(clock, [], "good", forever(2.0))}
    found = measure(calls, "cpu", budget=Budget(3.0, 20.0), clock=clock, failed=failures.__setitem__)
    assert list(found) == ["good"]
    assert (found["good"].median, found["good"].runs) == (2.0, 10)
    assert {name: str(error) for name, error in failures.items()} == {"bad": "not today"}


def test_a_failure_that_nobody_is_told_of_is_raised() -> None:
    def fails() -> None:
        raise ZeroDivisionError("not today")

    with pytest.raises(ZeroDivisionError, match="not today"):
        measure({"bad": fails}, "cpu")


def test_a_lost_device_takes_every_candidate_with_it() -> None:
    class Lost(FakeClock):
        def finish(self) -> None:
            super().finish()
            if self.host:
                raise RuntimeError("illegal address")

    failures: dict[str, Exception] = {}
    clock = Lost()
    calls = {name: takes(clock, [], name, forever(1.0)) for name in "ab"}
    assert measure(calls, "cpu", clock=clock, failed=failures.__setitem__) == {}
    assert sorted(failures) == ["a", "b"]


def test_nothing_to_measure() -> None:
    assert measure({}, "cpu") == {}


def test_the_wall_clock_tells_long_from_short() -> None:
    found = measure(
        {"short": lambda: sum(range(100)), "long": lambda: sum(range(100_000))}, "cpu", budget=Budget(1.0, 5.0)
    )
    assert list(found) == ["short", "long"]
    for timing in found.values():
        assert isinstance(timing, Timing)
        assert 0 < timing.low <= timing.median <= timing.high
        assert timing.runs >= LEAST
    assert found["long"].median > 10 * found["short"].median


def test_the_limits_of_the_cpu() -> None:
    found = limits("cpu", Budget(1.0, 1.0))
    assert (found.size, found.dtype, found.copied) == (1024, "float32", 2**26)
    assert 1e-3 < found.tflops < 100  # from a busy core to a large server
    assert 0.1 < found.gbps < 10_000


def test_importing_it_imports_no_array_library() -> None:
    modules = "sys, attnswitch.bench.measure, attnswitch.problem.cost"
    program = f"import {modules}; print({{'torch', 'numpy', 'cupy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_head_start_is_that_of_the_slowest_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trials; told is the fastest."""
    now = iter([0.0, 0.3, 1.0, 1.2, 2.0, 2.9])  # seconds, around three launches
    monkeypatch.setattr("attnswitch.bench.measure.time.perf_counter", lambda: next(now))
    clock = FakeClock()
    found = measure({"a": takes(clock, [], "a", forever(1.0))}, "cpu", budget=Budget(0.0, 1.0), clock=clock)
    assert clock.host == [pytest.approx(1.5 * 900)]
    assert found["a"].host == pytest.approx(200)
