"""Which backends ``attnswitch verify`` and ``replay`` let run in processes of their own, as their options say."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from attnswitch.errors import InvalidProblem
from attnswitch.verify.court import Court, sitting
from attnswitch.verify.outcome import AUTO

from . import said
from .named import reach

__all__ = ["ATEN", "COURT", "FORBID", "again", "seat"]

ATEN = "aten"
#: The options of the commands that have one.
COURT = typer.Option(
    help="Give kernels inputs alone, in a process that knows no answers. Default: for targets on the CPU."
)
FORBID = typer.Option(help="aten: a kernel that calls torch's own attention or matrix products has failed.")
#: The share of the time that one launch may take after which the candidate is ended, before its judge is.
_SHARE = 0.8


def seat(
    context: typer.Context,
    backends: Sequence[str] | None,
    asked: bool | None,
    *,
    isolate: bool,
    timeout: float,
    forbid: str | None,
) -> Court:
    """The court of a command, which sits until that ends. None of the code of its backends is loaded here.

    Unless it is ``asked`` for, the targets that are named stand before it on the CPU: their kernels are nobody's yet.

    Raises:
        InvalidProblem: what is asked for needs processes that the other options forbid, or is not known.
    """
    named = list(dict.fromkeys(name for name in backends or () if name != AUTO))
    targets = [name for name in named if ":" in name]
    if forbid not in (None, ATEN):
        raise InvalidProblem(f"--forbid {forbid!r}: expected {ATEN}, torch's own attention and matrix products")
    if (asked or forbid) and not isolate:
        raise InvalidProblem("--court and --forbid have kernels run in processes of their own: leave out --no-isolate")
    if not isolate and (of_processes := said.first(context, ("workers", "timeout"))):
        option = said.option(context, of_processes)
        raise InvalidProblem(f"{option} is of processes, and --no-isolate has none: leave out one of them")
    if asked and not named:
        raise InvalidProblem("--court tries the backends that are named: add --backend")
    if forbid and asked is False:
        raise InvalidProblem("--forbid watches kernels before the court: leave out --no-court")
    if forbid and not (targets or asked):
        raise InvalidProblem("--forbid watches kernels in processes of their own: add --court and --backend")
    seated = [] if asked is False or not isolate else named if asked else targets
    for name in seated:
        reach(name)
    court = Court(tuple(seated), timeout * _SHARE, forbid is not None, everywhere=asked is True)
    context.with_resource(sitting(court))
    return court


def again(court: bool | None, forbid: str | None) -> tuple[str, ...]:
    """The options with which ``replay`` has a case stand before the same court."""
    stated = {None: (), True: ("--court",), False: ("--no-court",)}[court]
    return (*stated, *(() if forbid is None else ("--forbid", forbid)))
