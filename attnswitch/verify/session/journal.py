"""The case that is about to run, written to a file first: it tells which case a process died of or hangs in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from attnswitch import files, reading
from attnswitch.errors import InvalidProblem
from attnswitch.verify.drawing.case import Case

__all__ = ["Entry", "path", "read", "write"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend, its case, and the number of this launch."""

    count: int
    backend: str
    case: Case


def path(folder: Path) -> Path:
    """Where a worker that has ``folder`` writes it."""
    return folder / "journal.json"


def write(path: Path, entry: Entry) -> None:
    """Replace the entry in ``path``; a reader sees the old one or the new one."""
    record = {"count": entry.count, "backend": entry.backend, "case": entry.case.to_json()}
    files.replace(path, json.dumps(record).encode(), durable=False)  # it only has to outlive the process


def read(path: Path) -> Entry | None:
    """The last entry; None if nothing was about to run, or the process wrote over it as it died."""
    try:
        entry = reading.table(reading.load(path), {"count": int, "backend": str, "case": dict})
        return Entry(entry["count"], entry["backend"], Case.from_json(entry["case"]))
    except (FileNotFoundError, InvalidProblem):
        return None
