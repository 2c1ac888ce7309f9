"""``attnswitch bench choice``: what is drawn, how it is timed, and what is told of the choice."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Problem
from attnswitch.bench import choice
from attnswitch.bench.choice import TORCH, Judged, build, summaries
from attnswitch.bench.drawn import draw
from attnswitch.bench.loops import Loop, loops
from attnswitch.bench.measure import Budget
from attnswitch.machine import registry
from attnswitch.problem import cost

SHORT = Budget(1.0, 4.0)


class Clock:
    """A clock that only the calls move on, since a busy machine moves its own as well."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, ms: float) -> Callable[[], None]:
        """A call that takes so long."""

        def call() -> None:
            self.now += ms / 1e3

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(importlib.import_module("attnswitch.bench.loops"), "time", made)
    return made


def broken() -> None:
    raise RuntimeError("on purpose")


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_seed_means_its_problems(kind: str) -> None:
    problems = draw(kind, 200, 3)
    assert problems == draw(kind, 200, 3)
    assert problems[:50] == draw(kind, 50, 3)
    assert len(set(problems)) == 200
    assert set(problems) != set(draw(kind, 200, 4))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_feature_is_drawn_and_nothing_too_large(kind: str) -> None:
    problems = draw(kind, 600, 0)
    for met in (
        lambda p: p.grads,
        lambda p: p.seq_q == 1,
        lambda p: p.group > 1,
        lambda p: p.window is not None,
        lambda p: p.key_lengths,
        lambda p: p.softcap,
        lambda p: p.dropout,
        lambda p: p.deterministic,
        lambda p: p.mask is not None and p.mask.is_bool,
        lambda p: p.mask is not None and not p.mask.is_bool,
        lambda p: p.bottom_right,
        lambda p: p.dim_qk != p.dim_v,
        lambda p: p.dtype == "float32",
    ):
        assert 3 < sum(bool(met(problem)) for problem in problems) < 500
    most = 3e9 if kind == "cpu" else 1.2e12
    assert max(map(cost.flops, problems)) <= most


# -- the application's clock -------------------------------------------------------------------------------------------


def test_a_loop_takes_as_long_as_its_calls(clock: Clock) -> None:
    times = loops({"one": clock.takes(1.0), "three": clock.takes(3.0)}, "cpu", budget=Budget(1.0, 40.0))
    assert list(times) == ["one", "three"]
    for name, ms in (("one", 1.0), ("three", 3.0)):
        assert [times[name].median, times[name].low, times[name].high, times[name].host] == pytest.approx([ms] * 4)
    assert (times["one"].loops, times["three"].loops) == (10, 7)  # of 4 calls, and of 2


def test_what_is_far_slower_is_left_at_its_first_loop(clock: Clock) -> None:
    times = loops({"fast": clock.takes(0.1), "slow": clock.takes(1.0)}, "cpu", budget=SHORT)
    assert (times["fast"].loops, times["slow"].loops) == (3, 1)
    assert times["slow"].median == pytest.approx(1.0)


def test_what_was_held_up_once_is_not_taken_for_slow(clock: Clock) -> None:
    calls = 0

    def held_up() -> None:
        nonlocal calls
        calls += 1
        clock.now += (100.0 if calls == 4 else 0.1) / 1e3

    times = loops({"fast": clock.takes(0.1), "held up": held_up}, "cpu", budget=SHORT)
    assert times["held up"].loops == 3
    assert times["held up"].median == pytest.approx(0.1)


def test_a_larger_budget_buys_more_loops(clock: Clock) -> None:
    """Up to the default, no more than ever."""
    found = [
        loops({"one": clock.takes(0.3)}, "cpu", budget=budget)["one"]
        for budget in (Budget(5.0, 20.0), Budget(), Budget(37.5, 150.0), Budget(100.0, 1000.0))
    ]
    assert [each.loops for each in found] == [5, 15, 38, 60]


