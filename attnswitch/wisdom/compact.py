"""Which records are kept where there is no room for all: the newest that say the same, and mismatches before times."""

from __future__ import annotations

from collections.abc import Sequence

from attnswitch.wisdom.classes import speed_class
from attnswitch.wisdom.record import Record, Verdict, now, to_line

__all__ = ["fitting", "newest"]


def newest(records: Sequence[Record]) -> list[Record]:
    """The newest of all records that say the same, in the order of their dates; those of the future come first.

    Two times say the same if backend, signature and class of problems are the same; two verdicts, if backend,
    signature, case, problem and verdict are.
    """
    latest: dict[tuple[object, ...], Record] = {}
    present = now()
    for record in sorted(records, key=lambda record: (record.date <= present, record.date)):
        said = (record.case, record.right, record.problem) if isinstance(record, Verdict) else None
        key = (record.backend, record.signature, said or speed_class(record.problem))
        latest.pop(key, None)  # so that it stands at its own date
        latest[key] = record
    return list(latest.values())


def fitting(records: Sequence[Record], size: int) -> list[bytes]:
    """The lines of ``records`` in their order, without the first of them where all have more than ``size`` bytes.

    Verdicts go last, since a backend whose mismatch is forgotten may be chosen again.
    """
    lines = [to_line(record) for record in records]
    kept = set[int]()
    for place in sorted(
        range(len(lines)), key=lambda place: (isinstance(records[place], Verdict), place), reverse=True
    ):
        size -= len(lines[place])
        if size < 0:
            break
        kept.add(place)
    return [line for place, line in enumerate(lines) if place in kept]
