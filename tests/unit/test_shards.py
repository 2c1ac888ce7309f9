"""Runs in parts: no part has a case of another, together they are the whole, and one report says what is missing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attnswitch import InvalidProblem
from attnswitch.verify import Case, EventLog, Failure, Outcome, Plan, Report, Space, Target, run
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.report import to_json
from attnswitch.verify.report.joined import joined
from attnswitch.verify.session import corpus, worker
from attnswitch.verify.session.shard import WHOLE, Shard

TARGETS = (Target("cpu", ("one", "two"), Space(longest=40)),)
REQUIREMENT = Requirement.parse("causal,dtype=fp32")
COUNT = 3


class Examiner:
    """Stands for ``examine``: which case was tried on what; one backend refuses, and may be wrong for some heads."""

    def __init__(self) -> None:
        self.tried: list[tuple[Case, str]] = []
        self.wrong = True

    def __call__(
        self, case: Case, backends: Sequence[str], device: str, only: bool = False, before: Any = None
    ) -> list[Outcome]:
        self.tried += [(case, backend) for backend in backends]
        return [self.outcome(case, backend, device) for backend in backends]

    def outcome(self, case: Case, backend: str, device: str) -> Outcome:
        if backend == "two" and case.softcap:
            return Outcome(case, backend, device, "refused", reasons=("no softcap",))
        if self.wrong and backend == "two" and case.heads_kv == 3:
            failure = Failure("reference", "off", "out", (0, 0, 0, 0), float("inf"), 1.0, 0.1)
            return Outcome(case, backend, device, "mismatch", backend, failure=failure, ratios={"out": float("inf")})
        return Outcome(
            case,
            backend,
            device,
            "verified",
            "one",
            ratios={"out": 0.25},
            checks=("form",),
            worst={"out": (0, 0, 1, 2)},
        )


def plan(shard: Shard = WHOLE, **changes: Any) -> Plan:
    given: dict[str, Any] = {"lattice": True, "targeted": True, "requirements": (REQUIREMENT,), "shrink_tries": 0}
    return Plan(TARGETS, 120, 7, shard=shard, **given | changes)


@pytest.fixture
def examiner(monkeypatch: pytest.MonkeyPatch) -> Examiner:
    made = Examiner()
    monkeypatch.setattr(worker, "examine", made)
    return made


def carried_out(examiner: Examiner, made: Plan, log: Path | None = None) -> tuple[Report, list[tuple[Case, str]]]:
    examiner.tried = []
    if log is None:
        return run(made), examiner.tried
    with EventLog(log) as events:
        events.start(made)
        report = run(made, lambda report, source, device, outcomes: events.progress(report, source, outcomes))
        events.end(report)
    return report, examiner.tried


def in_parts(examiner: Examiner, folder: Path, count: int = COUNT, **changes: Any) -> list[Path]:
    paths = [folder / f"{n}.ndjson" for n in range(1, count + 1)]
    for n, path in enumerate(paths, 1):
        carried_out(examiner, plan(Shard(n, count), **changes), path)
    return paths


# -- what each part does -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, COUNT, 50])
def test_parts_have_nothing_in_common_and_are_the_whole(count: int, examiner: Examiner) -> None:
    examiner.wrong = False  # what fails is tried again, to shrink it
    whole = Counter(carried_out(examiner, plan(targeted=False))[1])
    parts = [Counter(carried_out(examiner, plan(Shard(n, count), targeted=False))[1]) for n in range(1, count + 1)]
    assert sum(parts, Counter()) == whole
    assert all(parts)


def test_a_saved_case_is_one_part_s_whatever_else_a_machine_has(examiner: Examiner, tmp_path: Path) -> None:
    outcomes = [examiner.outcome(Case(heads_kv=3, seq_k=length), "two", "cpu") for length in range(1, 30)]
    for outcome in outcomes:
        corpus.save(outcome, tmp_path, {})
    tried = []
    for n in range(1, COUNT + 1):
        made = plan(Shard(n, COUNT), corpus=tmp_path, lattice=False, requirements=())
        tried.append({case for case, _ in carried_out(examiner, made)[1]} & {outcome.case for outcome in outcomes})
    assert set.union(*tried) == {outcome.case for outcome in outcomes}
    assert not any(one & other for one, other in itertools.combinations(tried, 2))


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "-1/3", "1", "1/2/3", "a/b", "1/99999", "", "1 / 2", "²/3"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblem, match="expected a part and how many there are, such as 2/8"):
        Shard.parse(text)


def test_a_part_is_told_as_it_is_named() -> None:
    assert (Shard.parse("2/8"), str(Shard(2, 8))) == (Shard(2, 8), "2/8")


# -- one report --------------------------------------------------------------------------------------------------------


def document(report: Report) -> dict[str, Any]:
    """Without times, and what depends on when a failure was met."""
    found = json.loads(json.dumps(to_json(report)))
    for name in ("seconds", "workers", "environment", "date"):
        del found[name]
    for failure in found["failures"]:
        for name in ("seconds", "cases_before", "case", "problem", "variant"):
            del failure[name]
    for row in found["results"]:
        for name in ("seconds", "worst_case", "variants"):
            del row[name]
    return found  # type: ignore[no-any-return]


def test_the_report_of_the_parts_is_that_of_the_whole(examiner: Examiner, tmp_path: Path) -> None:
    whole, _ = carried_out(examiner, plan(targeted=False))
    found = joined(in_parts(examiner, tmp_path, targeted=False))
    assert found.cases > 100
    assert document(found) == document(whole)
    assert (found.exit_code, found.missing) == (1, [])


def test_a_log_of_a_whole_run_gives_its_report(examiner: Examiner, tmp_path: Path) -> None:
    whole, _ = carried_out(examiner, plan(), tmp_path / "log")
    assert document(joined([tmp_path / "log"])) == document(whole)


def test_runs_of_several_machines_are_added_up(examiner: Examiner, tmp_path: Path) -> None:
    one, _ = carried_out(examiner, plan(), tmp_path / "one")
    carried_out(examiner, plan(), tmp_path / "two")
    found = joined([tmp_path / "one", tmp_path / "two"])
    assert found.verified == 2 * one.verified
    assert len(found.failures) == len(one.failures)  # the same fault


def test_what_has_no_log_is_said(examiner: Examiner, tmp_path: Path) -> None:
    one, two, three = in_parts(examiner, tmp_path)
    found = joined([one, three])
    assert found.missing == ["shard 2/3: there is no log"]
    assert found.exit_code == 1  # a mismatch is one, whatever is missing
    assert joined([two]).missing == ["shards 1/3, 3/3: there is no log"]


def test_a_part_that_was_killed_loses_its_own(examiner: Examiner, tmp_path: Path) -> None:
    paths = in_parts(examiner, tmp_path, targeted=False)
    whole = joined(paths).verified
    lines = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"event":"outc')
    found = joined(paths)
    (sentence,) = found.missing
    assert sentence.startswith("shard 2/3: its log ends after ")
    assert sentence.endswith(f"as if it was killed or still runs ({paths[1]})")
    assert joined([paths[0], paths[2]]).verified < found.verified < whole


def test_without_a_mismatch_a_part_that_is_missing_is_exit_code_2(examiner: Examiner, tmp_path: Path) -> None:
    paths = in_parts(examiner, tmp_path, targeted=False, lattice=False, requirements=())
    report = joined(paths[:2])
    report.failures.clear()
    assert report.exit_code == 2


def test_a_part_that_was_tried_again_counts_once(examiner: Examiner, tmp_path: Path) -> None:
    paths = in_parts(examiner, tmp_path, targeted=False)
    whole = document(joined(paths))
    lines = paths[1].read_bytes().splitlines(keepends=True)
    torn = b"".join(lines[: len(lines) // 3]) + b'{"event":"outc\n'
    paths[1].write_bytes(torn + paths[1].read_bytes())  # killed, and begun anew in the same log
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(torn)
    assert document(joined([*paths, elsewhere])) == whole
    assert document(joined([elsewhere, *reversed(paths)]))["results"] == whole["results"]


def test_parts_may_have_been_given_unlike_times(examiner: Examiner, tmp_path: Path) -> None:
    """Machines end at unlike hours; what was cut off is told."""
    paths = [tmp_path / str(n) for n in (1, 2)]
    for n, (path, seconds) in enumerate(zip(paths, (3600.0, 1e-9), strict=True), 1):
        carried_out(examiner, plan(Shard(n, 2), seconds=seconds, targeted=False), path)
    assert joined(paths).stopped == "shard 2/2: time limit of 1e-09 s"


def test_parts_of_different_runs_are_refused(examiner: Examiner, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    carried_out(examiner, plan(Shard(1, 2)), one)
    for changes, name in (({"lattice": False}, "lattice"), ({"requirements": ()}, "requirements")):
        two.unlink(missing_ok=True)
        carried_out(examiner, plan(Shard(2, 2), **changes), two)
        with pytest.raises(InvalidProblem, match=f"are shards of different runs: their {name} differ"):
            joined([one, two])
    two.unlink()
    carried_out(examiner, plan(Shard(2, 3)), two)
    with pytest.raises(InvalidProblem, match="are shards of different runs: 1/2 and 2/3"):
        joined([one, two])
    two.unlink()
    carried_out(examiner, plan(), two)
    with pytest.raises(InvalidProblem, match="shards of a run, and whole runs, are two reports"):
        joined([one, two])


def test_a_log_without_a_run_is_told_beside_others(examiner: Examiner, tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    carried_out(examiner, plan(), whole)
    empty.write_text("")
    assert joined([whole, empty]).missing == [f"{empty}: no run began there"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no run to join in .*log: name logs"),
        ("not json\n{}\n", "line 1: it is not JSON"),
        ('{"event":"outcome"}\n', "line 1: a log begins with a start, and this is 'outcome'"),
        ('{"event":"start","schema":1,"plan":{},"environment":{}}\n', "line 1: schema 1, and this version reads 2"),
        ('{"event":"start","schema":2,"plan":{},"environment":{}}\n', "line 1: it has no field 'targets'"),
        ("[" * 100_000 + "\n{}\n", "line 1: it is not JSON that can be read: nested"),
    ],
    ids=["empty", "no json", "no start", "old", "no plan", "deep"],
)
def test_what_is_no_log_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InvalidProblem, match=message):
        joined([path])


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"case","at":1,"source":"drawn","case":{"batch":-1}}',
        b'{"event":"case","at":1,"source":"elsewhere","case":{}}',
        b'{"event":"outcome","at":1,"backend":"one","device":"cpu","verdict":"fine"}',
        b'{"event":"outcome","at":1,"backend":"one","device":"cpu","verdict":"refused","reasons":[99]}',
        b'{"event":"outcome","at":1,"backend":"one","device":"cpu","verdict":"verified","ratios":{"out":"x"}}',
        b'{"event":"outcome","at":1,"backend":"one","device":"cpu","verdict":"verified","ratios":{"out":[]}}',
        b'{"event":"failure","at":1,"backend":"one"}',
        b'{"event":"outcome","at":"now"}',
        b'{"event":[]}',
        b"3",
    ],
)
def test_a_damaged_line_is_told_and_nothing_else_is_raised(line: bytes, examiner: Examiner, tmp_path: Path) -> None:
    path = tmp_path / "log"
    carried_out(examiner, plan(lattice=False, targeted=False), path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:20], line, *lines[20:]]) + b"\n")
    with pytest.raises(InvalidProblem) as caught:
        joined([path])
    assert str(caught.value).startswith(f"{path}, line 21: ")
