"""A run of the verifier under a bar that moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnswitch.verify.outcome import Outcome
from attnswitch.verify.report import EventLog
from attnswitch.verify.session import whole
from attnswitch.verify.session.explore import Source
from attnswitch.verify.session.plan import Plan
from attnswitch.verify.session.tally import Report

from . import render

__all__ = ["watched"]

#: Carries out a plan and tells how far it is.
Run = Callable[[Plan, whole.Progress], Report]


def watched(plan: Plan, quiet: bool, ndjson: Path | None, carry_out: Run) -> Report:
    """Carry the plan out with a bar that moves, and the log if there is one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cases, [green]{task.fields[verified]} verified[/]{task.fields[bad]}"),
        TimeElapsedColumn(),
    )
    with ExitStack() as stack:
        log = None if ndjson is None else stack.enter_context(EventLog(ndjson))
        bar = stack.enter_context(Progress(*columns, console=render.console, transient=True, disable=quiet))
        drawn = [plan.drawn(target) for target in plan.targets]
        each = max((plan.wanted(target) for target in plan.targets), default=0) // plan.shard.count
        total = None if None in drawn else sum(number or 0 for number in drawn)
        task = bar.add_task("starting", total=total, verified=0, bad="")

        def progress(report: Report, source: Source, device: str, outcomes: tuple[Outcome, ...]) -> None:
            doing = f"{source.value} on {device}"
            if log is not None:
                log.progress(report, source, outcomes)
            bad = f", [red]{len(report.failures)} mismatches[/]" if report.failures else ""
            # Of what is demanded it shows how many cases the word has that has the fewest.
            done, of = (report.demanded.fewest, each) if source is Source.DEMANDED else (report.fuzzed, total)
            bar.update(task, completed=done, total=of, description=doing, verified=report.verified, bad=bad)

        if log is not None:
            log.start(plan)
        report = carry_out(plan, progress)
        if log is not None:
            log.end(report)
        return report
