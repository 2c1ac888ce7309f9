"""``attnswitch bench overhead``: what a call costs, beside torch's own call of the same."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from attnswitch.bench.overhead.rows import SECTIONS, Keys, New, Row, ad_hoc, rows
from attnswitch.errors import InvalidProblem
from attnswitch.verify.session.provenance import provenance

from . import files, render
from .named import named, present

if TYPE_CHECKING:
    from attnswitch.bench.overhead.costs import Cost

__all__ = ["overhead"]


def overhead(
    section: Annotated[
        list[str] | None, typer.Option(help=f"Only the rows of a section: {', '.join(SECTIONS)} (repeatable).")
    ] = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="In place of the rows: b1.h8.s1x300.d64.fp32.mask=bool:k, say (repeatable)."),
    ] = None,
    keys: Annotated[Keys, typer.Option(help="Keys and values of --problem: whole, or a slice of a cache.")] = "whole",
    new: Annotated[New, typer.Option(help="What each call of --problem has that none had before.")] = "nothing",
    step: Annotated[bool, typer.Option("--step", help="Time training steps of --problem, not calls.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend (repeatable). Default: all that take torch's tensors.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Batches of each way to call, however long they take.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small batches: whether it works, not how fast.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Time calls of small problems, and training steps, beside the same through torch.

    repeated: the same call again. lengths: one more key in each call. masks: bool and float, kept and new. training:
    forward and gradients, by the clock of a loop. forms: pages, sequences one after another, sinks and slopes, with new
    tensors in each call, and training steps of these; "first" is a call of a kind that was not met before. All but
    steps until the call returns.

    Exit code 0: good. 2: the tool could not do its work.
    """
    from attnswitch.bench.overhead import clock  # torch is slow to import
    from attnswitch.bench.overhead.costs import costs
    from attnswitch.bench.overhead.document import to_json

    where = present(device)
    asked = _asked(where, section, problem, keys, new, step=step, quick=quick)
    names = tuple(named(name) for name in backend or ())
    effort = clock.QUICK if quick else clock.THOROUGH
    if rounds is not None:
        effort = replace(effort, rounds=rounds, warm=3, seconds=math.inf)
    quiet = files.is_standard(json)
    files.check([json])
    start = time.monotonic()
    bar = track(asked, "calls", console=render.console, transient=True, disable=quiet)
    made = [cost for row in bar for cost in costs(row, where, names, effort)]
    if json is not None:
        document = to_json(
            made,
            device=where,
            effort=effort,
            environment=provenance(),
            command=render.command(json),
            seconds=time.monotonic() - start,
        )
        render.write_json(document, json)
    if not quiet:
        _show(made)


def _asked(
    device: str,
    sections: list[str] | None,
    problems: list[str] | None,
    keys: Keys,
    new: New,
    *,
    step: bool,
    quick: bool,
) -> list[Row]:
    if problems:
        if sections:
            raise InvalidProblem("--section names rows, and --problem stands in their place: leave one of them out")
        return [ad_hoc(text, keys, new, step=step) for text in problems]
    if (keys, new, step) != ("whole", "nothing", False):
        raise InvalidProblem("--keys, --new and --step are for --problem; the rows say their own")
    return rows(device, sections or SECTIONS, quick=quick)


def _show(made: list[Cost]) -> None:
    for title, of_row in groupby(made, key=_title):
        costs = list(of_row)
        render.console.print(f"\n[bold]{render.escape(title)}[/]", soft_wrap=True)
        if costs[0].unmatched:
            render.console.print(f"[dim]not beside torch: {render.escape(costs[0].unmatched)}[/]", soft_wrap=True)
        launches = ("kernels",) if any(cost.kernels is not None for cost in costs) else ()
        right = ("us", "±", "over", "ratio", *launches)
        table = render.table("call", "us", "±", "over", "ratio", *launches, "beside", right=right)
        for cost in costs:
            spread = f"{(cost.us_high - cost.us_low) / 2:.2g}"
            over = "" if cost.over is None else f"{cost.over:+.1f}"
            ratio = "" if cost.ratio is None else f"{cost.ratio:.2f}"
            kernels = [f"{cost.kernels or 0:.3g}"] if launches else []
            table.add_row(cost.call, f"{cost.us:.1f}", spread, over, ratio, *kernels, cost.beside or "")
        render.whole(table)
    render.console.print(
        "\n[dim]us: microseconds until the call returns, the median; of a training step, until the device has done it;"
        " ±: half of the range from the 20th to the 80th percentile; over, ratio: more than the call beside in the"
        " same round, and times as much, the medians[/]",
        soft_wrap=True,
    )


def _title(cost: Cost) -> str:
    """The row that ``cost`` is of."""
    keys = ", keys of a cache" if cost.keys == "slice" else ""
    what = "new tensors" if cost.new == "tensors" else f"a new {cost.new}"
    new = f", {what} in each call" if cost.new != "nothing" else ""
    return f"{cost.section}: {cost.problem}{keys}{new}"
