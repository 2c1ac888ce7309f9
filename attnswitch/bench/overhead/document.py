"""The costs as one JSON document."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attnswitch.bench.overhead.clock import Effort
from attnswitch.bench.overhead.costs import Cost

__all__ = ["SCHEMA", "to_json"]

#: 2: sections, keys, new, step, batches, ratio and kernels of each cost; calls and rounds are at most so many.
SCHEMA = 2


def to_json(
    made: Sequence[Cost],
    *,
    device: str,
    effort: Effort,
    environment: Mapping[str, str],
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """The document: what it ran on, and every cost to a hundredth of a microsecond, ratios to a thousandth."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "device": device,
        "seconds": round(seconds, 3),
        "environment": dict(environment),
        "protocol": {**asdict(effort), "order": "rounds, each in an order of its own", "threads": 1},
        "costs": [
            {name: round(value, _digits(name)) if isinstance(value, float) else value for name, value in each.items()}
            for each in map(asdict, made)
        ],
    }


def _digits(name: str) -> int:
    return 3 if name == "ratio" else 2
