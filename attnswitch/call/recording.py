"""The problems that an application really makes, for ``attnswitch tune`` to measure: one a line, in their text form."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from attnswitch.errors import InvalidProblem
from attnswitch.problem import Problem

__all__ = ["Recording", "is_paused", "note", "of_context", "paused", "record", "whole_process"]


@dataclass(slots=True)
class Recording:
    """Problems in the order in which they were first seen; each is written to ``path``, if there is one, at once."""

    path: Path | None = None
    problems: dict[Problem, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, problem: Problem) -> None:
        """Count one call. Raises ``OSError`` if the file cannot be written."""
        with self._lock:
            seen = self.problems.get(problem, 0)
            if not seen and self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:  # one short write, so that processes may share it
                    file.write(f"{problem}\n")
            self.problems[problem] = seen + 1  # what could not be written is tried again with its next call


_current: ContextVar[Recording | None] = ContextVar("attnswitch_recording", default=None)
#: The recording of the context, if there is one.
of_context = _current.get
#: Stands for none, even where the process has one.
_NONE = Recording()


@contextlib.contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[Recording]:
    """Within the context, note the problem of each call of this thread (or task).

    ``problems`` of what is yielded counts the calls of each; with ``path`` each new one is also added to that file, for
    ``attnswitch tune --recorded``. ATTNSWITCH_RECORD=FILE does so for a whole process.

    Raises ``OSError`` for a file that cannot be written.
    """
    made = Recording() if path is None else _opened(path)
    before = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(before)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within the context, note nothing of this thread: what is tried and verified is no call of the application."""
    before = _current.set(_NONE)
    try:
        yield
    finally:
        _current.reset(before)


def is_paused() -> bool:
    """Whether what this thread calls is tried or verified, and no call of the application."""
    return _current.get() is _NONE


def note(problem: Problem) -> None:
    """Note one call, where that is asked for."""
    recording = _current.get() or whole_process()
    if recording is not None and recording is not _NONE:
        recording.add(problem)


@functools.cache
def whole_process() -> Recording | None:
    """What this process was started to record to. Raises ``InvalidProblem`` for an ATTNSWITCH_RECORD that cannot be."""
    path = os.environ.get("ATTNSWITCH_RECORD")
    try:
        return _opened(path) if path else None
    except OSError as error:
        raise InvalidProblem(f"ATTNSWITCH_RECORD={path!r} cannot be written: {error.strerror}") from None


def _opened(path: str | os.PathLike[str]) -> Recording:
    """A recording to the file, which is there from now on, wherever the process changes to."""
    Path(path).open("a").close()
    return Recording(Path(path).absolute())
