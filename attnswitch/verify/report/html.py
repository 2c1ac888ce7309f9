"""A finished run as one HTML page: it loads nothing from elsewhere, and runs no script."""

from __future__ import annotations

import datetime
import math
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

import attnswitch
from attnswitch.verify.report import demands, facts
from attnswitch.verify.session.tally import LOWEST, Found, Report, Tally

if TYPE_CHECKING:
    from attnswitch.verify.mutants.matrix import Matrix, Row

__all__ = ["to_html"]

#: A histogram in the units of its drawing: the width of a bin, and the height of the highest bar.
_BIN, _TALL = 6, 40
#: Reasons shown for a backend; what follows is rare, and in the JSON document.
_REASONS = 100
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class _Cell:
    """A field of a table or drawing: what stands in it, how it looks, what it says when pointed at."""

    text: str
    kind: str
    says: str
    #: Height of a bar, length of a line or strength of a colour, from 0 to 1.
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class _Histogram:
    """The bins of one result, and how many calls they count."""

    bins: list[_Cell]
    count: int


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure as it is shown."""

    found: Found
    element: str
    replay: str
    when: str


@dataclass(frozen=True, slots=True)
class _Mutants:
    """The mutant matrix as it is shown; ``sees`` and ``alone`` count mutants by check."""

    checks: tuple[str, ...]
    rows: list[tuple[Row, list[_Cell]]]
    survivors: list[str]
    cases: float | None
    seconds: float | None
    sees: list[int]
    alone: list[int]


def to_html(report: Report, mutants: Matrix | None = None) -> str:
    """The page, with the matrix of ``mutants`` where it is given."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["whole"] = lambda n: f"{n:,}"
    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    view = _view(report) | {"mutants": None if mutants is None else _mutants(mutants)}
    if mutants is not None and not report.tallies:  # nothing but the mutants was asked about
        count = len(mutants.survivors)
        verdict = f"{count} of {len(mutants.rows)} mutants survive" if count else "every mutant was caught"
        view |= {"verdict": verdict, "colour": "bad" if count else "good"}
    return environment.from_string(source).render(view)


def _view(report: Report) -> dict[str, Any]:
    backends = facts.by_backend(report)
    results = sorted(
        {name for tally in backends.values() for name in tally.ratios},
        key=lambda name: (name.startswith("grad"), name != "out", name),
    )
    return {
        "report": report,
        "version": attnswitch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "verdict": facts.verdict(report),
        "colour": {0: "good", 1: "bad"}.get(report.exit_code, "warn"),
        "totals": facts.totals(report.tallies.values()),
        "emulated": [facts.emulated(*item) for item in report.emulated.items()],
        "environment": facts.environment_of(report),
        "backends": backends,
        "devices": Counter(device for device, _ in backends),
        "failures": [
            _Failure(item, _element(item), facts.replay_command(item), facts.when(item)) for item in report.failures
        ],
        "matrix": [
            (name, facts.says(name), [_matrix_cell(name, *item) for item in backends.items()])
            for name in facts.checks(backends.values(), report.failures)
        ],
        "demanded": demands.rows(report),
        "results": results,
        "histograms": [
            (place, [_histogram(tally.ratios.get(name, ())) for name in results]) for place, tally in backends.items()
        ],
        "maps": [(place, _map(tally)) for place, tally in backends.items() if tally.places],
        "drawing": {"bin": _BIN, "tall": _TALL, "wide": _BIN * (LOWEST + 2), "bound": _BIN * (LOWEST + 1)},
        "cell": facts.TILE_CELL,
        "triggers": _triggers(report),
        "met": facts.met(report).partition(";")[0],
        "reasons": [(place, tally, tally.reasons.most_common(_REASONS)) for place, tally in backends.items()],
    }


def _element(found: Found) -> str:
    assert found.outcome.failure is not None
    return facts.element(found.outcome.failure)


def _matrix_cell(check: str, place: facts.Place, tally: Tally) -> _Cell:
    held, broken = tally.held[check], tally.broken[check]
    where = f"{check}, {place[1]} on {place[0]}"
    if broken:
        return _Cell(f"✗ {broken:,}", "bad", f"{where}: broken {broken:,} times, held {held:,} times")
    if held:
        return _Cell(f"{held:,}", "good", f"{where}: held {held:,} times. {facts.says(check)}")
    if check in facts.OTHERS and tally.verified + tally.mismatched:
        return _Cell("0", "good", f"{where}: never. {facts.says(check)}")
    return _Cell("·", "never", f"{where}: never looked at")


def _histogram(bins: Collection[int]) -> _Histogram | None:
    if not sum(bins):
        return None
    most = math.log1p(max(bins))
    cells = [
        _Cell("", "over" if n > LOWEST else "bar", f"{count:,} calls: {_range(n)}", math.log1p(count) / most)
        for n, count in enumerate(bins)
    ]
    return _Histogram(cells, sum(bins))


def _range(number: int) -> str:
    """What a bin counts, in words."""
    if number > LOWEST:
        return "error above the bound"
    upper = _power(number - LOWEST)
    return f"error/bound up to {upper}" if number == 0 else f"error/bound {_power(number - LOWEST - 1)} to {upper}"


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(_RAISED)}" if exponent else "1"


def _map(tally: Tally) -> list[list[_Cell]]:
    """The tile's cells by query and dimension."""
    rows = []
    for row in range(8):
        cells = []
        for column in range(8):
            worst, places = tally.places.get((row, column)), f"queries {_span(row)}, dimensions {_span(column)}"
            if worst is None:
                cells.append(_Cell("", "never", f"{places}: no worst element"))
            else:
                beyond = worst > 1.0
                text = "above the bound" if beyond else f"error/bound {worst:.3g}"
                cells.append(_Cell("", "over" if beyond else "heat", f"{places}: {text}", min(worst, 1.0)))
        rows.append(cells)
    return rows


def _span(number: int) -> str:
    return f"{number * facts.TILE_CELL}–{(number + 1) * facts.TILE_CELL - 1}"


def _triggers(report: Report) -> list[tuple[str, _Cell]]:
    counts = facts.coverage(report)
    most = math.log1p(max(counts.values(), default=0)) or 1.0
    return [
        (name, _Cell(f"{n:,}", "bar", f"{n:,} of {report.cases:,} cases", math.log1p(n) / most))
        if n
        else (name, _Cell("never met", "warn", "no case of this run was one"))
        for name, n in counts.items()
    ]


def _mutants(matrix: Matrix) -> _Mutants:
    killed = [row for row in matrix.rows if row.first is not None]
    return _Mutants(
        matrix.checks,
        [(row, [_mutant_cell(row, name) for name in matrix.checks]) for row in matrix.rows],
        [row.name for row in matrix.rows if row.first is None],
        statistics.median(row.cases for row in killed) if killed else None,
        statistics.median(row.seconds for row in killed) if killed else None,
        [sum(name in row.caught for row in matrix.rows) for name in matrix.checks],
        [sum(row.caught.keys() == {name} for row in matrix.rows) for name in matrix.checks],
    )


def _mutant_cell(row: Row, check: str) -> _Cell:
    kind = "first" if check == row.first else "good"
    ended = "; it ended the run" if check == row.first else ""
    number = row.caught.get(check)
    if number is None:
        return _Cell("", kind if ended else "", f"{row.name}: not seen by {check} alone{ended}" if ended else "")
    return _Cell(f"{number:,}", kind, f"{row.name}: seen by {check} alone in its case {number:,}{ended}")
