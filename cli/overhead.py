"""``attnswitch bench overhead``: what a call costs the host, beside the same kernel called without attnswitch."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from attnswitch.problem import Problem
from attnswitch.verify.session.provenance import provenance

from . import files, render
from .named import named, present

if TYPE_CHECKING:
    from attnswitch.bench.overhead import Cost

__all__ = ["overhead"]


def overhead(
    problem: Annotated[
        list[str] | None, typer.Option(help="In place of the tiny ones: b1.h1.s8.d64.fp32.grad, say (repeatable).")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend (repeatable). Default: all that take torch's tensors.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Batches of 50 calls, of each way to call.")] = 100,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Time calls until they return, on tiny tensors, beside the same kernels called through torch.

    Exit code 0: good. 2: the tool could not do its work.
    """
    from attnswitch.bench.overhead import costs, problems, to_json  # torch is slow to import

    where = present(device)
    asked = [Problem.parse(text) for text in problem] if problem else problems(where)
    names = tuple(named(name) for name in backend or ())
    quiet = files.is_standard(json)
    files.check([json])
    start = time.monotonic()
    bar = track(asked, "calls", console=render.console, transient=True, disable=quiet)
    found = [cost for each in bar for cost in costs(each, where, names, rounds)]
    if json is not None:
        made = to_json(
            found,
            device=where,
            rounds=rounds,
            environment=provenance(),
            command=render.command(json),
            seconds=time.monotonic() - start,
        )
        render.write_json(made, json)
    if not quiet:
        _show(found)


def _show(found: list[Cost]) -> None:
    for problem, costs in groupby(found, key=lambda cost: cost.problem):
        render.console.print(f"\n[bold]{render.escape(problem)}[/]")
        rows = render.table("call", "us", "±", "over", "beside", right=("us", "±", "over"))
        for cost in costs:
            spread = f"{(cost.us_high - cost.us_low) / 2:.2g}"
            over = "" if cost.over is None else f"{cost.over:+.1f}"
            rows.add_row(cost.call, f"{cost.us:.1f}", spread, over, cost.beside or "")
        render.whole(rows)
    render.console.print(
        "\n[dim]us: microseconds until the call returns, the median; ±: half of the range from the 20th to the 80th"
        " percentile; over: more than the same kernel through torch's own call in the same round, the median[/]",
        soft_wrap=True,
    )
