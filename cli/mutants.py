"""``attnswitch verify --mutants``: the verifier tried on backends that are wrong on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnswitch.verify.checks import named
from attnswitch.verify.mutants.matrix import Matrix, measure
from attnswitch.verify.mutants.matrix import Progress as Advance

from . import render

__all__ = ["bar", "run", "show"]

#: Columns of a terminal in which the checks that see a mutant are named.
_WIDE = 150


def run(seed: int, examples: int, workers: int | None, alone: bool, quiet: bool) -> Matrix:
    """Measure every mutant, and every check ``alone``, with a progress bar."""
    with bar(quiet) as progress:
        return measure(seed, examples, workers=workers, progress=progress, alone=alone)


@contextlib.contextmanager
def bar(quiet: bool) -> Iterator[Advance]:
    """A bar of what is done of how much, while mutants are tried."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=render.console, transient=True, disable=quiet) as shown:
        task = shown.add_task("starting", total=None)

        def progress(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what)

        yield progress


def show(matrix: Matrix) -> None:
    """The mutants with what caught them; and the checks with what they are there for, if they looked alone."""
    seen = ("seen alone by",) if matrix.checks else ()
    rows = render.table("family", "mutant", "caught by", "cases", "s", *seen, right=("cases", "s"))
    wide = render.console.width >= _WIDE  # else how many checks see it; --json and --html say which
    previous = ""
    for row in sorted(matrix.rows, key=lambda row: row.family):
        first = f"[green]{row.first}[/]" if row.first else "[bold red]nothing[/]"
        names = ", ".join(f"{check} [dim]{cases}[/]" for check, cases in row.caught.items())
        alone = names if wide else f"{len(row.caught)} checks"
        family = "" if row.family == previous else row.family
        cells = (family, row.name, first, str(row.cases), f"{row.seconds:.1f}", alone)
        rows.add_row(*cells[: len(rows.columns)])
        previous = row.family
    render.show(rows)
    which = "; seen alone by: checks that see it when nothing else looks, with the number of the case" if seen else ""
    render.console.print(
        f"[dim]caught by: what ended a run as a user would start it, after so many cases and seconds{which}[/]\n",
        soft_wrap=True,
    )
    if matrix.checks:
        _show_checks(matrix)
    survivors = ", ".join(row.name for row in matrix.survivors)
    verdict = f"[bold red]{len(matrix.survivors)} survive: {survivors}[/]" if survivors else "[bold green]all caught[/]"
    render.console.print(
        f"\n{len(matrix.rows)} mutants, seed {matrix.seed}; median time to the first counterexample"
        f" {matrix.median_seconds:.1f} s\n{verdict}",
        soft_wrap=True,
    )


def _show_checks(matrix: Matrix) -> None:
    checks = render.table("check", "sees", "that no other sees", right=("sees",))
    for check in matrix.checks:
        alone = ", ".join(matrix.alone(check))
        seen = sum(check in row.caught for row in matrix.rows)
        checks.add_row(check, str(seen), alone or f"[dim]{render.escape(named(check).why)}[/]")
    render.show(checks)
