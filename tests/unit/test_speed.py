"""``verify --speed``: what was named is timed beside the fastest other backend, on numbers that nobody has met."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import InvalidProblem, Problem
from attnswitch.bench import beside, candidates
from attnswitch.bench.candidates import Attend
from attnswitch.bench.workload import Workload
from attnswitch.verify.report import demands
from attnswitch.verify.session.tally import Report, Speed, Tally

speeds = importlib.import_module("attnswitch.cli.speed")
FILE = str(Path(__file__).parent / "functions_of_users.py")
SMALL = Problem.parse("b1.h2.s64.d32.fp32.causal")
Change = Callable[[str, Workload, Attend], Attend]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, none is left out."""
    monkeypatch.setattr(beside, "_SLOW", float("inf"))


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Have each call of a backend be another."""
    real = candidates.of_backend

    def set_to(change: Change) -> None:
        monkeypatch.setattr(beside, "of_backend", lambda name, work: change(name, work, real(name, work)))

    return set_to


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("text", [str(SMALL), "b1.h4/2.s20x30.d16.fp32.grad", "b2.h2.s9.d16.fp32.varlen"])
def test_each_has_a_time_and_the_fastest_other_is_known(text: str) -> None:
    found = beside.beside(Problem.parse(text), "cpu", ["tiled"], ["sdpa-math"])
    assert found.failed == {}
    assert found.milliseconds.keys() == {"tiled", "sdpa-math"}
    assert all(each > 0 for each in found.milliseconds.values())
    assert found.fastest(apart_from=["tiled"]) == "sdpa-math"
    assert found.fastest(apart_from=["tiled", "sdpa-math"]) is None


@pytest.mark.usefixtures("patient")
def test_every_turn_has_numbers_of_its_own(changed: Callable[[Change], None]) -> None:
    met: dict[str, list[float]] = {"tiled": [], "sdpa-math": []}

    def note(name: str, work: Workload, attend: Attend) -> Attend:
        met[name].append(float(work.query.flatten()[0]))
        return attend

    changed(note)
    beside.beside(SMALL, "cpu", ["tiled"], ["sdpa-math"])
    assert met["tiled"] == met["sdpa-math"]
    assert len(set(met["tiled"])) == len(met["tiled"]) > 3


@pytest.mark.usefixtures("patient")
def test_who_remembers_an_answer_is_wrong(changed: Callable[[Change], None]) -> None:
    first: list[Any] = []

    def remember(name: str, work: Workload, attend: Attend) -> Attend:
        if name != "tiled":
            return attend
        first.append(first[0] if first else attend())
        return lambda: first[0]

    changed(remember)
    found = beside.beside(SMALL, "cpu", ["tiled"], ["sdpa-math"])
    assert found.failed["tiled"].startswith("wrong: its deviation")
    assert found.milliseconds.keys() == {"sdpa-math"}


def test_a_slow_one_is_left_out_but_for_one_asked_of(changed: Callable[[Change], None]) -> None:
    def slowed(name: str, work: Workload, attend: Attend) -> Attend:
        def later() -> Any:
            time.sleep(0.0 if name == "sdpa-flash" else 0.5)
            return attend()

        return later

    changed(slowed)
    found = beside.beside(SMALL, "cpu", ["tiled"], ["sdpa-math", "sdpa-flash"])
    assert found.milliseconds.keys() == {"tiled", "sdpa-flash"}
    assert found.milliseconds["tiled"] > 500


def test_what_cannot_be_timed_says_why() -> None:
    found = beside.beside(SMALL.replace(softcap=5.0), "cpu", ["sdpa-flash"], ["tiled"])
    assert "softcap" in found.failed["sdpa-flash"]
    assert found.milliseconds.keys() == {"tiled"}


def test_the_verdict_has_it() -> None:
    report = Report(0, tallies={("cpu", "tiled", "float32"): Tally(verified=3)})
    report.speeds["cpu", "tiled"] = [Speed("b1", 2.0, "sdpa-flash", 3.0), Speed("b2", why="not correct")]
    (judged,) = demands.verdict(report)["backends"]
    assert [(each["problem"], each["milliseconds"], each["ratio"], each["why"]) for each in judged["speed"]] == [
        ("b1", 2.0, 1.5, ""),
        ("b2", None, None, "not correct"),
    ]


def test_backends_are_named_and_problems_are_problems() -> None:
    with pytest.raises(InvalidProblem, match="add --backend or --function"):
        speeds.read(["b1.h2.s64.d32.fp32"], None)
    with pytest.raises(InvalidProblem):
        speeds.read(["quick"], ["tiled"])
    assert speeds.read(None, None) == ()


@pytest.mark.slow
def test_a_function_is_timed_before_the_court(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And a wrong one is not."""
    told = {}
    for function in ("like_bhsd@bhsd+gqa", "without_scale"):
        out = tmp_path / f"{function[:4]}.json"
        words = "verify", "--function", f"{FILE}:{function}", "--device", "cpu", "--quick", "--examples", "15"
        # Long enough that on a busy machine too ``reference`` is not the fastest.
        more = "--no-corpus", "--speed", "b1.h4.s256.d64.fp32.causal", "--json", str(out)
        monkeypatch.setattr(sys, "argv", ["attnswitch", *words, *more])
        with pytest.raises(SystemExit):
            importlib.import_module("attnswitch.cli.app").main()
        (judged,) = json.loads(out.read_text())["verdict"]["backends"]
        (told[function],) = judged["speed"]
    right, wrong = told.values()
    assert right["milliseconds"] > 0
    assert right["beside"] in ("tiled", "sdpa-flash", "sdpa-math")
    assert right["ratio"] == right["milliseconds_beside"] / right["milliseconds"]
    assert (wrong["milliseconds"], wrong["why"]) == (None, "not correct")
    assert "speed of" in capsys.readouterr().out
