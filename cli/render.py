"""Printing, apart from the commands: rich for people, JSON for programs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Column, Table

from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.names import printable
from attnswitch.planning.plan import Plan as Planned
from attnswitch.verify.report import facts
from attnswitch.verify.session.plan import Plan
from attnswitch.verify.session.tally import Found, Report, Tally

from . import files

__all__ = [
    "command",
    "console",
    "counted",
    "counts",
    "emulated",
    "error",
    "escape",
    "failures",
    "matrix",
    "notices",
    "plan",
    "plan_json",
    "show",
    "table",
    "verdict",
    "whole",
    "write_json",
]


#: Characters of a line that is as long as it wants to be.
_UNBOUNDED = 10_000
#: Characters between columns, and of a cell that is folded, at least.
_GAP, _NARROW = 2, 12
#: Characters that the matrix of checks may take: a wider one is for the HTML page.
MATRIX = 100


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of a pipe left, as head does: that is no mismatch, whose exit code rich would use."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(2)


#: A terminal that tells a width of 0 tells none, and nothing would be shown.
console = _Console(highlight=False, emoji=False, width=80 if os.environ.get("COLUMNS") == "0" else None)
_errors = Console(stderr=True, highlight=False, emoji=False)


def escape(text: str) -> str:
    """``text`` as it is, in print that has markup: neither rich nor the terminal acts on anything in it."""
    return markup.escape(printable(text))


def error(problem: Exception | str) -> None:
    """One error, on standard error."""
    _errors.print(f"[bold red]error[/] {escape(str(problem))}", soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """A number of things, whose name takes an s where they are more than one or none."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def command(document: Path) -> str:
    """The command line that wrote ``document``, whose folder says nothing about the run."""
    return shlex.join(["attnswitch", *(arg.replace(str(document), document.name) for arg in sys.argv[1:])])


def write_json(document: Any, target: Path | None) -> None:
    """Write a document to a file, as ``files.write``; ``-`` or None is standard output."""
    files.write(json.dumps(document, indent=2) + "\n", target)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house style."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in columns:
        whole = column in right or column in ("device", "backend", "dtype")
        made.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=whole)
    return made


def show(rows: Table) -> None:
    """Print a table, wider than the console where it has to be: a number that is cut is another number."""
    _print_within(rows, sum(_widest(each) if each.no_wrap else min(_widest(each), _NARROW) for each in rows.columns))


def whole(rows: Table) -> None:
    """Print a table of short cells, each row on one line unless a terminal, or COLUMNS, says how wide that may be."""
    if console.is_terminal or "COLUMNS" in os.environ:
        show(rows)
    else:
        _print_within(rows, sum(map(_widest, rows.columns)))


def _print_within(rows: Table, cells: int) -> None:
    needed = cells + _GAP * len(rows.columns)
    if needed <= console.width:
        console.print(rows)
    else:
        _Console(highlight=False, emoji=False, width=needed).print(rows)


def _widest(column: Column) -> int:
    options = console.options.update(width=_UNBOUNDED)
    return max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))


def plan(plan: Planned) -> None:
    """A plan: the problem, the choice, and every candidate with its reasons."""
    console.print(f"[bold]problem[/]  {escape(str(plan.problem))}", soft_wrap=True)
    console.print(f"[bold]device[/]   {escape(str(plan.device))}", soft_wrap=True)
    choice = f"[bold green]{escape(plan.backend)}[/]" if plan.backend else "[bold red]none[/]"
    console.print(f"[bold]choice[/]   {choice} ({escape(plan.why)})\n", soft_wrap=True)
    rows = table("backend", "takes it", "why it was not chosen")
    for candidate in plan.candidates:
        takes = (
            "[red]wrong here[/]"
            if candidate.fault is not None
            else "[green]yes[/]"
            if candidate.fits
            else "[yellow]no[/]"
            if candidate.unavailable is None
            else "[red]absent[/]"
        )
        reasons = [escape(reason) for reason in plan.why_not(candidate)] or ["[green]chosen[/]"]
        remarks = [f"[dim]{escape(remark)}[/]" for remark in plan.remarks(candidate)]
        rows.add_row(escape(candidate.backend), takes, "\n".join((*reasons, *remarks)))
    show(rows)


