"""The case that is about to run, on disk before it does: what is known of a process that died or does not answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from attnswitch.verify.drawing.case import Case

__all__ = ["Entry", "read", "write"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend, the case that it was given, and a count that tells this launch from the one before."""

    count: int
    backend: str
    case: Case


def write(path: Path, entry: Entry) -> None:
    """Replace what stands in ``path``; a reader sees the old entry or the new one."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"count": entry.count, "backend": entry.backend, "case": entry.case.to_json()}))
    beside.replace(path)


def read(path: Path) -> Entry | None:
    """The last entry; None if nothing was about to run."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Entry(record["count"], record["backend"], Case.from_json(record["case"]))
