"""``Terms``: what a run demands of the backends that it judges. Every process that judges is told them first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from attnswitch.machine.backend import Precision
from attnswitch.verify.court.sitting import Court

__all__ = ["Terms", "now", "within"]


@dataclass(frozen=True, slots=True)
class Terms:
    """The usual ones demand nothing: a backend may refuse what it likes, and declares its precision itself.

    ``precision`` is the least that it is held to, whatever it declares; None leaves that to it. Kernels of the backends
    of ``court`` run in processes of their own.
    """

    precision: Precision | None = None
    court: Court = Court()  # noqa: RUF009


_USUAL = Terms()
_now = ContextVar("terms", default=_USUAL)


def now() -> Terms:
    """The terms on which this process judges."""
    return _now.get()


@contextlib.contextmanager
def within(terms: Terms) -> Iterator[None]:
    """Judge on these terms within the context."""
    token = _now.set(terms)
    try:
        yield
    finally:
        _now.reset(token)
