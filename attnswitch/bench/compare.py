"""Two runs of the benchmark held against each other: what became slower, larger, wrong, or is not there any more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnswitch import reading
from attnswitch.bench.document import SCHEMA
from attnswitch.bench.record import Record
from attnswitch.errors import InvalidProblem

__all__ = ["Measure", "Pair", "Rule", "differences", "load", "means", "pairs", "records"]

Measure = Literal["ms", "memory"]
#: What a run is to fail for, with the factor that is still allowed where there is one.
_RULES = {"slower": True, "larger": True, "missing": False, "wrong": False}
#: What is read of a document, and of its limits.
_PARTS = {"device": str, "environment": dict[str, str], "limits": dict, "records": list, "schema": int, "date": str}
_LIMITS = {"tflops": float, "gbps": float}
#: Numbers that are compared and drawn: none is negative, or larger than this.
_MEASURED, _LARGEST = ("ms", "ms_low", "ms_high", "memory", "tflops", "gbps", "percent"), 1e18
#: The least time in milliseconds, beside which all ratios are numbers.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Pair:
    """One candidate on one row in both runs; None where it is not in one of them."""

    before: Record | None
    after: Record | None

    @property
    def record(self) -> Record:
        """Either of them, to name it by."""
        record = self.after or self.before
        assert record is not None
        return record

    @property
    def measure(self) -> Measure:
        """What is compared: the time, or the memory of a suite that is about memory."""
        return "memory" if self.record.kind == "memory" else "ms"

    @property
    def values(self) -> tuple[float | None, float | None]:
        """Milliseconds or bytes, before and after; None where it was not measured."""
        before, after = (
            getattr(record, self.measure) if record is not None and record.status == "measured" else None
            for record in (self.before, self.after)
        )
        return before, after

    @property
    def ratio(self) -> float | None:
        """After over before, above 1 where it became worse; None where one is missing."""
        before, after = self.values
        return after / before if before and after is not None else None

    @property
    def apart(self) -> bool:
        """Whether the two are further apart than their own spread, from the 20th to the 80th percentile."""
        if self.before is None or self.after is None or self.ratio is None:
            return False
        if self.measure == "memory":
            return True
        faster, slower = (self.before, self.after) if self.ratio >= 1 else (self.after, self.before)
        return (slower.ms_low or 0.0) > (faster.ms_high or math.inf)


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition under which the comparison has failed."""

    name: str
    factor: float = 1.0

    @staticmethod
    def parse(text: str) -> Rule:
        """``slower=1.10``, ``larger=1.05``, ``missing`` or ``wrong``. Raises ``InvalidProblem``."""
        name, equals, number = text.partition("=")
        try:
            if _RULES.get(name) is not bool(equals):
                raise ValueError
            factor = float(number) if equals else 1.0
            if not 1.0 <= factor < math.inf:
                raise ValueError
        except ValueError:
            raise InvalidProblem(
                f"--fail-if {text!r}: expected slower=F or larger=F with a factor of at least 1, missing, or wrong"
            ) from None
        return Rule(name, factor)

    def broken(self, pair: Pair) -> bool:
        """Whether ``pair`` breaks it. A time counts as slower only if the spreads are apart as well."""
        before, after = pair.values
        if self.name == "wrong":
            return pair.after is not None and pair.after.status == "wrong"
        if self.name == "missing":
            return before is not None and after is None
        wanted = "memory" if self.name == "larger" else "ms"
        return pair.measure == wanted and pair.ratio is not None and pair.ratio > self.factor and pair.apart


def load(path: Path) -> dict[str, Any]:
    """The document of a run.

    Raises:
        InvalidProblem: it is none, or of a schema that this version does not know.
        OSError: it cannot be read.
    """
    try:
        document = reading.load(path)
        _check(document)
    except InvalidProblem as problem:
        raise InvalidProblem(f"{path} is no result of `attnswitch bench run --json`: {problem}") from None
    return document  # type: ignore[no-any-return]


def _check(document: Any) -> None:
    """Raise ``InvalidProblem`` if it is not the document of a run."""
    if isinstance(document, dict) and "costs" in document:
        raise InvalidProblem("it is one of `attnswitch bench overhead`, whose costs are compared with nothing")
    schema = reading.table(document, {"schema": int})["schema"]
    if schema != SCHEMA:
        raise InvalidProblem(f"it is of schema {schema}, and this version reads schema {SCHEMA}")
    limits = reading.table(reading.table(document, _PARTS)["limits"], _LIMITS, "limits")
    for name, value in limits.items():
        _check_number(f"limits.{name}", value)
    for place, found in enumerate(records(document)):
        for name in _MEASURED:
            value = getattr(found, name)
            if value is not None:
                _check_number(f"records[{place}].{name}", value, _LEAST if name.startswith("ms") else 0.0)


def _check_number(name: str, value: float, least: float = 0.0) -> None:
    if not least <= value <= _LARGEST:
        raise InvalidProblem(f"{name} is {value}: expected a number from {least:g} to {_LARGEST:g}")


def records(document: dict[str, Any]) -> list[Record]:
    """The records of a document. What a later version added to them is left out."""
    return [
        reading.made(Record, _numbers(found), f"records[{place}]", others=True)
        for place, found in enumerate(document["records"])
    ]


def _numbers(found: Any) -> Any:
    return {name: _number(value) for name, value in found.items()} if isinstance(found, dict) else found


def _number(value: Any) -> Any:
    """NaN and inf are text in JSON."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def pairs(before: dict[str, Any], after: dict[str, Any]) -> list[Pair]:
    """Every candidate of every row of either document, in the order of the later one."""
    one, two = ({(*r.group, r.problem, r.candidate): r for r in records(document)} for document in (before, after))
    return [Pair(one.get(key), two.get(key)) for key in (*two, *(key for key in one if key not in two))]


def means(found: Iterable[Pair]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """By suite, direction and candidate: the geometric mean of the ratios, and how many there are."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for pair in found:
        if pair.ratio:
            r = pair.record
            groups.setdefault((r.suite, r.direction, r.candidate), []).append(pair.ratio)
    return {key: (statistics.geometric_mean(ratios), len(ratios)) for key, ratios in groups.items()}


def differences(before: dict[str, Any], after: dict[str, Any], leave_out: Sequence[str] = ()) -> list[str]:
    """What the two runs did not have in common: device, software, limits by more than 5 %."""
    one, two = before["environment"], after["environment"]
    found = [
        f"{name}: {one.get(name, 'absent')}, then {two.get(name, 'absent')}"
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name) and name not in leave_out
    ]
    if before["device"] != after["device"]:
        found.insert(0, f"device: {before['device']}, then {after['device']}")
    for limit, unit in (("tflops", "TFLOP/s"), ("gbps", "GB/s")):
        a, b = before["limits"][limit], after["limits"][limit]
        if max(a, b) > 1.05 * min(a, b):
            found.append(f"measured limit: {a:.4g} {unit}, then {b:.4g}")
    return found
