"""What ``attnswitch verify`` demands of backends: read from the options, and shown at the end of a run."""

from __future__ import annotations

from pathlib import Path

from attnswitch.errors import InvalidProblem
from attnswitch.verify.demands import definitions
from attnswitch.verify.demands.profiles import named
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.report import demands
from attnswitch.verify.session.tally import Report

from . import render

__all__ = ["each", "read", "show"]


def read(require: list[str] | None, profiles: list[str] | None, longest: int | None = None) -> tuple[Requirement, ...]:
    """The requirements of ``--require`` and ``--profile``. Raises ``InvalidProblem``.

    None may be of sequences beyond the ``longest``, if that is given.
    """
    found = [
        definitions.read(Path(text)) if definitions.is_meant(text) else Requirement.parse(text)
        for text in require or ()
    ]
    for name in profiles or ():
        found += named(name).requirements
    for one in found:
        least = max(one.range("Lq").first, one.range("Lk").first)
        if longest is not None and least > longest:
            raise InvalidProblem(f"--longest {longest}, and {','.join(one.words)} demands {least} at least")
    return tuple(dict.fromkeys(found))


def each(number: int | None, require: list[str] | None, profiles: list[str] | None) -> int | None:
    """Cases of each word, as ``--each`` says. Raises ``InvalidProblem`` where there are no words."""
    if number is not None and not (require or profiles):
        raise InvalidProblem(f"--each {number} is of words that are demanded: add --require or --profile")
    return number


def show(report: Report) -> None:
    """A table of the demanded classes: how many of their cases were drawn, and which part of them was taken."""
    found = demands.rows(report)
    if not found:
        return
    columns = ("demanded", "device", "backend", "drawn", "taken", "right", "share", "refused, mostly")
    table = render.table(*columns, right=("drawn", "taken", "right", "share"))
    previous = ""
    for row in found:
        if row.requirement != previous and len(report.demanded.requirements) > 1:
            table.add_row(f"[bold]{render.escape(row.requirement)}[/]")
        previous = row.requirement
        share = row.share
        lacking = share.refused or not share.tried
        table.add_row(
            render.escape(row.word),
            *map(render.escape, (row.device, row.backend)),
            str(share.drawn),
            str(share.taken),
            str(share.right),
            f"[bold red]{row.percent}[/]" if lacking else f"[green]{row.percent}[/]",
            render.escape(row.reason),
        )
    render.console.print()
    render.show(table)
