"""Runs: what they draw, how failures shrink and are kept, how they end, and what they report."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from attnswitch import InvalidProblem
from attnswitch.machine import registry
from attnswitch.verify import Case, Failure, Outcome, Plan, Report, Space, Target, load, run
from attnswitch.verify.session import order, worker
from attnswitch.verify.session.explore import Drawn, Job, Source
from attnswitch.verify.session.pool import Pool
from attnswitch.verify.session.shard import Shard

Register = Callable[[str, str], None]
#: What is wrong with a case: the property that it breaks, "refused", or None.
Judge = Callable[[Case], str | None]

SMALL = Space(libraries=("numpy",), dtypes=("float32",), work=2**12, longest=70)


class Examiner:
    """Stands for ``examine``: gives the verdicts that a test wants, and keeps what was asked."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.calls: list[tuple[Case, tuple[str, ...]]] = []

    def __call__(self, case: Case, backends: Sequence[str], device: str = "cpu", **_: Any) -> list[Outcome]:
        self.calls.append((case, tuple(backends)))
        found = self.judge(case)
        if found == "refused":
            return [Outcome(case, name, device, "refused", reasons=("it is a test",)) for name in backends]
        failure = Failure("reference", "wrong on purpose", found, (0,), 1.0, 2.0, 0.5) if found else None
        return [Outcome(case, b, device, "mismatch" if found else "verified", b, failure=failure) for b in backends]

    @property
    def drawn(self) -> list[str]:
        """Cases looked at with both backends: those drawn, and not those on the way to a smaller one."""
        return [str(case) for case, backends in self.calls if len(backends) == 2]


Examined = Callable[..., tuple[Examiner, Report]]


def right(case: Case) -> None:
    """Nothing is wrong with any case."""


def past_a_tile(case: Case) -> str | None:
    return "out" if case.seq_k % 32 == 1 and case.seq_k > 32 else None


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    """``examined(judge, **plan)`` carries out a plan for two backends, in which nothing is computed."""

    def carry_out(judge: Judge = right, examples: int = 120, seed: int = 0, **plan: Any) -> tuple[Examiner, Report]:
        spy = Examiner(judge)
        monkeypatch.setattr(worker, "examine", spy)
        return spy, run(Plan((Target("cpu", ("one", "two"), Space()),), examples, seed, **plan))

    return carry_out


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_a_seed_means_its_cases(examined: Examined) -> None:
    first, report = examined(seed=5)
    again, _ = examined(seed=5)
    other, _ = examined(seed=6)
    assert report.cases == len(first.drawn) == 120
    assert again.drawn == first.drawn
    assert len(set(first.drawn)) > 100
    assert len(set(other.drawn) & set(first.drawn)) <= 3  # the plainest of all cases may stand in both


def test_a_longer_run_begins_like_a_shorter_one(examined: Examined) -> None:
    short, _ = examined(examples=70)
    long, _ = examined(examples=130)
    assert long.drawn[:70] == short.drawn


def test_the_pace_is_that_of_the_middle(examined: Examined) -> None:
    _, report = examined()
    assert len(report.done) == report.fuzzed == 120
    slow_ends = [0.0, *(40 + n / 20 for n in range(398)), 200.0]  # 20 a second, but for the first and the last
    assert Report(0, seconds=200.0, done=slow_ends).pace == pytest.approx(20)
    assert Report(0, done=slow_ends[:99]).pace is None
    assert Report(0, done=[1.0] * 500).pace is None


