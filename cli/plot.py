"""``attnswitch bench plot``: a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from attnswitch.bench import plots
from attnswitch.bench.compare import load

from . import render

__all__ = ["plot"]


def plot(
    results: Annotated[Path, typer.Argument(help="JSON of a run.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Picture to write: its name ends in .png, .svg or .pdf.")],
    kind: Annotated[
        Literal["throughput", "roofline", "speedup"],
        typer.Option(help="TFLOP/s over the length; the roofline; the speed beside torch's own choice."),
    ] = "throughput",
) -> None:
    """Draw a run. Needs matplotlib: pip install 'attnswitch[plot]'."""
    plots.draw(kind, load(results), out)
    render.console.print(f"{kind} of {render.escape(results.name)} drawn to {render.escape(str(out))}", soft_wrap=True)
