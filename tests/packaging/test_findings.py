"""What was found in others' functions: each text is in the table, and has all that a maintainer needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FINDINGS = Path(__file__).parents[2] / "fixtures" / "findings"
TABLE = (FINDINGS / "README.md").read_text()
#: One text, a function and of which commit or version.
ROW = re.compile(r"^\| \[([\w-]+)\]\(\1\.md\) \| [^|]+ \| (?:[^|]* )?([\w.]+) \|", re.MULTILINE)
ROWS = dict(ROW.findall(TABLE))
TEXTS = sorted(path for path in FINDINGS.glob("*.md") if path.name != "README.md")
PARTS = ["To reproduce", "Seen", "Expected", "Suspected cause", "Found by"]


def test_the_table_has_each_text_once() -> None:
    assert [name for name, _ in ROW.findall(TABLE)] == list(ROWS)
    assert set(ROWS) == {path.stem for path in TEXTS}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_text_is_ready_to_file(path: Path) -> None:
    text = path.read_text()
    title, _, body = text.partition("\n")
    headings = re.findall(r"^## (.*)$", body, re.MULTILINE)
    assert title.startswith("# ")
    assert headings == [part for part in PARTS if part in headings]
    assert {*PARTS} - {*headings} <= {"Suspected cause"}
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ast.parse(code)
    assert ROWS[path.stem] in text.partition("## Seen")[2]
    assert re.search(r"^.*\b20\d\d-\d\d-\d\d:", text.partition("## Seen")[2], re.MULTILINE)
    assert "attnswitch verify --function" in text.partition("## Found by")[2]
