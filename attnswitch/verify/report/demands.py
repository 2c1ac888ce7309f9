"""What was demanded and what came of it, as rows and in words; and the verdict on each backend, for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

from attnswitch.verify.demands.figures import Share
from attnswitch.verify.report import facts
from attnswitch.verify.session.tally import Report, Tally

__all__ = ["SHOWN", "Row", "document", "rows", "says", "verdict"]

#: Reasons and failures that are written out for one backend.
SHOWN = 5
#: Characters of one of them.
_LONGEST = 300


class Row(NamedTuple):
    """A demanded class on one backend: how many of its cases were drawn, taken and right, and the commonest refusal."""

    requirement: str
    word: str
    device: str
    backend: str
    share: Share

    @property
    def percent(self) -> str:
        """The part that was taken; 100 % is all of them, never nearly all."""
        drawn, taken = self.share.drawn, self.share.taken
        return f"{math.floor(100 * taken / drawn)} %" if drawn else "–"

    @property
    def reason(self) -> str:
        """The commonest reason of a refusal, "" where nothing was refused."""
        return next((reason for reason, _ in self.share.reasons.most_common(1)), "")


def rows(report: Report) -> list[Row]:
    """Every demanded class, in the order of the backends, of requirements and of their words."""
    return [Row(*each, share) for each, share in report.demanded.classes.items()]


def says(row: Row) -> str:
    """What became of a class in a few words."""
    share = row.share
    if not share.tried:
        return f"{row.word}: never tried{f', as {row.reason}' if row.reason else ''}"
    refused = f", refused: {row.reason}" if share.refused else ""
    return f"{row.word}: {share.taken} of {share.drawn} cases taken{refused}"


def document(report: Report) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [
        {
            "requirement": row.requirement,
            "class": row.word,
            "device": row.device,
            "backend": row.backend,
            "drawn": row.share.drawn,
            "taken": row.share.taken,
            "right": row.share.right,
            "share": _part(row.share.taken, row.share.drawn),
            "reasons": dict(row.share.reasons.most_common(SHOWN)),
        }
        for row in rows(report)
    ]


def verdict(report: Report) -> dict[str, Any]:
    """What a program that trains on verdicts needs, for each device and backend that was judged.

    ``correct`` of the whole is that of the exit code. A backend is correct if something was verified, nothing was
    wrong, and all that is demanded was taken. Its ``share`` is the part of the demanded cases that came out right, of
    all cases where nothing is demanded; it is from 0 to 1, None where none was tried. ``worst`` is the worst error /
    bound, of wrong results as well. ``speed`` has, for each problem that was to be timed, milliseconds of a call, those
    of the fastest other backend, and the ratio: above 1 it is the faster; or why it was not timed. ``told`` says what
    was wrong, ``refused`` what was not taken.
    """
    judged = [_judged(report, place, tally) for place, tally in facts.by_backend(report).items()]
    return {"correct": report.exit_code == 0, "backends": judged}


def _judged(report: Report, place: facts.Place, tally: Tally) -> dict[str, Any]:
    mine = [found.outcome for found in report.failures if (found.outcome.device, found.outcome.backend) == place]
    classes = [row for row in rows(report) if (row.device, row.backend) == place]
    lacking = [row for row in classes if row.share.refused or not row.share.tried]
    whole, tried = report.demanded.whole.get(place), tally.verified + tally.mismatched + tally.refused
    ratios = [tally.worst, *(ratio for outcome in mine for ratio in outcome.ratios.values())]
    told = [f"{failure.title}: {failure.message}" for failure in (outcome.failure for outcome in mine) if failure]
    refused = [says(row) for row in lacking] if classes else [reason for reason, _ in tally.reasons.most_common(SHOWN)]
    wrong = bool(mine or tally.mismatched)
    return {
        "device": place[0],
        "backend": place[1],
        "correct": tally.verified > 0 and not wrong and not lacking,
        "of": "drawn" if whole is None else "demanded",
        "share": _part(tally.verified, tried) if whole is None else _part(whole.right, whole.drawn),
        "worst": facts.number(math.nan if any(map(math.isnan, ratios)) else max(ratios)),
        "speed": [{**asdict(speed), "ratio": speed.ratio} for speed in report.speeds.get(place, ())],
        "told": [text[:_LONGEST] for text in told[:SHOWN]],
        "refused": [text[:_LONGEST] for text in refused],
    }


def _part(some: int, of: int) -> float | None:
    return some / of if of else None
