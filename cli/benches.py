"""``attnswitch bench`` and what is under it: a run, two runs compared, a run drawn, and what stands apart."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from . import bench, choice, compare, generate, overhead, plot, resident

__all__ = ["app"]


class _RunByDefault(TyperGroup):
    """``attnswitch bench quick`` means ``attnswitch bench run quick``, and so does everything that names no command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in where there is none."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Time backends beside peers (run, which is the default), compare two runs, draw one; how"
    " good the choice is on problems drawn for it (choice); what calls cost the host"
    " (overhead), tokens per second of transformers (generate), memory on the CPU (resident).",
    rich_markup_mode=None,
)
app.command("run")(bench.bench)
app.command("choice")(choice.choice)
app.command("compare")(compare.compare)
app.command("plot")(plot.plot)
app.command("overhead")(overhead.overhead)
app.command("generate")(generate.generate)
app.command("resident")(resident.resident)
