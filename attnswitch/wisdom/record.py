"""``Time``, ``Untimed`` and ``Verdict``: the records of wisdom, and the line of JSON that holds each on disk.

A line is one JSON object and a newline. Its field ``sum`` is a checksum of the other fields: it reveals a line that was
edited, cut off or overwritten.
"""

from __future__ import annotations

import datetime
import json
import zlib
from dataclasses import dataclass
from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of, shown
from attnswitch.problem import Problem, cost
from attnswitch.wisdom.signature import Signature

__all__ = ["LONGEST", "SCHEMA", "OtherSchema", "Record", "Time", "Untimed", "Verdict", "from_line", "now", "to_line"]

#: In schema 1 times were those of the device's clock.
SCHEMA = 2
#: Bytes of a line: most have 500, and a compiler's whole message may be in one.
LONGEST = 2**16
#: Letters of a text on it, each of up to twelve bytes.
_LETTERS = 2500
#: Milliseconds that a time may have: a cycle of the clock, and more than a week.
_SHORTEST_MS, _LONGEST_MS = 1e-6, 1e9


@dataclass(frozen=True, slots=True)
class Time:
    """How long a backend takes for a problem: the forward, and the backward too if the problem has gradients.

    ``ms``, ``low`` and ``high`` are milliseconds of a call in a loop that waits for nothing: the median, the 20th and
    the 80th percentile of ``runs`` loops.
    ``config`` is the text of the config that was measured. ``threads`` is torch's number of CPU threads.
    """

    problem: Problem
    backend: str
    config: str
    ms: float
    low: float
    high: float
    runs: int
    threads: int
    signature: Signature
    date: str

    def __post_init__(self) -> None:
        if not all(_SHORTEST_MS <= ms <= _LONGEST_MS for ms in (self.ms, self.low, self.high)):
            raise InvalidProblem(
                f"{self.ms} ms, {self.low} to {self.high}: expected numbers from {_SHORTEST_MS:g} to {_LONGEST_MS:g}"
            )

    @property
    def pace(self) -> float:
        """Milliseconds per operation, which compares times of one class whose problems differ in size."""
        return self.ms / max(cost.flops(self.problem), 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a backend gets a case right. ``case`` names the saved case, and ``why`` says what was wrong."""

    problem: Problem
    backend: str
    right: bool
    case: str
    why: str
    signature: Signature
    date: str


@dataclass(frozen=True, slots=True)
class Untimed:
    """Why a backend that takes a problem has no time for it. Measuring was tried, and is not tried again."""

    problem: Problem
    backend: str
    why: str
    signature: Signature
    date: str


Record = Time | Untimed | Verdict

_KINDS: dict[str, type[Time] | type[Untimed] | type[Verdict]] = {"time": Time, "untimed": Untimed, "verdict": Verdict}
_SHARED = {"problem": str, "backend": str, "device": str, "versions": dict[str, str], "source": str, "date": str}
_FIELDS: dict[str, dict[str, type]] = {
    "time": {"config": str, "ms": float, "low": float, "high": float, "runs": int, "threads": int},
    "untimed": {"why": str},
    "verdict": {"right": bool, "case": str, "why": str},
}


class OtherSchema(InvalidProblem):
    """A line that another version of this package wrote, and can read."""


def now() -> str:
    """The current time in UTC, as records write it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def to_line(record: Record) -> bytes:
    """The line, newline included."""
    kind = next(name for name, made in _KINDS.items() if type(record) is made)
    fields = {
        "schema": SCHEMA,
        "kind": kind,
        "problem": str(record.problem),
        "backend": record.backend,
        **{name: _short(getattr(record, name)) for name in _FIELDS[kind]},
        "device": record.signature.device,
        "versions": dict(record.signature.versions),
        "source": record.signature.source,
        "date": record.date,
    }
    return f"{_text({**fields, 'sum': _sum(fields)})}\n".encode()


def from_line(line: bytes) -> Record:
    """The record that ``to_line`` wrote.

    Raises:
        OtherSchema: another version wrote the line.
        InvalidProblem: the line is damaged; the text says how.
    """
    fields = reading.parse(line, LONGEST)
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if type(schema) is not int or "sum" not in fields:
        raise InvalidProblem("it is not a line of wisdom: it has no checksum, or no schema")
    if schema != SCHEMA:
        raise OtherSchema(f"it is of schema {schema}, and this version reads schema {SCHEMA}")
    if fields.pop("sum") != _sum(fields):
        raise InvalidProblem("its checksum is not that of its content: it was changed by hand, or damaged")
    kind = reading.checked(fields.get("kind"), str, "kind")
    if kind not in _KINDS:
        raise InvalidProblem(f"kind is {shown(kind)}: {one_of(kind, _KINDS)}")
    shared, own = reading.table(fields, _SHARED), reading.table(fields, _FIELDS[kind])
    try:
        datetime.datetime.fromisoformat(shared["date"])
    except ValueError:
        raise InvalidProblem(f"date is {shown(shared['date'])}: expected one such as 2026-11-01") from None
    return _KINDS[kind](
        problem=Problem.parse(shared["problem"]),
        backend=shared["backend"],
        signature=Signature(shared["device"], tuple(sorted(shared["versions"].items())), shared["source"]),
        date=shared["date"],
        **own,
    )


def _short(value: Any) -> Any:
    """Text so that it fits a line; what a kernel says may be of any length, and hold what is no letter."""
    return value[:_LETTERS].encode(errors="replace").decode() if isinstance(value, str) else value


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _sum(fields: dict[str, Any]) -> str:
    return f"{zlib.crc32(_text(fields).encode()):08x}"
