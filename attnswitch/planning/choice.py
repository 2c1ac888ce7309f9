"""The rule by which a backend is chosen. It is the one place where that is decided, for calls and for explanations."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from attnswitch.machine.backend import Standing
from attnswitch.planning.field import Field, Row
from attnswitch.planning.forecast import forecast
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem
from attnswitch.wisdom import view
from attnswitch.wisdom.classes import TIE
from attnswitch.wisdom.record import Time, Untimed
from attnswitch.wisdom.view import Near

__all__ = ["Basis", "Choice", "choose", "stands_for"]


class Basis(enum.Enum):
    """What a choice rests on; of those after ``DECLARED``, nothing could be chosen."""

    FORCED = enum.auto()
    #: Another problem has this choice, and this one goes along (``stands_for``).
    ALONG = enum.auto()
    MEASURED = enum.auto()
    NEAREST = enum.auto()
    FORECAST = enum.auto()
    DECLARED = enum.auto()
    #: The backend that was asked for does not take the problem.
    REFUSED = enum.auto()
    #: Nothing takes it; whatever takes it has to be timed or named first, or was wrong here; nothing was measured, and
    #: the policy asks for that.
    UNTAKEN = enum.auto()
    UNPROVEN = enum.auto()
    DISTRUSTED = enum.auto()
    UNMEASURED = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A backend and the text of its config, or None; and how the nearest classes did, where it rests on them."""

    backend: str | None
    basis: Basis
    config: str = ""
    near: tuple[tuple[str, Near], ...] = ()


def choose(field: Field, named: str | None, policy: Policy) -> Choice:
    """The backend for the problem of ``field``: ``named``, else the fastest that was measured, else the first in order.

    One that holds much memory stands back where another does without (``Field.heavy``).
    """
    if named is not None:
        row = field.row(named)
        if not field.takes(row):
            return Choice(None, Basis.REFUSED)
        measured = view.current().time(named, field.problem, field.device)
        return Choice(named, Basis.FORCED, measured.config if isinstance(measured, Time) else "")
    stands = stands_for(field.problem)
    if stands is not field.problem:
        chosen = _free(Field(stands, field.device, restarts=field.restarts), policy).backend
        if chosen is not None and field.takes(field.row(chosen)):
            return Choice(chosen, Basis.ALONG)
    if policy is Policy.WISDOM_ONLY and field.problem.is_empty:  # which takes no time, so that none is ever measured
        policy = Policy.ESTIMATE
    return _free(field, policy)


def stands_for(problem: Problem) -> Problem:
    """The problem whose choice ``problem`` goes along with: of dropout without a seed, that with gradients of all.

    Activation checkpointing makes a forward without gradients, and makes it again with them from the same state of the
    generator. It is to have the same mask, which two backends need not draw from one state.
    """
    if not problem.dropout > 0.0 or problem.seeded:
        return problem
    biased = problem.mask is not None and not problem.mask.is_bool
    grads = "qkvm" if biased else "qkv"
    return problem if problem.grads == grads else problem.replace(grads=grads)


def _free(field: Field, policy: Policy) -> Choice:
    wisdom = view.current()
    if not wisdom.times and policy is not Policy.WISDOM_ONLY:  # nothing to weigh: the first will do
        heavy = None
        for row in field.trusted():
            if not field.heavy(row):
                return _first(field, row)
            heavy = heavy or row
        return _nothing(field) if heavy is None else _first(field, heavy)
    trusted = list(field.trusted())
    trusted = [row for row in trusted if not field.heavy(row)] or trusted
    if not trusted:
        return _nothing(field)
    known = wisdom.tried([row.name for row in trusted], field.problem, field.device)
    times = [time for time in known.values() if isinstance(time, Time)]
    if times and (policy is Policy.WISDOM_ONLY or compared(trusted, known)):
        fastest = min(times, key=lambda time: time.pace)
        return Choice(fastest.backend, Basis.MEASURED, fastest.config)
    if policy is Policy.WISDOM_ONLY:
        return Choice(None, Basis.UNMEASURED)
    first = _first(field, trusted[0], _config(known[trusted[0].name]))
    near = {} if first.basis is Basis.FORECAST else nearest(field, trusted)
    if near:
        best = min(measured.slower for measured in near.values())
        row = next(row for row in trusted if row.name in near and near[row.name].slower <= TIE * best)
        ranked = tuple(sorted(near.items(), key=lambda entry: entry[1].slower))
        return Choice(row.name, Basis.NEAREST, _config(known[row.name]), ranked)
    return first


def _first(field: Field, row: Row, config: str = "") -> Choice:
    """The first in order, which is that of the forecast or the declared one."""
    expected = row.name in forecast(field.problem, field.device).ms
    return Choice(row.name, Basis.FORECAST if expected else Basis.DECLARED, config)


def compared(trusted: Sequence[Row], known: dict[str, Time | Untimed | None]) -> bool:
    """Whether there are times to choose by, of which one is, or might be, of the first in order.

    Where others alone were tried, as after another version of its library came, nothing is known to be faster than it.
    """
    return known[trusted[0].name] is not None and any(isinstance(time, Time) for time in known.values())


def nearest(field: Field, trusted: Sequence[Row]) -> dict[str, Near]:
    """How ``trusted`` did on the nearest problems that were measured; empty where that is no choice."""
    if len(trusted) < 2:
        return {}
    return view.current().nearest(field.problem, field.device, [row.name for row in trusted])


def _config(measured: Time | Untimed | None) -> str:
    return measured.config if isinstance(measured, Time) else ""


def _nothing(field: Field) -> Choice:
    taking = [row for row in field.rows if field.takes(row)]
    if any(row.standing is Standing.FREE for row in taking):
        return Choice(None, Basis.DISTRUSTED)
    return Choice(None, Basis.UNPROVEN if taking else Basis.UNTAKEN)
