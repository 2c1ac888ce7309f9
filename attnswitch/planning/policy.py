"""``Policy``: what the choice of a backend may rest on, and for how long it holds."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of

__all__ = ["Policy", "effective", "of_context", "share", "using"]

_SHARE = 0.05


class Policy(enum.StrEnum):
    """What the choice of a backend may rest on. All names but LEARN are FFTW's."""

    #: What was measured here if anything was, else the forecast, else the declared order. Never measures. The default.
    ESTIMATE = "estimate"
    #: What was not measured yet is, at the first call of its class, and remembered for every later process.
    MEASURE = "measure"
    #: As ESTIMATE, and what was not measured yet is, in the background, within ``share`` of the time.
    LEARN = "learn"
    #: Only what was measured here: a call of any other class raises ``Unsupported``.
    WISDOM_ONLY = "wisdom-only"

    __hash__ = str.__hash__  # they equal their texts, and every call looks one up


_chosen: ContextVar[Policy | None] = ContextVar("attnswitch_policy", default=None)
#: The policy of the context, if it has one.
of_context = _chosen.get


@contextlib.contextmanager
def using(policy: Policy | str) -> Iterator[None]:
    """Within the context, calls of this thread (or task) that name no policy of their own go by ``policy``.

    Raises ``InvalidProblem`` for what is no policy.
    """
    before = _chosen.set(_read(policy, "policy"))
    try:
        yield
    finally:
        _chosen.reset(before)


def effective(policy: Policy | str | None) -> Policy:
    """``policy`` if it is one, else that of the context, else of ATTNSWITCH_POLICY, which is read once.

    Raises ``InvalidProblem`` for what is no policy.
    """
    if policy is not None:
        return _read(policy, "policy")
    return _chosen.get() or of_process()


@functools.cache
def of_process() -> Policy:
    """The policy that this process was started with."""
    return _read(os.environ.get("ATTNSWITCH_POLICY") or Policy.ESTIMATE, "ATTNSWITCH_POLICY")


@functools.cache
def share() -> float:
    """The share of the time in which policy LEARN may measure: ATTNSWITCH_LEARN_SHARE, which is read once, else 0.05.

    Raises ``InvalidProblem`` for what is no number above 0 and up to 1.
    """
    said = os.environ.get("ATTNSWITCH_LEARN_SHARE") or _SHARE
    try:
        number = float(said)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise InvalidProblem(f"ATTNSWITCH_LEARN_SHARE={said!r}: expected a number above 0 and up to 1, such as 0.05")
    return number


def _read(policy: Policy | str, what: str) -> Policy:
    try:
        return Policy(policy)
    except ValueError:
        raise InvalidProblem(f"{what}={policy!r}: {one_of(policy, Policy)}") from None
