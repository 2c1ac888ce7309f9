"""Printing, apart from the commands: rich for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnswitch.planner import Plan
from attnswitch.verify.report import replay_command
from attnswitch.verify.runner import Found, Report

__all__ = ["console", "counts", "error", "escape", "failures", "plan", "plan_json", "table", "write_json"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of a pipe left, as head does: that is no mismatch, whose exit code rich would use."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(2)


console = _Console(highlight=False)
_errors = Console(stderr=True, highlight=False)


def error(problem: Exception) -> None:
    """One error, on standard error."""
    _errors.print(f"[bold red]error[/] {escape(str(problem))}", soft_wrap=True)


def write_json(document: Any, target: Path | None) -> None:
    """Write a document to a file; ``-`` or None is standard output."""
    text = json.dumps(document, indent=2)
    if target is None or str(target) == "-":
        print(text)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house style."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        whole = column in right or column in ("device", "backend", "dtype")
        made.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=whole)
    return made


def plan(plan: Plan) -> None:
    """A plan: the problem, the choice, and every candidate with its reasons."""
    console.print(f"[bold]problem[/]  {escape(str(plan.problem))}", soft_wrap=True)
    console.print(f"[bold]device[/]   {escape(str(plan.device))}", soft_wrap=True)
    choice = f"[bold green]{plan.backend}[/]" if plan.backend else "[bold red]none[/]"
    console.print(f"[bold]choice[/]   {choice} ({escape(plan.why)})\n", soft_wrap=True)
    rows = table("backend", "takes it", "why it was not chosen")
    for candidate in plan.candidates:
        takes = (
            "[green]yes[/]"
            if candidate.fits
            else "[yellow]no[/]"
            if candidate.unavailable is None
            else "[red]absent[/]"
        )
        reasons = [escape(reason) for reason in plan.why_not(candidate)] or ["[green]chosen[/]"]
        rows.add_row(candidate.backend, takes, "\n".join(reasons))
    console.print(rows)


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as data."""
    return {
        "problem": str(plan.problem),
        "device": str(plan.device),
        "backend": plan.backend,
        "why": plan.why,
        "candidates": [
            {
                "backend": candidate.backend,
                "fits": candidate.fits,
                "unavailable": candidate.unavailable,
                "why_not": list(plan.why_not(candidate)),
            }
            for candidate in plan.candidates
        ],
    }


def counts(report: Report) -> Table:
    """The table at the end of a run: device and backend by dtype.

    "grads" counts the verified ones with gradients; "error/bound" is the worst, 1 the most that is right.
    """
    columns = ("device", "backend", "dtype", "verified", "grads", "error/bound", "refused", "wrong")
    rows = table(*columns, right=columns[3:])
    previous = None
    for (device, backend, dtype), tally in sorted(report.tallies.items()):
        if previous not in (None, (device, backend)):
            rows.add_section()
        label = ("", "") if previous == (device, backend) else (device, backend)
        previous = (device, backend)
        rows.add_row(
            *label,
            dtype,
            f"[green]{tally.verified}[/]" if tally.verified else "0",
            str(tally.gradients),
            f"{tally.worst:.3f}" if tally.verified else "-",
            f"[yellow]{tally.refused}[/]" if tally.refused else "0",
            f"[bold red]{tally.mismatched}[/]" if tally.mismatched else "0",
        )
    return rows


def failures(found: list[Found]) -> None:
    """Each failure: the smallest case, the first bad element, and the line that runs it again."""
    for item in found:
        outcome, failure = item.outcome, item.outcome.failure
        assert failure is not None
        where = f" [dim](chose {outcome.chosen})[/]" if outcome.backend == "auto" and outcome.chosen else ""
        console.print(
            f"\n[bold red]mismatch[/] {outcome.backend} on {outcome.device}{where}: {escape(failure.check)}",
            soft_wrap=True,
        )
        console.print(f"  {escape(str(outcome.case))}", soft_wrap=True)
        console.print(f"  {escape(failure.message)}", soft_wrap=True)
        if failure.index is not None and failure.got is not None:
            expected = "" if failure.expected is None else f", expected {failure.expected!r} within {failure.bound:.3g}"
            console.print(f"  element {list(failure.index)} is {failure.got!r}{expected}", soft_wrap=True)
        console.print(f"  [bold]{escape(replay_command(item))}[/]", soft_wrap=True)
