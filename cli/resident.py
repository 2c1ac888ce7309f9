"""``attnswitch bench resident``: the memory of calls on the CPU, beyond their operands."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from attnswitch.bench.resident import AUTO, PROBLEMS, TIMEOUT, Resident
from attnswitch.bench.resident import resident as measure
from attnswitch.problem import Problem
from attnswitch.verify.session.provenance import provenance

from . import files, render
from .named import named

__all__ = ["resident"]


def resident(
    problem: Annotated[
        list[str] | None, typer.Option(help="In place of the two: b1.h1.s4096.d64.fp32.causal, say (repeatable).")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="auto or a backend (repeatable). Default: auto, the choice.")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds after which a call is given up.")
    ] = TIMEOUT,
    fail_over: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="RATIO", help="Exit code 1 if a call takes more than this many times its operands."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Run calls on the CPU, each in a process of its own, and tell its peak memory beyond the operands.

    Exit code 0: good. 1: more than --fail-over allows. 2: the tool could not do its work. 3: nothing was measured.
    """
    problems = [str(Problem.parse(text)) for text in problem or PROBLEMS]
    names = [named(name) for name in backend or [AUTO]]
    quiet = files.is_standard(json)
    files.check([json])
    start = time.monotonic()
    asked = [(text, name) for text in problems for name in names]
    bar = track(asked, "calls", console=render.console, transient=True, disable=quiet)
    made = [measure(text, name, limit) for text, name in bar]
    if json is not None:
        document = {
            "schema": 1,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": render.command(json),
            "device": "cpu",
            "seconds": round(time.monotonic() - start, 3),
            "environment": provenance(),
            "resident": [each.to_json() for each in made],
        }
        render.write_json(document, json)
    if not quiet:
        _show(made)
    ratios = [each.ratio for each in made if each.ratio is not None]
    over = fail_over is not None and (len(ratios) < len(made) or max(ratios) > fail_over)
    raise typer.Exit(3 if not ratios else int(over))


def _show(made: list[Resident]) -> None:
    columns = ("problem", "candidate", "ran", "operands", "beyond", "ratio", "s")
    table = render.table(*columns, "", right=columns[3:])
    table.columns[0].no_wrap = True
    for each in made:
        figures = ("", "", "")
        if each.beyond is not None and each.ratio is not None:
            figures = (f"{each.beyond / 2**20:.1f}", f"{each.ratio:.2f}", f"{each.seconds:.2f}")
        table.add_row(
            each.problem,
            each.backend,
            each.chosen or "",
            f"{each.operands / 2**20:.1f}",
            *figures,
            f"[red]{render.escape(' '.join(each.why.split()))}[/]" if each.why else "",
        )
    render.whole(table)
    render.console.print(
        "\n[dim]operands, beyond: MiB; beyond: the peak of the process over what it had with the operands, results"
        " included; ratio: beyond over operands[/]",
        soft_wrap=True,
    )
