"""The measured matrix: which check catches which mutant, and what survives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from attnswitch.errors import VerificationError
from attnswitch.machine import registry
from attnswitch.planning import planner
from attnswitch.verify.checks import CHECKS, LAST
from attnswitch.verify.drawing import lattice
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.judge import apart, examine
from attnswitch.verify.mutants import Mutant, catalogue, columns, matrix, mutants
from attnswitch.verify.mutants.kills import kills
from attnswitch.verify.mutants.matrix import Matrix, Row, measure
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session import order
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import Plan, targets
from attnswitch.verify.session.whole import run

NAMES = ("bool-mask-inverted", "lse-in-base-2", "output-left-in-accumulator-type", "query-scaled-in-place")
#: An edit that changes the source and nothing else.
NOTHING = Mutant(
    "nothing-changed",
    "tail",
    "It is the tiled backend.",
    "",
    "return _tiles(start, last, self.config.block_k)",
    "return _tiles(start, last + 0, self.config.block_k)",
)


@pytest.fixture(scope="module")
def told() -> list[tuple[int, int, str]]:
    return []


@pytest.fixture(scope="module")
def measured(told: list[tuple[int, int, str]]) -> Iterator[Matrix]:
    every = (NOTHING, *mutants())
    with pytest.MonkeyPatch.context() as patch:
        for module in (catalogue, matrix, __import__("attnswitch.verify.mutants", fromlist=["mutants"])):
            patch.setattr(module, "mutants", lambda: every)
        patch.setattr(columns, "COLUMN_CASES", 12)
        for cases in (
            "probes",
            "heads",
            "sums",
            "long",
            "extremes",
        ):  # a survivor meets all of them, which takes a while
            patch.setattr(lattice, cases, lambda *space: iter(()))
        made = measure(
            names=(*NAMES, NOTHING.name),
            workers=1,
            examples=50,
            progress=lambda *what: told.append(what),
            alone=True,
        )
    yield made
    registry.forget()
    planner.forget()


def target(name: str) -> str:
    (found,) = (mutant.target for mutant in mutants() if mutant.name == name)
    return found


def row(measured: Matrix, name: str) -> Row:
    (found,) = (row for row in measured.rows if row.name == name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_kill_is_recorded(name: str, measured: Matrix) -> None:
    found = row(measured, name)
    (mutant,) = (mutant for mutant in mutants() if mutant.name == name)
    assert (found.family, found.fault, found.seen) == (mutant.family, mutant.fault, mutant.seen)
    assert found.first is not None
    assert 1 <= found.cases <= 50
    assert found.seconds > 0
    assert found.caught
    assert all(1 <= number <= 12 for number in found.caught.values())
    assert found.caught.keys() <= {check.name for check in CHECKS if not check.gpu}


def test_a_check_finds_what_it_is_for(measured: Matrix) -> None:
    assert row(measured, "output-left-in-accumulator-type").first == "form"
    assert measured.alone("form") == ("output-left-in-accumulator-type",)
    assert {"reference", "mask-forms"} <= row(measured, "bool-mask-inverted").caught.keys()
    assert {"reference", "split"} <= row(measured, "lse-in-base-2").caught.keys()


def test_what_changes_nothing_survives(measured: Matrix) -> None:
    assert [found.name for found in measured.survivors] == [NOTHING.name]
    assert row(measured, NOTHING.name).caught == {}
    assert row(measured, NOTHING.name).cases >= 50


def test_it_is_json(measured: Matrix) -> None:
    document = json.loads(json.dumps(measured.to_json()))
    assert document["survivors"] == [NOTHING.name]
    assert {found["name"] for found in document["mutants"]} == {*NAMES, NOTHING.name}
    assert list(document["alone"]) == list(measured.checks)
    assert (document["seed"], document["examples"]) == (0, 50)
    assert document["median_seconds"] > 0


def test_no_check_looks_alone_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(matrix, "columns", never)
    measured = measure(names=("bool-mask-inverted",), workers=1, examples=10)
    assert measured.checks == ()
    assert [(found.name, found.caught) for found in measured.rows] == [("bool-mask-inverted", {})]
    assert measured.rows[0].first is not None


def test_progress_is_told(measured: Matrix, told: list[tuple[int, int, str]]) -> None:
    total = len(told)
    assert [(done, of) for done, of, _ in told] == [(n, total) for n in range(1, total + 1)]
    steps = {what for *_, what in told}
    assert {"a run on tiled", *(f"{check} alone" for check in measured.checks)} < steps
    assert sum("mutants" in what for what in steps) > 0


def test_a_true_backend_that_fails_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_TRUE", target("lse-in-base-2"))
    monkeypatch.setattr(columns, "COLUMN_CASES", 3)
    with pytest.raises(VerificationError, match=r"the true backend fails too, by .*reference"):
        measure(names=("bool-mask-inverted",), workers=1, examples=10)


#: Faults of all sorts: in one call, in what a call leaves behind, now and then, and in few cases.
ALONE = (
    "bool-mask-inverted",
    "one-key-tail-dropped",
    "no-batch-has-no-longest-length",
    "missing-barrier-loses-tiles-now-and-then",
    "layout-cached-by-shape",
    "saved-output-overwritten",
    "output-buffer-shared-by-calls",
    "dead-rows-of-uncleared-output",
    "order-of-gradient-sums-varies",
)


@pytest.mark.nightly
def test_runs_side_by_side_end_where_each_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, sums = lattice.probes, lattice.sums
    # Some of the lattice, with a case that comes twice, which a run counts once.
    monkeypatch.setattr(lattice, "probes", lambda *space: (*islice(probes(*space), 4), *islice(probes(*space), 2)))
    monkeypatch.setattr(lattice, "sums", lambda *space: islice(sums(*space), 2))
    for others in ("heads", "long", "extremes"):
        monkeypatch.setattr(lattice, others, lambda *space: iter(()))
    monkeypatch.setattr(order, "_FIRST_CHUNKS", 1)
    every = tuple(target(name) for name in ALONE)
    found = kills("tiled", every, 0, 70)
    ended = {}
    for name in ("tiled", *every):
        registry.forget()
        planner.forget()
        report = run(Plan(targets(["cpu"], [name]), 70, 0, max_failures=1, shrink_tries=0, lattice=True))
        first = next(iter(report.failures), None)
        check = None if first is None or first.outcome.failure is None else first.outcome.failure.check
        ended[name] = check, report.cases if first is None else first.after
    assert {name: kill[:2] for name, kill in found.items()} == ended
    assert ended["tiled"] == (None, 76)
    assert 2 <= sum(check is None for check, _ in ended.values()) < len(ended) - 2
    assert all(kill.seconds > 0 for kill in found.values())


def test_processes_side_by_side_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle", "runpy", "socket"):  # what a spawned process imports first
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    tasks = [matrix._Task("a sum", sum, ((n, n),)) for n in range(3)]
    assert sorted(result for _, result in matrix._carried_out(tasks, 2)) == [0, 2, 4]


def _said(outcome: Outcome) -> tuple[object, ...]:
    """What a check found; its message may name the case, and that its own check."""
    failure = outcome.failure and replace(outcome.failure, message="")
    return outcome.verdict, failure, outcome.checks, outcome.reasons


def test_checks_that_share_a_run_say_what_each_says_of_its_own() -> None:
    faulty = tuple(target(name) for name in ALONE[:3])
    checks = [check.name for check in CHECKS if not check.gpu and check not in LAST]
    seen = Counter[str]()
    for case in draw(Space(work=2**15, longest=140), 3, 25):
        together = {(check, said.backend): said for check, said in apart(case, dict.fromkeys(faulty, checks))}
        alone = {
            (check, said.backend): said
            for check in checks
            for said in examine(case.replace(check=check), faulty, only=True)
        }
        assert together.keys() == alone.keys()
        for key, said in together.items():
            assert _said(said) == _said(alone[key])
            seen[said.verdict] += 1
    assert min(seen["verified"], seen["mismatch"]) > 20


@pytest.mark.parametrize(("seconds", "median"), [((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 3.0), 2.5), ((1.0,), 1.0)])
def test_the_median(seconds: tuple[float, ...], median: float) -> None:
    rows = tuple(Row("a", "tail", "", "", "form", 1, time) for time in seconds)
    assert Matrix(rows, ("form",), 0, 1).median_seconds == median
