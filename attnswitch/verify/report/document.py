"""A finished run as one JSON document."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any

from attnswitch.verify.report import demands, facts
from attnswitch.verify.session.shard import WHOLE
from attnswitch.verify.session.tally import Found, Report, Tally

__all__ = ["SCHEMA", "to_json"]

#: 2 added checks, ratios, places, variants and seconds to the results, and triggers; 3 demanded and verdict. What 1 had
#: is unchanged.
SCHEMA = 3
#: Reasons written out for each device, backend and dtype, the most frequent ones; most differ in a number only.
REASONS = 20


def to_json(report: Report) -> dict[str, Any]:
    """What ran where, the counts by device, backend and dtype, and every failure with its case.

    Bin ``i`` of a histogram in ``ratios`` counts what is above ``ratio_edges[i - 1]`` and at most ``ratio_edges[i]``;
    the last, beyond the edges, what is above the bound. ``places`` maps the cell of an output element, "row,column" of
    its query and dimension modulo the tile, to the largest error / bound seen there, cut at 2. ``verdict``, the last,
    is all that a program needs which trains on it.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": report.seed,
        "cases": report.cases,
        "replayed": report.replayed,
        "passed_over": report.passed_over,
        "verified": report.verified,
        "seconds": round(report.seconds, 3),
        "pace": None if report.pace is None else round(report.pace, 2),
        "divergences": [
            {"device": device, "backend": backend, "id": name, "shows": shows}
            for device, backend, name, shows in report.divergences
        ],
        "recipes": report.recipes,
        "emulated": report.emulated,
        "workers": report.workers,
        "stopped": report.stopped,
        "shard": None if report.shard == WHOLE else str(report.shard),
        "missing": report.missing,
        "exit_code": report.exit_code,
        "environment": facts.environment_of(report),
        "ratio_edges": list(facts.EDGES),
        "tile_cell": facts.TILE_CELL,
        "triggers": facts.coverage(report),
        "results": [
            {"device": device, "backend": backend, "dtype": dtype, **_tally(tally)}
            for (device, backend, dtype), tally in sorted(report.tallies.items())
        ],
        "failures": [_failure(found) for found in report.failures],
        "demanded": demands.document(report),
        "verdict": demands.verdict(report),
    }


def _tally(tally: Tally) -> dict[str, Any]:
    looked = [name for name in facts.checks([tally]) if facts.state(tally, name) != "never"]
    return {
        "verified": tally.verified,
        "with_gradients": tally.gradients,
        "refused": tally.refused,
        "mismatched": tally.mismatched,
        "unavailable": tally.unavailable,
        "seconds": round(tally.seconds, 3),
        "worst_error_over_bound": facts.number(tally.worst),
        "worst_case": tally.worst_case.to_json() if tally.worst_case else None,
        "checks": {name: {"held": tally.held[name], "broken": tally.broken[name]} for name in looked},
        "ratios": dict(sorted(tally.ratios.items())),
        "places": {f"{row},{column}": facts.number(worst) for (row, column), worst in sorted(tally.places.items())},
        "variants": dict(tally.variants.most_common()),
        "reasons": dict(tally.reasons.most_common(REASONS)),
        "other_reasons": max(0, len(tally.reasons) - REASONS),
    }


def _failure(found: Found) -> dict[str, Any]:
    outcome, failure = found.outcome, found.outcome.failure
    assert failure is not None
    return {
        "device": outcome.device,
        "backend": outcome.backend,
        "chosen": outcome.chosen,
        "variant": outcome.variant,
        "title": failure.title,
        "seconds": round(found.seconds, 3),
        "cases_before": found.after,
        "from_corpus": found.from_corpus,
        "problem": str(outcome.case.problem()),
        "failure": asdict(failure)
        | {name: facts.number(getattr(failure, name)) for name in ("got", "expected", "bound")},
        "case": outcome.case.to_json(),
        "replay": facts.replay_command(found),
    }
