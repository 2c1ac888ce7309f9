"""The READMEs show what the committed results say, and the results passed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("make_tables", ROOT / "fixtures" / "make_tables.py")
assert SPEC is not None
assert SPEC.loader is not None
make_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_tables)


@pytest.mark.parametrize(
    ("readme", "name"), make_tables.TABLES, ids=lambda of: of.parent.name if isinstance(of, Path) else of
)
def test_the_readme_shows_the_results(readme: Path, name: str) -> None:
    text = readme.read_text()
    assert make_tables.marked(text, name, make_tables.TABLES[readme, name]()) == text


def test_a_table_stands_between_its_own_marks() -> None:
    text = "<!-- a table -->\n<!-- end -->\n<!-- b table -->\nold\n<!-- end -->\n"
    assert make_tables.marked(text, "b", "new") == text.replace("old", "\nnew\n")


@pytest.mark.parametrize("path", sorted(make_tables.RESULTS.glob("verify-*.json")), ids=lambda path: path.stem)
def test_a_committed_result_passed(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["exit_code"] == 0
    assert document["failures"] == []
    assert document["verified"] == sum(row["verified"] for row in document["results"])


@pytest.mark.parametrize(
    "path", sorted(make_tables.RESULTS.parent.glob("*/verify-forms-*.json")), ids=lambda path: path.stem
)
def test_each_form_has_5000_cases_and_all_are_right(path: Path) -> None:
    document = json.loads(path.read_text())
    assert (document["exit_code"], document["failures"]) == (0, [])
    assert {"varlen", "page", "latent", "sinks", "grad", "alibi", "tree", "parts"} <= {
        row["class"] for row in document["demanded"]
    }
    for row in document["demanded"]:
        assert row["drawn"] == row["taken"] == row["right"] >= 5000, row["class"]


def test_the_choice_says_of_how_many_rows_torchs_figure_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def regret(of: str, direction: str, rows: int, mean: float) -> dict[str, Any]:
        return {"suite": "unseen", "direction": direction, "of": of, "rows": rows, "regret": mean, "worst": 2 * mean}

    def record(candidate: str, direction: str, status: str) -> dict[str, str]:
        return {"candidate": candidate, "direction": direction, "status": status}

    document = {
        "command": "attnswitch bench",
        "date": "2026-01-01",
        "device": "cuda:0",
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"},
        "regrets": [
            regret("auto", "forward", 9, 1.01),
            regret("torch", "forward", 6, 1.2),
            regret("auto", "x", 3, 1.0),
        ],
        "records": [
            *(record("torch", "forward", status) for status in ("measured", "wrong", "wrong", "refused")),
            *(record(*of, "wrong") for of in (("cuda", "forward"), ("torch", "x"))),
        ],
    }
    monkeypatch.setattr(make_tables, "_read", lambda _: document)
    monkeypatch.setattr(make_tables, "CHOICES", ("one",))
    head, _, *rows = make_tables.chosen().splitlines()[2:]
    columns = ("", "rows", "chosen / fastest", "at most", "torch's own / fastest", "rows of that", "torch wrong in")
    assert [cell.strip() for cell in head.split("|")[1:-1]] == list(columns)
    assert rows == [
        "| cuda:0, forward | 9 | 1.010 | 2.02 | 1.200 | 6 | 2 |",
        "| cuda:0, x | 3 | 1.000 | 2.00 |  | 0 | 1 |",
    ]
