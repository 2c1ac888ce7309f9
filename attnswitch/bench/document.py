"""A run as one JSON document: what it ran on, the limits, every record, and the ratios."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attnswitch.bench.measure import Budget, Limits
from attnswitch.bench.record import Record

__all__ = ["SCHEMA", "means", "ratios", "regrets", "to_json"]

SCHEMA = 1


def to_json(
    records: Sequence[Record],
    *,
    device: str,
    limits: Limits,
    budget: Budget,
    environment: Mapping[str, str],
    command: str,
    seconds: float,
    stopped: str | None = None,
) -> dict[str, Any]:
    """The document. ``stopped`` says why a run ended early; what it had measured is whole."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "device": device,
        "seconds": round(seconds, 3),
        "stopped": stopped,
        "environment": dict(environment),
        "protocol": {
            "warmup_ms": budget.warmup,
            "run_ms": budget.run,
            "order": "rounds, each in an order drawn",
            "cold_cache": device != "cpu",
        },
        "limits": {
            name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(limits).items()
        },
        "records": [record.to_json() for record in records],
        "ratios": ratios(records),
        "means": means(records),
        "regrets": regrets(records),
    }


def ratios(records: Iterable[Record]) -> list[dict[str, Any]]:
    """By suite, row and direction: how many times as long every other candidate takes as the first one measured.

    Above 1 the first is the faster. Wrong results are compared with nothing.
    """
    found = []
    for (suite, row, direction), times in _times(records).items():
        first = next(iter(times))
        others = {name: round(ms / times[first], 4) for name, ms in times.items() if name != first}
        if others:
            found.append({"suite": suite, "row": row, "direction": direction, "of": first, "ratios": others})
    return found


def _times(records: Iterable[Record]) -> dict[tuple[str, str, str], dict[str, float]]:
    """By suite, row and direction: the milliseconds of each candidate that was measured and is right."""
    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in records:
        if record.status == "measured" and record.ms:
            groups.setdefault(record.group, {})[record.candidate] = record.ms
    return groups


def means(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The geometric mean of ``ratios`` over the rows of a suite, by direction, first candidate and other."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for entry in ratios(records):
        for name, ratio in entry["ratios"].items():
            groups.setdefault((entry["suite"], entry["direction"], entry["of"], name), []).append(ratio)
    return [
        {
            "suite": suite,
            "direction": direction,
            "of": first,
            "other": name,
            "ratio": round(statistics.geometric_mean(found), 4),
            "rows": len(found),
        }
        for (suite, direction, first, name), found in groups.items()
    ]


def regrets(records: Iterable[Record]) -> list[dict[str, Any]]:
    """What the dispatcher's own choice costs: how many times as long it takes as the fastest backend of each row.

    The geometric mean over the rows of a suite in one direction, and the worst row; the same of each peer, which chose
    by itself as well. Rows where ``auto`` was not measured say nothing.
    """
    from attnswitch.bench.candidates import AUTO  # torch is slow to import
    from attnswitch.bench.peers import PEERS

    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    for (suite, row, direction), times in _times(records).items():
        backends = [ms for name, ms in times.items() if name not in (AUTO, *PEERS)]
        if AUTO in times and backends:
            for name in (AUTO, *(name for name in times if name in PEERS)):
                groups.setdefault((suite, direction, name), {})[row] = times[name] / min(backends)
    return [
        {
            "suite": suite,
            "direction": direction,
            "of": name,
            "regret": round(statistics.geometric_mean(found.values()), 4),
            "rows": len(found),
            "worst": round(max(found.values()), 4),
            "worst_row": max(found, key=lambda row: found[row]),
        }
        for (suite, direction, name), found in groups.items()
    ]