def plan_json(plan: Planned) -> dict[str, Any]:
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
                "ms": None if candidate.time is None else candidate.time.ms,
                "expected_ms": candidate.expected,
                "why_not": list(plan.why_not(candidate)),
                "remarks": list(plan.remarks(candidate)),
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
            *map(escape, label),
            dtype,
            f"[green]{tally.verified}[/]" if tally.verified else "0",
            str(tally.gradients),
            f"{tally.worst:.3f}" if tally.verified else "-",
            f"[yellow]{tally.refused}[/]" if tally.refused else "0",
            f"[bold red]{tally.mismatched}[/]" if tally.mismatched else "0",
        )
    return rows


def matrix(report: Report) -> None:
    """How often each check held on each backend, where that fits; the HTML page has it for any number of them."""
    backends = facts.by_backend(report)
    devices = {device for device, _ in backends}
    heads = [escape(backend if len(devices) == 1 else f"{device} {backend}") for device, backend in backends]
    rows = table("check", *heads, right=tuple(heads))
    for check in facts.checks(backends.values(), report.failures):
        if all(facts.state(tally, check) == "never" for tally in backends.values()):
            continue  # such as the checks of a GPU on a CPU
        rows.add_row(escape(check), *(_state(tally, check) for tally in backends.values()))
    wanted = Console(width=1000).measure(rows).maximum  # a narrow console would fold it to its own width
    if rows.row_count and wanted <= min(MATRIX, console.width):
        console.print()
        console.print(rows)
        console.print("[dim]cases on which each check held; ✗: cases that broke it[/]", soft_wrap=True)


def _state(tally: Tally, check: str) -> str:
    broken = f"[bold red]✗ {tally.broken[check]}[/]" if tally.broken[check] else ""
    return broken or (str(tally.held[check]) if tally.held[check] else "[dim]·[/]")


def failures(found: list[Found]) -> None:
    """Each failure: the smallest case, the first bad element, the line that runs it again, and when it was found."""
    for item in found:
        outcome, failure = item.outcome, item.outcome.failure
        assert failure is not None
        where = f" [dim](chose {escape(outcome.chosen)})[/]" if outcome.backend == "auto" and outcome.chosen else ""
        place = escape(f"{outcome.backend} on {outcome.device}")
        console.print(f"\n[bold red]mismatch[/] {place}{where}: {escape(failure.title)}", soft_wrap=True)
        for line in (str(outcome.case), failure.message, facts.element(failure)):
            if line:
                console.print(f"  {escape(line)}", soft_wrap=True)
        console.print(f"  [dim]{facts.when(item)}[/]", soft_wrap=True)
        console.print(f"  [bold]{escape(facts.replay_command(item))}[/]", soft_wrap=True)


def notices(backends: list[str]) -> None:
    """How targets were understood, a line each."""
    for name in backends:
        backend = registry.load(name) if ":" in name else None
        if isinstance(backend, Backend) and backend.notice:
            console.print(f"[dim]{escape(name)}: {escape(backend.notice)}[/]", soft_wrap=True)


def emulated(plan: Plan) -> None:
    """What a run is not about to show, before it begins."""
    for target in plan.targets:
        if target.emulation:
            console.print(f"[yellow]{escape(facts.emulated(target.device, target.emulation))}[/]", soft_wrap=True)


def verdict(report: Report) -> None:
    """The last line of a run."""
    colour = {0: "bold green", 1: "bold red"}.get(report.exit_code, "bold yellow")
    console.print(f"[{colour}]{facts.verdict(report)}[/]")
