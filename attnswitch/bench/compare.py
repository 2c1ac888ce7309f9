"""Two runs of the benchmark held against each other: what became slower, larger, wrong, or is not there any more."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from attnswitch.bench.document import SCHEMA
from attnswitch.bench.record import PASSES, Record
from attnswitch.errors import InvalidProblem

__all__ = ["Measure", "Pair", "Rule", "differences", "load", "means", "pairs", "records"]

Measure = Literal["ms", "memory"]
#: What a run is to fail for, with the factor that is still allowed where there is one.
_RULES = {"slower": True, "larger": True, "missing": False, "wrong": False}
#: What is read of a document, of its limits, and of a record beside what names it.
_PARTS = {"device": str, "environment": dict, "limits": dict, "records": list, "schema": int, "date": str}
_LIMITS = {"tflops": float | int, "gbps": float | int}
_MEASURED = dict.fromkeys(("ms", "ms_low", "ms_high", "memory", "tflops", "gbps"), float | int | None)


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
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        document, fault = None, "it is no JSON"
    except RecursionError:
        document, fault = None, "it is nested too deeply"
    else:
        fault = _fault(document)
    if fault:
        raise InvalidProblem(f"{path} is no result of `attnswitch bench run --json`: {fault}")
    return document  # type: ignore[no-any-return]


def _fault(document: Any) -> str:
    """Why it is not the document of a run; "" if it is."""
    if not isinstance(document, dict):
        return f"it is a {type(document).__name__}"
    if "costs" in document:
        return "it is one of `attnswitch bench overhead`, whose costs are compared with nothing"
    if document.get("schema", SCHEMA) != SCHEMA:
        return f"it is of schema {document['schema']}, and this version reads schema {SCHEMA}"
    fault = _mistyped(document, _PARTS) or _mistyped(document["limits"], _LIMITS, " of its limits")
    if fault:
        return fault
    wanted = {field.name: str for field in fields(Record) if field.default is MISSING} | _MEASURED
    for record in document["records"]:
        if not isinstance(record, dict):
            return f"a record is a {type(record).__name__}"
        if fault := _mistyped({name: _number(value) for name, value in record.items()}, wanted, " of a record"):
            return fault
        if record["direction"] not in PASSES:
            return f"direction {record['direction']!r} of a record is none of {', '.join(PASSES)}"
    return ""


def _mistyped(found: dict[str, Any], wanted: Mapping[str, Any], whose: str = "") -> str:
    """The first of ``wanted`` that ``found`` has not, or of another type."""
    names = (name for name, kind in wanted.items() if not isinstance(found.get(name), kind))
    return next((f"{name!r}{whose} is missing or of another type" for name in names), "")


def records(document: dict[str, Any]) -> list[Record]:
    """The records of a document. What a later version added to them is left out."""
    known = {field.name for field in fields(Record)}
    return [Record(**{name: _number(v) for name, v in r.items() if name in known}) for r in document["records"]]


def _number(value: Any) -> Any:
    """NaN and inf are text in JSON."""
    return float(value) if value in ("nan", "inf", "-inf") else value


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
