"""Which backends ``attnswitch verify`` and ``replay`` let run in processes of their own, as their options say."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from attnswitch.errors import InvalidProblem
from attnswitch.verify.court import Court, sitting
from attnswitch.verify.outcome import AUTO

from .named import reach

__all__ = ["ATEN", "seat"]

ATEN = "aten"
#: The share of the time that one launch may take after which the candidate is ended, before its judge is.
_SHARE = 0.8


def seat(
    context: typer.Context,
    backends: Sequence[str] | None,
    devices: Sequence[str],
    asked: bool | None,
    *,
    isolate: bool,
    timeout: float,
    forbid: str | None,
) -> Court:
    """The court of a command, which sits until that ends. None of the code of its backends is loaded here.

    Unless it is ``asked`` for, the targets that are named on the CPU stand before it: their kernels are nobody's yet.

    Raises:
        InvalidProblem: what is asked for needs processes that the other options forbid, or is not known.
    """
    if forbid not in (None, ATEN):
        raise InvalidProblem(f"--forbid {forbid!r}: expected {ATEN}, torch's own attention and matrix products")
    named = list(dict.fromkeys(name for name in backends or () if name != AUTO))
    if (asked or forbid) and not isolate:
        raise InvalidProblem("--court and --forbid have kernels run in processes of their own: leave out --no-isolate")
    if asked and not named:
        raise InvalidProblem("--court tries the backends that are named: add --backend")
    if asked is None:
        asked = isolate and all(device == "cpu" for device in devices)
        named = [name for name in named if ":" in name]
    if forbid and not (asked and named):
        raise InvalidProblem("--forbid watches kernels in processes of their own: add --court and --backend")
    named = named if asked else []
    for name in named:
        reach(name)
    court = Court(tuple(named), timeout * _SHARE, forbid is not None)
    context.with_resource(sitting(court))
    return court
