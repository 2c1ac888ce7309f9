"""The measured matrix: which check catches which mutant, and what survives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from attnswitch.machine import registry
from attnswitch.planning import planner
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.drawing import lattice
from attnswitch.verify.mutants import Mutant, catalogue, matrix, mutants
from attnswitch.verify.mutants.matrix import Matrix, Row, measure

NAMES = ("bool-mask-inverted", "lse-in-base-2", "output-left-in-accumulator-type")
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
        patch.setattr(matrix, "COLUMN_CASES", 12)
        for cases in ("probes", "heads", "long", "extremes"):  # a survivor meets all of them, which takes a while
            patch.setattr(lattice, cases, lambda *space: iter(()))
        yield measure(names=(*NAMES, NOTHING.name), workers=1, examples=50, progress=lambda *what: told.append(what))
    registry.forget()
    planner.forget()


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


def test_progress_is_told(measured: Matrix, told: list[tuple[int, int, str]]) -> None:
    total = len(measured.checks) + len(measured.rows) + 1  # the true backend too
    assert [(done, of) for done, of, _ in told] == [(n, total) for n in range(1, total + 1)]
    assert {what for *_, what in told} == {"tiled", *measured.checks, *(found.name for found in measured.rows)}


@pytest.mark.parametrize(("seconds", "median"), [((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 3.0), 2.5), ((1.0,), 1.0)])
def test_the_median(seconds: tuple[float, ...], median: float) -> None:
    rows = tuple(Row("a", "tail", "", "", "form", 1, time) for time in seconds)
    assert Matrix(rows, ("form",), 0, 1).median_seconds == median
