"""A run as comma-separated values: a line for each record, with a column for each of its fields."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from attnswitch.bench.record import Record

__all__ = ["to_csv"]


def to_csv(records: Iterable[Record], path: Path) -> None:
    """Write ``records``; what was not measured is empty. Raises ``OSError``."""
    names = [field.name for field in fields(Record)]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows(record.to_json() for record in records)
