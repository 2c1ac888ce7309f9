"""``attnswitch bench choice``: how far the choice is from the fastest candidate, on problems drawn for it."""

from __future__ import annotations

import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnswitch.bench.measure import Budget
from attnswitch.problem import Problem
from attnswitch.verify.session.provenance import provenance

from . import files, render
from .named import present

if TYPE_CHECKING:
    from attnswitch.bench.choice import Judged

__all__ = ["choice"]

SCHEMA = 1
#: Milliseconds for each candidate.
_BUDGET = 20.0
#: Of these, the problems with the largest regrets are shown.
_SHOWN = 12


def choice(
    problem: Annotated[
        list[str] | None, typer.Option(help="In place of what is drawn: b4.h16.s4096.d128.bf16, say (repeatable).")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, metavar="N", help="How many problems to draw.")] = 100,
    seed: Annotated[int, typer.Option(help="Draw other problems than those of seed 0.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    budget: Annotated[
        float, typer.Option(min=1, metavar="MS", help="Milliseconds that each candidate is measured in.")
    ] = _BUDGET,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes that compile before anything is timed; 0 is none, as on the CPU.")
    ] = 12,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Draw problems, time every candidate by the application's clock, and tell how good the choice is.

    The application's clock is that of the public call in a loop which waits for nothing. Exit code 0: good. 1: a result
    was wrong, other than of torch's own call, of which that is told. 2: the tool could not do its work. 3: nothing was
    measured.
    """
    from attnswitch.bench import choice as bench  # torch is slow to import
    from attnswitch.bench.drawn import draw

    where = present(device)
    quiet = files.is_standard(json)
    files.check([json])
    asked = [Problem.parse(text) for text in problem or ()]
    asked = asked or draw(where.partition(":")[0], problems, seed)
    started, judged, stopped = time.monotonic(), list["Judged"](), False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def write(*, last: bool) -> None:
        if json is None or (files.at_the_end(json) and not last):
            return
        document = {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": render.command(json),
            "device": where,
            "environment": provenance(),
            "seconds": round(time.monotonic() - started, 3),
            "stopped": stopped,
            "summaries": [_rounded(asdict(summary)) for summary in bench.summaries(judged)],
            "problems": [each.to_json() for each in judged],
        }
        render.write_json(document, json)

    with Progress(*columns, console=render.console, transient=True, disable=quiet) as bar:
        try:
            if where != "cpu" and processes:
                compiling = bar.add_task("compiling", total=len(asked))
                for _ in bench.build(asked, where, processes):
                    bar.advance(compiling)
            timing = bar.add_task("timing", total=len(asked))
            for each in asked:
                bar.update(timing, description=str(each))
                judged.append(bench.judge(each, where, Budget(budget / 4, budget)))
                bar.advance(timing)
                if len(judged) % 10 == 0:
                    write(last=False)
        except KeyboardInterrupt:
            stopped = True
    write(last=True)
    if not quiet:
        _show(judged)
    raise typer.Exit(_exit_code(judged, stopped=stopped))


def _exit_code(judged: list[Judged], *, stopped: bool) -> int:
    """That of what attnswitch answers: torch's own call stands beside it."""
    from attnswitch.bench.choice import TORCH

    if stopped:
        return 2
    if any(_wrong(why) for each in judged for name, why in each.failed.items() if name != TORCH):
        return 1
    return 0 if any(each.times.keys() - {TORCH} for each in judged) else 3


def _wrong(why: str) -> bool:
    return why.startswith("wrong")


def _rounded(fields: dict[str, object]) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def _show(judged: list[Judged]) -> None:
    """The problems with the largest regrets, what failed, then the means."""
    from attnswitch.bench.choice import TORCH, summaries

    worst = sorted((each for each in judged if each.regret is not None), key=lambda each: -(each.regret or 0))
    table = render.table("problem", "chosen", "ms", "fastest", "ms", "regret", "torch", right=("ms", "regret", "torch"))
    table.columns[0].no_wrap = True
    for each in worst[:_SHOWN]:
        assert each.chosen is not None
        assert each.fastest is not None
        torch = f"{each.times[TORCH].median:.4g}" if TORCH in each.times else ""
        chosen, fastest = (f"{each.times[name].median:.4g}" for name in (each.chosen, each.fastest))
        table.add_row(str(each.problem), each.chosen, chosen, each.fastest, fastest, f"{each.regret:.2f}", torch)
    if worst:
        render.whole(table)
    for each in judged:
        for name, why in each.failed.items():
            if name != TORCH or _wrong(why):  # what torch cannot say is usual
                text = f"{name} on {each.problem}: {why}"
                render.console.print(f"[yellow]not measured[/] {render.escape(text)}", soft_wrap=True)
    said = {"regret": "of the fastest candidate", "beside_torch": "of torch's own call"}
    for summary in summaries(judged):
        render.console.print(
            f"{summary.direction}: the choice takes {summary.mean:.3f} times the time {said[summary.ratio]}"
            f" ({summary.count} problems), at most {summary.worst:.2f} ({render.escape(summary.problem)})",
            soft_wrap=True,
        )
