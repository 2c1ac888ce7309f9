"""Backends that run on the CPU under an emulation only, for checking: the environment variables that it takes.

A backend says so by its class attribute ``emulation`` (``attnswitch.machine.backend``). Libraries read such variables
once, as they are imported: worker processes get them from the start, this process only while the library is not there
yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner

__all__ = ["begin", "fact", "text", "variables"]


def variables(backends: Iterable[str], device: str) -> dict[str, str]:
    """What the environment must hold for ``backends`` to run on ``device``; nothing unless it is the CPU.

    Raises ``InvalidProblem`` if two of them want different values of one variable.
    """
    found: dict[str, str] = {}
    for name in backends if device == "cpu" else ():
        backend = registry.load(name) if ":" in name or name in registry.names() else Missing("")
        for variable, value in ({} if isinstance(backend, Missing) else backend.emulation).items():
            if found.setdefault(variable, value) != value:
                raise InvalidProblem(
                    f"{variable} would have to be {found[variable]!r} and {value!r} for {', '.join(backends)} to be"
                    " emulated: verify them one at a time"
                )
    return found


def begin(wanted: Mapping[str, str]) -> None:
    """Set the variables in this process, for as long as it lives.

    Raises ``InvalidProblem`` if a library that reads one of them, which is the first word of its name, is imported.
    attnswitch itself reads them whenever it asks.
    """
    new = {variable: value for variable, value in wanted.items() if os.environ.get(variable) != value}
    late = {variable.partition("_")[0].lower() for variable in new} & sys.modules.keys() - {"attnswitch"}
    if late:
        raise InvalidProblem(
            f"{text(new)} is not set, and {', '.join(sorted(late))}, which reads it as it is imported, has been"
            " imported in this process: set it before Python starts, or let kernels run in a process of their own"
            " (leave out --no-isolate)"
        )
    if new:
        os.environ.update(new)
        planner.forget()


def fact(wanted: Mapping[str, str]) -> dict[str, str]:
    """What a record of the environment says of it; nothing where nothing is emulated."""
    return {"emulated": f"on the CPU, under {text(wanted)}"} if wanted else {}


def text(wanted: Mapping[str, str]) -> str:
    """The variables as a shell takes them."""
    return " ".join(f"{variable}={value}" for variable, value in wanted.items())