def test_rounds_are_in_the_order_of_turns(clock: Clock) -> None:
    """Each round takes longer than the one before, and who is slow is in none."""
    pace = 1.0

    def takes(ms: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal pace
            pace *= 1.001
            clock.now += pace * ms / 1e3

        return call

    times = loops({"one": takes(1.0), "slow": takes(99.0), "two": takes(2.0)}, "cpu", budget=Budget(1.0, 40.0))
    for name in ("one", "two"):
        assert list(times[name].rounds) == sorted(times[name].rounds)
        assert len(times[name].rounds) == times[name].loops >= 3
    assert times["slow"].rounds == ()
    assert times["two"].over(times["one"]) == pytest.approx(2.0, rel=0.01)
    assert times["slow"].over(times["one"]) == times["slow"].median / times["one"].median


@pytest.mark.parametrize("budget", [20.0, 150.0])
def test_the_pace_of_the_host_does_not_change_who_is_slower(budget: float, clock: Clock) -> None:
    """It jumps by up to 30 % about every 50 ms, in some 150 calls. One call takes 5 % more than another."""

    def spread(ratios: list[float]) -> float:
        return statistics.stdev(math.log(ratio) for ratio in ratios)

    within, between = [], []
    for seed in range(40):
        wander, pace = random.Random(seed), [1.0]

        def takes(ms: float, wander: random.Random = wander, pace: list[float] = pace) -> Callable[[], None]:
            def call() -> None:
                pace[0] = wander.uniform(0.75, 1.3) if wander.random() < 1 / 150 else pace[0]
                clock.now += pace[0] * wander.uniform(0.95, 1.05) * ms / 1e3

            return call

        calls = {"one": takes(0.3), "two": takes(0.315), "long": takes(2.0)}
        times = loops(calls, "cpu", budget=Budget(budget / 4, budget))
        within.append(times["two"].over(times["one"]))
        between.append(times["two"].median / times["one"].median)
    assert spread(within) < 0.5 * spread(between)
    assert statistics.geometric_mean(within) == pytest.approx(1.05, abs=0.015)


def test_what_raises_is_left_out_and_told(clock: Clock) -> None:
    failed: list[str] = []
    calls = {"broken": broken, "one": clock.takes(0.1)}
    times = loops(calls, "cpu", budget=SHORT, failed=lambda name, error: failed.append(f"{name}: {error}"))
    assert (list(times), failed) == (["one"], ["broken: on purpose"])
    with pytest.raises(RuntimeError, match="on purpose"):
        loops(calls, "cpu", budget=SHORT)
    assert loops({}, "cpu", budget=SHORT) == {}


# -- the judgement -----------------------------------------------------------------------------------------------------


def loop(ms: float) -> Loop:
    return Loop(ms, ms, ms, ms, 3)


def judged(text: str, chosen: str, **ms: float) -> Judged:
    return Judged(Problem.parse(text), chosen, "", {name: loop(time) for name, time in ms.items()})


def test_regret_is_of_the_fastest_backend_and_not_of_torch_s_own_call() -> None:
    one = judged("b1.h1.s8.d8.fp32", "tiled", tiled=3.0, reference=2.0, auto=3.1, torch=1.0)
    assert (one.fastest, one.regret, one.beside_torch) == ("reference", 1.5, 3.1)
    nothing = judged("b1.h1.s8.d8.fp32", "tiled", reference=2.0)
    assert (nothing.regret, nothing.beside_torch) == (None, None)


def test_the_choice_is_beside_others_in_the_same_rounds() -> None:
    """The host's pace doubles for three rounds of five, and one candidate has but two."""
    chosen, even = (2.0, 2.0, 4.2, 4.1, 4.0), (2.0, 2.0, 4.2, 4.1, 4.0)
    better, torch = (1.0, 1.0, 2.1, 2.05, 2.0), (1.5, 1.6)
    made = judged("b1.h1.s8.d8.fp32", "tiled")
    for name, rounds in {"tiled": chosen, "reference": better, "auto": even, TORCH: torch}.items():
        made.times[name] = Loop(statistics.median(rounds), 0.0, 9.0, 1.0, len(rounds), rounds)
    assert (made.fastest, made.regret) == ("reference", 2.0)
    assert made.beside_torch == pytest.approx((2.0 / 1.5 + 2.0 / 1.6) / 2)
    written = made.to_json()
    assert written["beside_torch"] == round((2.0 / 1.5 + 2.0 / 1.6) / 2, 4)
    assert written["times"]["torch"] == {"median": 1.55, "low": 0.0, "high": 9.0, "host": 1.0, "loops": 2.0}


def test_summaries_are_geometric_means_by_direction() -> None:
    rows = [
        judged("b1.h1.s8.d8.fp32", "tiled", tiled=4.0, reference=1.0, auto=4.0, torch=4.0),
        judged("b1.h1.s9.d8.fp32", "tiled", tiled=1.0, reference=1.0),
        judged("b1.h1.s8.d8.fp32.grad", "tiled", tiled=1.0, auto=1.0, torch=2.0),
    ]
    found = {(each.ratio, each.direction): each for each in summaries(rows)}
    assert found["regret", "forward"].mean == pytest.approx(2.0)
    assert (found["regret", "forward"].worst, found["regret", "forward"].problem) == (4.0, "b1.h1.s8.d8.fp32")
    assert found["beside_torch", "forward"].count == 1
    assert found["beside_torch", "training"].mean == 0.5


def test_every_candidate_of_a_problem_is_timed_and_right() -> None:
    found = choice.judge(Problem.parse("b2.h2.s16.d8.fp32.causal.grad"), "cpu", SHORT)
    assert {"sdpa-flash", "sdpa-math", "tiled", "reference", "auto", TORCH} == set(found.times)
    assert found.chosen in registry.names()
    assert found.regret is not None
    assert not found.failed


def test_what_torch_cannot_say_is_told() -> None:
    found = choice.judge(Problem.parse("b1.h2.s16.d8.fp32.softcap=5"), "cpu", SHORT)
    assert "no softcap" in found.failed[TORCH]
    assert found.beside_torch is None


def test_the_command_writes_what_it_shows(command: Callable[[str], Any]) -> None:
    ran = command("bench")(
        *("choice", "--device", "cpu", "--problem", "b1.h2.s16.d8.fp32", "--budget", "2", "--json", "choice.json")
    )
    assert ran.code == 0
    assert "forward: the choice takes" in ran.out
    document = json.loads(Path("choice.json").read_text(encoding="utf-8"))
    (row,) = document["problems"]
    assert row["problem"] == "b1.h2.s16.d8.fp32"
    assert row["times"][row["chosen"]]["median"] > 0
    assert {each["ratio"] for each in document["summaries"]} == {"regret", "beside_torch"}


@pytest.mark.parametrize(("wrong", "code"), [({TORCH}, 0), ({TORCH, "auto"}, 1), ({"tiled"}, 1), (set(), 0)])
def test_the_exit_code_is_of_what_attnswitch_answers(
    wrong: set[str], code: int, command: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "b1.h1.s8.d8.fp32"
    found = judged(problem, "tiled", tiled=1.0, auto=1.0, torch=1.0)
    found.failed = dict.fromkeys(wrong, "wrong: out is 3 bounds away") | {"flex": "RuntimeError: nothing is wrong here"}
    monkeypatch.setattr(choice, "judge", lambda *_: found)
    ran = command("bench")("choice", "--device", "cpu", "--problem", problem, "--json", "choice.json")
    assert ran.code == code
    for name in wrong:
        assert f"{name} on {problem}: wrong: out is 3 bounds away" in ran.out
    (row,) = json.loads(Path("choice.json").read_text(encoding="utf-8"))["problems"]
    assert row["failed"] == found.failed


def test_a_time_of_torch_s_own_call_alone_is_none(
    command: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged("b1.h1.s8.d8.fp32", "tiled", torch=1.0)
    monkeypatch.setattr(choice, "judge", lambda *_: found)
    assert command("bench")("choice", "--device", "cpu", "--problem", "b1.h1.s8.d8.fp32").code == 3


def test_processes_that_compile_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle", "runpy", "socket"):  # what a spawned process imports first
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    problem = Problem.parse("b1.h1.s8.d8.fp32")
    assert list(build([problem], "cpu", 1)) == [problem]
