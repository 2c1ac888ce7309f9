"""Running a backend on what it refuses, to see whether the reason still holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.planning import planner

__all__ = ["unguarded"]


@contextlib.contextmanager
def unguarded(name: str) -> Iterator[None]:
    """Within the context, backend ``name`` refuses nothing. For looking at known faults; not for use.

    A backend may crash the process on what it refuses. Raises ``InvalidProblem`` for an unknown name.
    """
    backend = registry.load(name)
    if not isinstance(backend, Backend):
        yield
        return
    with registry.standing_in(name, _refusing_nothing(backend)):
        planner.forget()
        try:
            yield
        finally:
            planner.forget()


def _refusing_nothing(backend: Backend) -> Backend:
    """The same backend, which takes every problem and has no known divergences."""
    kind: Any = type(backend)
    members = {"reasons": lambda *_: iter(()), "divergences": "", "__module__": kind.__module__}
    made: Backend = object.__new__(type(kind.__name__, (kind,), members))
    made.__dict__.update(vars(backend))
    return made
