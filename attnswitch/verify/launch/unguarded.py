"""Running a backend on what it refuses, to see whether the reason still holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import Problem

__all__ = ["forget", "unguarded"]


class _Unguarded:
    """A backend that takes every problem and has no known divergences; everything else is the backend's own."""

    divergences = None

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Everything."""
        return ()


@contextlib.contextmanager
def unguarded(name: str) -> Iterator[None]:
    """Within the context, backend ``name`` refuses nothing. For looking at known faults; not for use.

    A backend may crash the process on what it refuses. Raises ``InvalidProblem`` for an unknown name.
    """
    load = registry.load
    backend = load(name)

    def patched(asked: str) -> Any:
        return _Unguarded(backend) if asked == name and not isinstance(backend, str) else load(asked)

    registry.load = patched  # type: ignore[assignment]
    forget()
    try:
        yield
    finally:
        registry.load = load
        forget()


def forget() -> None:
    """Drop what was planned and compiled: what a backend takes has changed."""
    planner.forget()
    planner.kernel.cache_clear()
