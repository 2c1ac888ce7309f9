"""The README shows what the committed results say, and the results passed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

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