@pytest.mark.parametrize(("recipes", "problems"), [(1, 120), (8, 15), (7, 18)])
def test_cases_are_counted_with_their_recipes(recipes: int, problems: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Examiner(right)
    monkeypatch.setattr(worker, "examine", spy)
    report = run(Plan((Target("cpu", ("one", "two"), Space(), recipes=recipes),), 120, 0))
    assert report.cases == len(spy.drawn) == problems * recipes
    assert len({case.problem().replace(nonfinite=False) for case, _ in spy.calls}) <= problems


@pytest.mark.parametrize(("recipes", "each"), [(1, 50), (2, 1), (12, 1)])
def test_no_worker_is_kept_waiting_by_one_that_compiles_for_many_problems(recipes: int, each: int) -> None:
    target = Target("cuda:0", ("one",), Space(), recipes=recipes)
    jobs = list(order.fresh(Plan((target,), 200, 0), target, lambda first, count: Drawn(target, 0, first, count)))
    counts = [job.count for job in jobs if isinstance(job, Drawn)]
    assert sum(counts) == -(-200 // recipes)
    assert max(counts) == each


class Listing:
    """As much of a pool as a run asks for: it keeps the jobs, and carries out none."""

    size = 1

    def __init__(self) -> None:
        self.provenance: dict[str, str] = {}
        self.jobs: list[Job] = []

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def carry_out(self, jobs: dict[str, Iterator[Job]], stop: Any, take: Any) -> None:
        self.jobs += (job for every in jobs.values() for job in every)


def climbing(examples: int, shard: Shard) -> list[Drawn]:
    """The searches for the worst case in a part of a run."""
    pool, target = Listing(), Target("cuda:0", ("one", "two"), Space(), recipes=12)
    run(Plan((target,), examples, 0, targeted=True, shard=shard), pool=lambda plan: cast("Pool", pool))
    return [job for job in pool.jobs if isinstance(job, Drawn) and job.climb]


@pytest.mark.parametrize(("examples", "problems"), [(600, 5), (1600, 5), (20_400, 42), (57_840, 120), (123_360, 257)])
def test_a_search_for_the_worst_case_is_shared_by_workers_and_parts(examples: int, problems: int) -> None:
    """It goes from case to case, so that one for a whole run kept 15 workers of a GPU waiting for minutes."""
    whole = climbing(examples, Shard())
    assert max(job.count for job in whole) <= 16
    assert min(job.count for job in whole) >= min(problems, 8)
    assert [sum(job.count for job in whole if job.target.backends == (name,)) for name in ("one", "two")] == 2 * [
        problems
    ]
    begun = [set(range(job.first, job.first + 2 * job.count)) for job in whole]
    assert len(set().union(*begun)) == sum(map(len, begun))
    assert sorted((job for n in (1, 2, 3) for job in climbing(examples, Shard(n, 3))), key=whole.index) == whole


def test_another_process_draws_the_same(examined: Examined, tmp_path: Path) -> None:
    script = """
import hashlib
from attnswitch.verify import Outcome, Plan, Space, Target, run
from attnswitch.verify.session import worker
drawn = []
def examine(case, backends, device, **_):
    drawn.append(str(case))
    return [Outcome(case, name, device, "verified", name) for name in backends]
worker.examine = examine
run(Plan((Target("cpu", ("one", "two"), Space()),), 120, 5))
print(hashlib.sha256("\\n".join(drawn).encode()).hexdigest())
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    spy, _ = examined(seed=5)
    assert ran.stdout.strip() == hashlib.sha256("\n".join(spy.drawn).encode()).hexdigest()


def test_a_draw_does_not_depend_on_failures_before_it(examined: Examined) -> None:
    healthy, _ = examined(examples=60)
    failing, report = examined(past_a_tile, examples=60, shrink_tries=50)
    assert len(report.failures) == 2
    assert failing.drawn == healthy.drawn


def test_every_target_gets_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Examiner(right)
    monkeypatch.setattr(worker, "examine", spy)
    both = (Target("cpu", ("one",), Space()), Target("cuda:0", ("two",), Space(libraries=("torch",))))
    doing: list[str] = []

    def note(report: Report, source: Source, device: str, outcomes: tuple[Outcome, ...]) -> None:
        doing.append(f"{source.value} on {device}")

    report = run(Plan(both, 60, 0), note)
    assert report.cases == len(spy.calls) == 120
    assert {(device, name) for device, name, _ in report.tallies} == {("cpu", "one"), ("cuda:0", "two")}
    assert {case.library for case, backends in spy.calls if backends == ("two",)} == {"torch"}
    assert [what for what, before in zip(doing, ["", *doing], strict=False) if what != before] == [
        "fuzzing on cpu",
        "fuzzing on cuda:0",
    ] * 2


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(InvalidProblem, match="nothing to verify: no backend was named that this machine has"):
        run(Plan((Target("cpu", (), Space()),), 10, 0))


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_a_failure_shrinks_to_the_smallest_case(seed: int, examined: Examined) -> None:
    _, report = examined(past_a_tile, seed=seed, max_failures=1)
    (found,) = report.failures
    assert found.outcome.case.replace(seq_q=1) == Case(seq_k=33)
    assert found.outcome.case.seq_q in (0, 1, 33)
    assert found.outcome.failure == Failure("reference", "wrong on purpose", "out", (0,), 1.0, 2.0, 0.5)


def test_a_seed_means_its_smallest_case(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved file is named by its case: the same run must not leave another file each time."""
    ends = set()
    for process in (0, 1):  # what Hypothesis starts from otherwise is as random as two processes are
        monkeypatch.setattr("hypothesis.core.global_force_seed", process)
        _, report = examined(lambda case: "out" if case.causal and case.window else None, max_failures=1)
        ends.add(str(report.failures[0].outcome.case))
    assert len(ends) == 1


def test_a_failure_of_a_kernel_shrinks(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a backend that computes."""
    register("saboteur", "saboteurs:Saboteur")

    def doubled(_: Any, inputs: Any) -> Any:
        return (
            inputs._replace(value=inputs.value * 2) if inputs.key.shape[2] % 32 == 1 < inputs.key.shape[2] else inputs
        )

    monkeypatch.setattr(type(registry.load("saboteur")), "inputs", doubled)
    report = run(Plan((Target("cpu", ("saboteur",), SMALL),), 300, 0, max_failures=1))
    (found,) = report.failures
    assert found.outcome.case.seq_k == 33
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "reference"


def test_failures_are_saved_and_replayed_first(examined: Examined, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    _, first = examined(past_a_tile, corpus=folder)
    paths = sorted(folder.iterdir())
    assert sorted(str(found.path) for found in first.failures) == [str(path) for path in paths]
    saved = load(paths[0])
    assert (saved.backend, saved.device, saved.check, saved.case.seq_k) == ("one", "cpu", "reference", 33)

    spy, second = examined(past_a_tile, corpus=folder)
    assert spy.calls[0] == (saved.case, ("one",))
    assert second.replayed == 2
    assert [(found.path, found.from_corpus) for found in second.failures] == [(path, True) for path in paths]
    assert len(spy.drawn) == len(spy.calls) - 2 == 120  # what is known is not shrunk and reported again
    assert sorted(folder.iterdir()) == paths

    _, fixed = examined(corpus=folder)
    assert (fixed.replayed, fixed.exit_code, fixed.failures) == (2, 0, [])


def test_what_was_saved_for_others_is_left_alone(examined: Examined, tmp_path: Path) -> None:
    examined(lambda case: "out", corpus=tmp_path, max_failures=1)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    for changes in ({"backend": "three"}, {"device": "cuda:0"}):
        path.write_text(json.dumps(record | changes))
        spy, later = examined(corpus=tmp_path)
        assert (later.replayed, len(spy.calls)) == (0, 120)


def test_a_damaged_file_stops_the_run(examined: Examined, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"schema": 1, "case":')
    with pytest.raises(InvalidProblem, match=r"half\.json is not a saved case"):
        examined(corpus=tmp_path)


def test_a_failure_that_does_not_come_again(examined: Examined, tmp_path: Path) -> None:
    seen: set[Case] = set()

    def at_first_sight(case: Case) -> str | None:
        if case in seen or len(seen) > 40:
            return None
        seen.add(case)
        return "out"

    _, report = examined(at_first_sight, corpus=tmp_path)
    assert (report.exit_code, report.cases) == (1, 120)
    assert len(report.failures) == 2
    for found in report.failures:
        assert found.outcome.failure is not None
        assert found.outcome.failure.message == "wrong on purpose; it did not fail again when run again"
        assert found.path is not None
        assert load(found.path).case == found.outcome.case


def test_a_backend_that_fails_every_second_call(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register("saboteur", "saboteurs:Saboteur")
    calls = iter(range(10**6))
    monkeypatch.setattr(type(registry.load("saboteur")), "out", lambda _, out, lse: (out + next(calls) % 2, lse))
    report = run(Plan((Target("cpu", ("saboteur",), SMALL),), 30, 0, max_failures=50))
    assert (report.exit_code, report.cases) == (1, 30)
    messages = [found.outcome.failure.message for found in report.failures if found.outcome.failure]
    assert any("it did not fail again when run again" in message for message in messages)


def test_a_crash_is_a_finding(register: Register) -> None:
    register("saboteur", "saboteurs:Raises")
    space = Space(libraries=("numpy",), dtypes=("float32",), work=2**14, longest=130)
    report = run(Plan((Target("cpu", ("saboteur",), space),), 60, 3, shrink_tries=50))
    assert report.cases == 60
    (found,) = report.failures
    assert found.outcome.case.seq_k % 64 == 63
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "crash"
    assert found.outcome.failure.message == "RuntimeError: unspecified launch failure (inputs)"
    assert report.verified > 20


# -- how a run ends, and what it reports -------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_enough_distinct_failures_end_it(most: int, examined: Examined) -> None:
    _, report = examined(lambda case: f"out {case.dim_qk}", max_failures=most, shrink_tries=50)
    assert len(report.failures) == most
    assert report.stopped == f"{most} distinct failures"


def test_time_ends_it(examined: Examined) -> None:
    started = time.monotonic()
    _, report = examined(lambda case: time.sleep(0.002), examples=10**6, seconds=0.3)
    assert report.stopped == "time limit of 0.3 s"
    assert 0.3 < report.seconds <= time.monotonic() - started < 10.0
    assert 0 < report.cases < 10**6


@pytest.mark.parametrize("after", [0, 1, 60])
def test_an_interrupt_ends_it_with_a_report(after: int, examined: Examined) -> None:
    calls = iter(range(10**6))

    def interrupted(case: Case) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt

    _, report = examined(interrupted)
    assert report.stopped == "interrupted"
    assert (report.verified, report.exit_code) == (2 * after, 2)  # unfinished is not passed


def test_an_interrupt_keeps_the_failure_at_hand(examined: Examined, tmp_path: Path) -> None:
    """Ctrl-C while a failure is being made smaller: it was found, and neither the report nor the file may miss it."""
    failures = iter(range(10**6))

    def interrupted(case: Case) -> str | None:
        if past_a_tile(case) and next(failures) == 2:
            raise KeyboardInterrupt
        return past_a_tile(case)

    _, report = examined(interrupted, corpus=tmp_path)
    assert report.stopped == "interrupted"
    assert report.exit_code == 1
    assert [found.path for found in report.failures] == list(tmp_path.iterdir())


def test_refused_is_not_verified(examined: Examined) -> None:
    _, report = examined(lambda case: "refused")
    assert (report.verified, report.exit_code, report.failures) == (0, 3, [])
    assert sum(tally.refused for tally in report.tallies.values()) == 2 * 120
    assert {reason for tally in report.tallies.values() for reason in tally.reasons} == {"it is a test"}
    _, mixed = examined(lambda case: "refused" if case.dtype != "float32" else None)
    assert mixed.exit_code == 0
    assert {dtype for (_, _, dtype), tally in mixed.tallies.items() if tally.verified} == {"float32"}
