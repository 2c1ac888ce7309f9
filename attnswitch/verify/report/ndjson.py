"""``EventLog``: a run as lines of JSON while it goes on, whole up to the last outcome however it ends."""

from __future__ import annotations

import datetime
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from attnswitch.verify.outcome import Outcome
from attnswitch.verify.report import demands, facts
from attnswitch.verify.session.explore import Source
from attnswitch.verify.session.plan import Plan
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.session.tally import Report

__all__ = ["SCHEMA", "EventLog"]

#: 2 added ``case`` and ``divergence``, and the path of a failure.
SCHEMA = 2


class EventLog:
    """Appends an event a line to a file: a context manager, whose ``progress`` is given to ``run``.

    ``start``, then ``outcome`` for each case and backend and ``failure`` for each distinct mismatch in its smallest
    form, then ``end``, or ``error`` if an exception ended the run. A reason is written once, as ``reason`` with an
    ``id``; outcomes name it by that. Before the outcomes of a case stands ``case``, with all of it and where it came
    from; ``divergence`` says whether a known one still shows. Fields that say nothing are left out. It is what
    ``joined`` reads.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _torn(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:  # an earlier process died while it wrote: its last line must not swallow our first
            self._file.write("\n")
        self._reasons: dict[str, int] = {}
        self._failures = self._divergences = 0
        self._started = time.monotonic()

    def start(self, plan: Plan) -> None:
        """The plan, and what this process knows of the machine."""
        targets = [
            {
                "device": t.device,
                "backends": t.backends,
                "space": asdict(t.space),
                "recipes": t.recipes,
                "emulation": dict(t.emulation),
            }
            for t in plan.targets
        ]
        untold = {"targets", "shard", *(["seed"] if plan.secret else [])}
        options = {name: getattr(plan, name) for name in Plan.__dataclass_fields__ if name not in untold}
        self._write(
            "start",
            schema=SCHEMA,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            plan={"targets": targets, "shard": str(plan.shard), **options},
            # Not the remembered one: libraries that are loaded later must not be missing from it ever after.
            environment=provenance.__wrapped__(),
        )

    def progress(self, report: Report, source: Source, outcomes: tuple[Outcome, ...]) -> None:
        """Write what is new: the outcomes of one case, and what is recorded since."""
        if outcomes and source is not Source.DIVERGENCE:
            self._write("case", source=source.name.lower(), case=outcomes[0].case.to_json())
            for outcome in outcomes:
                self._outcome(outcome)
        self._found(report)

    def end(self, report: Report) -> None:
        """The counts of the run, and the failures that were recorded as it ended."""
        self._found(report)
        self._write(
            "end",
            cases=report.cases,
            replayed=report.replayed,
            verified=report.verified,
            refused=sum(tally.refused for tally in report.tallies.values()),
            mismatched=sum(tally.mismatched for tally in report.tallies.values()),
            failures=len(report.failures),
            seconds=round(report.seconds, 3),
            stopped=report.stopped,
            workers=report.workers,
            passed_over=report.passed_over,
            exit_code=report.exit_code,
            demanded=demands.document(report),
            environment=facts.environment_of(report),
        )

    def _outcome(self, outcome: Outcome) -> None:
        fields: dict[str, Any] = {
            "chosen": outcome.chosen if outcome.chosen != outcome.backend else None,
            "variant": outcome.variant,
            "checks": outcome.checks,
            "ratios": {name: _short(ratio) for name, ratio in outcome.ratios.items()},
            "worst": outcome.worst,
            "failure": None if outcome.failure is None else _plain(asdict(outcome.failure)),
            "reasons": [self._reason(text) for text in dict.fromkeys(outcome.reasons)],
            "seconds": round(outcome.seconds, 4),
        }
        self._write(
            "outcome",
            case=str(outcome.case),
            backend=outcome.backend,
            device=outcome.device,
            verdict=outcome.verdict,
            **{name: value for name, value in fields.items() if value},
        )

    def _found(self, report: Report) -> None:
        for device, backend, name, shows in report.divergences[self._divergences :]:
            self._divergences += 1
            self._write("divergence", device=device, backend=backend, id=name, shows=shows)
        for found in report.failures[self._failures :]:
            self._failures += 1
            outcome, failure = found.outcome, found.outcome.failure
            assert failure is not None
            self._write(
                "failure",
                backend=outcome.backend,
                device=outcome.device,
                chosen=outcome.chosen,
                variant=outcome.variant,
                ratios={name: _short(ratio) for name, ratio in outcome.ratios.items()},
                title=failure.title,
                failure=_plain(asdict(failure)),
                text=str(outcome.case),
                case=outcome.case.to_json(),
                seconds=round(found.seconds, 3),
                cases_before=found.after,
                from_corpus=found.from_corpus,
                path=None if found.path is None else str(found.path),
                replayed_with=found.replayed_with,
                replay=facts.replay_command(found),
            )

    def _reason(self, text: str) -> int:
        if text not in self._reasons:
            self._reasons[text] = len(self._reasons)
            self._write("reason", id=self._reasons[text], text=text)
        return self._reasons[text]

    def _write(self, event: str, **fields: Any) -> None:
        record = {"event": event, "at": round(time.monotonic() - self._started, 3), **fields}
        line = json.dumps(record, allow_nan=False, separators=(",", ":"), default=str)
        self._file.write(line + "\n")
        self._file.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._write("error", error=f"{type(error).__name__}: {error}")
        self._file.close()


def _torn(path: Path) -> bool:
    """Whether the file ends within a line."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _short(ratio: float) -> float | str | None:
    """Four digits are enough for a ratio, and half as long."""
    return facts.number(float(f"{ratio:.4g}"))


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {name: facts.number(value) if isinstance(value, float) else value for name, value in record.items()}
