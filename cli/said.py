"""What the command line itself says, apart from defaults and the environment."""

from __future__ import annotations

from collections.abc import Iterable

import typer

__all__ = ["first", "option"]


def first(context: typer.Context, names: Iterable[str]) -> str | None:
    """The first of the parameters ``names`` that it says, if any."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return next((name for name, source in sources if source is not None and source.name == "COMMANDLINE"), None)


def option(context: typer.Context, name: str) -> str:
    """What the parameter ``name`` is called there."""
    return next(one.opts[0] for one in context.command.params if one.name == name)
