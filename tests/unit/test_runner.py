"""Runs: what they draw, how failures shrink and are kept, how they end, and what they report."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attnswitch import InvalidProblem, registry
from attnswitch.verify import Case, Failure, Outcome, Plan, Report, Space, Target, load, run, runner, to_json, to_junit

Register = Callable[[str, str], None]
#: What is wrong with a case: the name of the property it breaks, "refused", or None.
Judge = Callable[[Case], str | None]

SHORT_OF_ALL = Target("cpu", ("one", "two"), Space())


class Examiner:
    """Stands for ``examine``: gives the verdicts a test wants, and keeps what was asked."""

    def __init__(self, judge: Judge = lambda case: None) -> None:
        self.judge = judge
        self.calls: list[tuple[Case, tuple[str, ...]]] = []

    def __call__(self, case: Case, backends: Sequence[str], device: str = "cpu") -> list[Outcome]:
        self.calls.append((case, tuple(backends)))
        found = self.judge(case)
        if found == "refused":
            return [Outcome(case, name, device, "refused", reasons=("it is a test",)) for name in backends]
        failure = Failure(found, "wrong on purpose", (0,), 1.0, 2.0, 0.5) if found else None
        return [Outcome(case, b, device, "mismatch" if found else "verified", b, failure=failure) for b in backends]

    @property
    def drawn(self) -> list[str]:
        """Cases looked at with every backend: those drawn, and not those on the way to a smaller one."""
        return [str(case) for case, backends in self.calls if len(backends) == 2]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Examiner, Report]]:
    """``examined(judge, **plan)`` carries out a plan in which nothing is computed."""

    def carry_out(judge: Judge = lambda case: None, examples: int = 120, seed: int = 0, **plan: Any) -> Any:
        spy = Examiner(judge)
        monkeypatch.setattr(runner, "examine", spy)
        return spy, run(Plan((SHORT_OF_ALL,), examples, seed, **plan))

    return carry_out


Examined = Callable[..., tuple[Examiner, Report]]


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_a_seed_means_its_cases(examined: Examined) -> None:
    first, report = examined(seed=5)
    again, _ = examined(seed=5)
    other, _ = examined(seed=6)
    assert report.cases == len(first.drawn) == 120
    assert again.drawn == first.drawn
    # The plainest case of all stands in every run; apart from it, nothing is shared.
    assert len(set(first.drawn)) > 100
    assert len(set(other.drawn) & set(first.drawn)) <= 3


def test_a_longer_run_begins_like_a_shorter_one(examined: Examined) -> None:
    short, _ = examined(examples=70)
    long, _ = examined(examples=130)
    assert long.drawn[:70] == short.drawn


def test_another_process_draws_the_same(examined: Examined, tmp_path: Path) -> None:
    script = """
import hashlib
from attnswitch.verify import Outcome, Plan, Space, Target, run, runner
drawn = []
def examine(case, backends, device):
    drawn.append(str(case))
    return [Outcome(case, name, device, "verified", name) for name in backends]
runner.examine = examine
run(Plan((Target("cpu", ("one", "two"), Space()),), 120, 5))
print(hashlib.sha256("\\n".join(drawn).encode()).hexdigest())
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    spy, _ = examined(seed=5)
    assert ran.stdout.strip() == hashlib.sha256("\n".join(spy.drawn).encode()).hexdigest()


def test_a_draw_does_not_depend_on_failures_before_it(examined: Examined) -> None:
    healthy, _ = examined()
    failing, report = examined(
        lambda case: f"out {case.dim_qk}" if case.seq_k % 4 == 1 else None, max_failures=1000, shrink_seconds=0.05
    )
    assert len(report.failures) > 5
    assert failing.drawn == healthy.drawn


def test_every_target_gets_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Examiner()
    monkeypatch.setattr(runner, "examine", spy)
    both = (Target("cpu", ("one",), Space()), Target("cuda:0", ("two",), Space(libraries=("torch",))))
    seen: list[str] = []
    report = run(Plan(both, 60, 0), lambda report, doing: seen.append(doing))
    assert report.cases == len(spy.calls) == 120
    assert {(device, name) for device, name, _ in report.tallies} == {("cpu", "one"), ("cuda:0", "two")}
    assert {case.library for case, backends in spy.calls if backends == ("two",)} == {"torch"}
    assert seen == ["fuzzing cpu", "fuzzing cuda:0"] * 2


# -- failures ----------------------------------------------------------------------------------------------------------


def one_past_a_tile(case: Case) -> bool:
    return case.seq_k % 32 == 1 and case.seq_k > 32


