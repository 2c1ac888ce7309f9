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


@pytest.mark.parametrize("readme", make_tables.TABLES, ids=lambda path: path.parent.name)
def test_the_readme_shows_the_results(readme: Path) -> None:
    assert make_tables.TABLES[readme]() in readme.read_text()


@pytest.mark.parametrize("path", sorted(make_tables.RESULTS.glob("verify-*.json")), ids=lambda path: path.stem)
def test_a_committed_result_passed(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["exit_code"] == 0
    assert document["failures"] == []
    assert document["verified"] == sum(row["verified"] for row in document["results"])
