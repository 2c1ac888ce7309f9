"""``attnswitch bench overhead``: what is called, beside what, and what is written down of it."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from attnswitch import InvalidProblem, Problem
from attnswitch.bench import overhead, workload
from attnswitch.bench.suites import ad_hoc

PLAIN = Problem.parse("b1.h1.s8.d64.fp32")


def test_each_backend_is_set_against_torchs_own_call() -> None:
    found = list(overhead.costs(PLAIN, "cpu", rounds=5))
    besides = {cost.call: cost.beside for cost in found}
    assert besides == {
        "torch": None,
        "torch, sdpa-flash": None,
        "sdpa-flash": "torch, sdpa-flash",
        "torch, sdpa-math": None,
        "sdpa-math": "torch, sdpa-math",
        "auto": "torch, sdpa-flash",
        "plan": "torch, sdpa-flash",
    }
    for cost in found:
        assert 0 < cost.us_low <= cost.us <= cost.us_high
        assert cost.problem == str(PLAIN)
        assert (cost.over is None) is (cost.beside is None)


def test_a_host_that_changes_its_speed_changes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a fast host, then of a slow one: the medians themselves are of different rounds."""
    rounds = {"torch, sdpa-math": [10.0, 10.0, 50.0, 50.0, 50.0], "sdpa-math": [14.0, 12.0, 53.0, 51.0, 52.0]}
    monkeypatch.setattr(overhead, "_timed", lambda *_: rounds)
    costs = {cost.call: cost for cost in overhead.costs(PLAIN, "cpu", ["sdpa-math"])}
    assert costs["sdpa-math"].over == 2.0
    assert costs["sdpa-math"].us == 51.0


def test_percentiles_lie_within_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_timed", lambda *_: {"torch": [10.0, 100.0]})
    (cost,) = overhead.costs(PLAIN, "cpu")
    assert (cost.us_low, cost.us, cost.us_high) == (28.0, 55.0, 82.0)


def test_the_named_backends_alone() -> None:
    found = [cost.call for cost in overhead.costs(PLAIN, "cpu", ["sdpa-math"], rounds=2)]
    assert found == ["torch", "torch, sdpa-math", "sdpa-math", "auto", "plan"]


@pytest.mark.parametrize(
    "text", ["b1.h1.s8.d64.fp32", "b2.h4/2.s8.d16.fp32.causal.scale=0.5.grad", "b1.h1.s1x16.d8.fp32.causal-br"]
)
def test_all_that_is_called_computes_the_same(text: str) -> None:
    problem = Problem.parse(text)
    work = workload.make(ad_hoc(text), "backward" if problem.grads else "forward", "cpu")
    calls = overhead._calls(work, ())
    outs = {}
    for name, call in calls.items():
        with call.within():
            outs[name] = call.run()
    for out in outs.values():
        torch.testing.assert_close(out, outs["torch"])
        assert out.requires_grad is bool(problem.grads)


def test_torch_is_held_to_the_kernel() -> None:
    work = workload.make(ad_hoc(str(PLAIN)), "forward", "cpu")
    with overhead._calls(work, ["sdpa-math"])["torch, sdpa-math"].within():
        q, k, v = work.query, work.key, work.value
        assert torch._fused_sdp_choice(q, k, v) == SDPBackend.MATH.value


@pytest.mark.parametrize("part", ["lse", "softcap=3.0", "lengths", "mask=bool:qk", "window=3,0"])
def test_what_torch_cannot_say_is_refused(part: str) -> None:
    with pytest.raises(InvalidProblem, match="torch's own call"):
        list(overhead.costs(Problem.parse(f"{PLAIN}.{part}"), "cpu"))


def test_batches_take_turns_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls: Any = {name: (lambda name=name: seen.append(name), nullcontext) for name in "ab"}
    times = overhead._timed(calls, "cuda:0", 2)
    a, b = ([name] * overhead._UNCOUNTED + ["wait"] + [name] * overhead.CALLS for name in "ab")
    assert seen == (a + b) * (overhead._WARM + 2)
    assert times == {"a": [1e6 / overhead.CALLS] * 2, "b": [1e6 / overhead.CALLS] * 2}


def test_the_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with overhead._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "overhead", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "overhead.json"
    assert command(monkeypatch, "--device", "cpu", "--rounds", "2", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    read = json.loads(path.read_text())
    rows = read["costs"]
    assert list(dict.fromkeys(row["problem"] for row in rows)) == [str(p) for p in overhead.problems("cpu")]
    assert (read["device"], read["protocol"]["threads"], "torch" in read["environment"]) == ("cpu", 1, True)
    assert read["command"].endswith("--json overhead.json")
    for row in rows:
        assert row["problem"] in printed
        assert row["call"] in printed
        assert row["us"] == round(row["us"], 2)


def test_the_command_writes_json_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--problem", "b1.h1.s4.d8.fp32", "--backend", "sdpa-flash", "--device", "cpu", "--rounds", "3")
    assert command(monkeypatch, *asked, "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    assert [row["call"] for row in read["costs"]] == ["torch", "torch, sdpa-flash", "sdpa-flash", "auto", "plan"]
    assert statistics.median(row["us"] for row in read["costs"]) > 0


def test_the_command_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "--device", "cpu", "--backend", "fastest") == 2
    assert command(monkeypatch, "--device", "cpu", "--problem", "b1.h1.s4.d8.fp32.softcap=2.0") == 2


def test_a_file_that_cannot_be_written_is_found_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "costs", lambda *_: pytest.fail("it ran"))
    assert command(monkeypatch, "--device", "cpu", "--json", "/dev/null/x") == 2