def test_a_failure_shrinks_to_the_smallest_case(examined: Examined) -> None:
    _, report = examined(lambda case: "out" if one_past_a_tile(case) else None)
    assert [found.outcome.backend for found in report.failures] == ["one", "two"]
    for found in report.failures:
        assert found.outcome.case.replace(seq_q=1) == Case(seq_k=33)
        assert found.outcome.failure == Failure("out", "wrong on purpose", (0,), 1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("judge", "smallest"),
    [
        (lambda c: "out" if c.group > 1 else None, Case(group=2)),
        (lambda c: "out" if c.causal and c.window else None, Case(causal=True, window=(0, 0))),
        (lambda c: "out" if c.dtype == "bfloat16" and c.dim_v > 64 else None, Case(dtype="bfloat16", dim_qk=128, dim_v=128)),
        (lambda c: "out" if c.grads and c.layout == "BLHD" else None, Case(grads="qkv", layout="BLHD")),
        (lambda c: "out" if c.placing.key == "strided" else None, None),
    ],
)
def test_what_does_not_matter_becomes_plain(judge: Judge, smallest: Case | None, examined: Examined) -> None:
    _, report = examined(judge, max_failures=1)
    case = report.failures[0].outcome.case
    if smallest is None:
        smallest = Case(placing=case.placing)
        assert case.placing.key == "strided"
    plain = {"window": smallest.window, "dim_qk": smallest.dim_qk, "dim_v": smallest.dim_v, "grads": smallest.grads}
    assert judge(case.replace(**plain)) == "out"
    assert (case.batch, case.heads_kv, case.seq_q <= 1, case.seq_k <= 1) == (1, 1, True, True)
    for name in ("group", "dtype", "causal", "lengths", "mask", "softcap", "dropout", "layout", "data", "library"):
        assert getattr(case, name) == getattr(smallest, name), name


def test_a_failure_of_a_kernel_shrinks(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a backend that computes."""
    register("saboteur", "saboteurs:Saboteur")

    def short_of_a_key(_: Any, inputs: Any) -> Any:
        length = inputs.key.shape[2]
        if length <= 32 or length % 32 != 1:
            return inputs
        return inputs._replace(value=inputs.value * (1 + (0 * inputs.value[:, :, -1:] + 1)))

    monkeypatch.setattr(type(registry.load("saboteur")), "inputs", short_of_a_key)
    report = run(Plan((Target("cpu", ("saboteur",), Space()),), 300, 0, max_failures=1))
    (found,) = report.failures
    assert found.outcome.case.seq_k == 33
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "out"
    assert (found.outcome.case.batch, found.outcome.case.heads_q, found.outcome.case.seq_q) == (1, 1, 1)


def test_failures_are_saved_and_replayed_first(examined: Examined, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    wrong: Judge = lambda case: "out" if one_past_a_tile(case) else None  # noqa: E731 - it is one of a kind
    _, first = examined(wrong, corpus=folder)
    paths = sorted(folder.iterdir())
    assert sorted(str(found.path) for found in first.failures) == [str(path) for path in paths]
    saved = load(paths[0])
    assert (saved.backend, saved.device, saved.check, saved.case.seq_k) == ("one", "cpu", "out", 33)

    spy, second = examined(wrong, corpus=folder)
    assert spy.calls[0] == (saved.case, ("one",))
    assert second.replayed == 2
    assert [(found.path, found.from_corpus) for found in second.failures] == [(path, True) for path in paths]
    assert len(spy.drawn) == 120  # and neither is shrunk and reported again
    assert sorted(folder.iterdir()) == paths

    _, fixed = examined(corpus=folder)
    assert (fixed.replayed, fixed.exit_code, fixed.failures) == (2, 0, [])


def test_the_corpus_of_others_is_left_alone(examined: Examined, tmp_path: Path) -> None:
    _, report = examined(lambda case: "out", corpus=tmp_path, max_failures=1)
    assert report.failures[0].path is not None
    record = json.loads(report.failures[0].path.read_text())
    for changes in ({"backend": "three"}, {"device": "cuda:0"}):
        report.failures[0].path.write_text(json.dumps(record | changes))
        spy, later = examined(corpus=tmp_path)
        assert later.replayed == 0
        assert len(spy.calls) == 120


def test_a_damaged_corpus_stops_the_run(examined: Examined, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"schema": 1, "case":')
    with pytest.raises(InvalidProblem, match=r"half\.json is not a saved case"):
        examined(corpus=tmp_path)


def test_a_kernel_that_does_not_repeat_itself(examined: Examined, register: Register, tmp_path: Path) -> None:
    calls = iter(range(10**6))
    _, report = examined(lambda case: "out" if next(calls) % 2 else None, corpus=tmp_path)
    assert report.exit_code == 1
    assert len(report.failures) == 2  # of either backend
    for found in report.failures:
        assert found.outcome.failure is not None
        assert found.outcome.failure.message == "wrong on purpose; it did not fail again when run again"
        assert found.path is not None
        assert load(found.path).case == found.outcome.case
    assert report.cases == 120


def test_a_backend_that_fails_every_second_call(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register("saboteur", "saboteurs:Saboteur")
    calls = iter(range(10**6))
    monkeypatch.setattr(
        type(registry.load("saboteur")), "out", lambda _, out, lse: (out + next(calls) % 2, lse)
    )
    report = run(Plan((Target("cpu", ("saboteur",), Space(dtypes=("float32",))),), 40, 0, max_failures=5))
    assert report.exit_code == 1
    messages = [found.outcome.failure.message for found in report.failures if found.outcome.failure]
    assert any("it did not fail again when run again" in message for message in messages)


def test_a_crash_is_a_finding(register: Register) -> None:
    register("saboteur", "saboteurs:Raises")
    report = run(Plan((Target("cpu", ("saboteur",), Space()),), 200, 0, shrink_seconds=2.0))
    assert report.cases == 200
    (found,) = report.failures
    assert found.outcome.case.seq_k == 63
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "crash"
    assert found.outcome.failure.message.startswith("RuntimeError: unspecified launch failure")
    assert report.verified > 100
