"""``attnswitch verify --shard`` and ``--join``: a run in parts, and one report of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from attnswitch.errors import InvalidProblem
from attnswitch.verify.report.joined import joined
from attnswitch.verify.session.shard import WHOLE, Shard

from . import report as shown
from . import said
from .outputs import Outputs

__all__ = ["join", "part"]

#: What can be said beside ``--join``, which runs nothing.
_BESIDE = ("join", "logs", "json", "junit", "html", "summary")


def part(text: str | None, secret: bool) -> Shard:
    """The part of a run that ``--shard`` names. Raises ``InvalidProblem``."""
    if text is None:
        return WHOLE
    if secret:
        raise InvalidProblem("--shard and --secret: parts of a run have one seed, so name it")
    return Shard.parse(text)


def join(context: typer.Context, logs: Sequence[Path], outputs: Outputs) -> int:
    """Report what ``logs`` hold, as one run; the exit code. Raises ``InvalidProblem``."""
    if not context.params["join"]:
        raise InvalidProblem(f"{logs[0]}: verify takes a log only with --join")
    if other := said.first(context, [name for name in context.params if name not in _BESIDE]):
        option = said.option(context, other)
        raise InvalidProblem(f"{option}: --join runs nothing, and takes --json, --junit, --html and --summary alone")
    outputs.check(None)
    found = joined(logs)
    outputs.write(found)
    if not outputs.quiet:
        shown.show(found)
    return found.exit_code
