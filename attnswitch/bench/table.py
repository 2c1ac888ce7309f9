"""A run as comma-separated values: a line for each record, with a column for each of its fields."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import fields

from attnswitch.bench.record import Record

__all__ = ["to_csv"]


def to_csv(records: Iterable[Record]) -> str:
    """The text of ``records``; what was not measured is empty."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, [field.name for field in fields(Record)], lineterminator="\n")
    table.writeheader()
    table.writerows(record.to_json() for record in records)
    return text.getvalue()
