"""What a worker tells the conductor of a run, as it happens."""

from __future__ import annotations

from dataclasses import dataclass

from attnswitch.verify.outcome import Outcome

__all__ = ["Done", "Event", "Examined", "Lost", "Ready", "Shrunk", "Smaller"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker process has started, and begins with its job."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Case ``number`` of the seed, or of a list of given cases, was tried."""

    number: int
    outcomes: tuple[Outcome, ...]
    #: From the start of the job to the end of this case.
    seconds: float = 0.0
    #: Whether other data recipes of the same case follow.
    more: bool = False


@dataclass(frozen=True, slots=True)
class Smaller:
    """A failure that is being shrunk, in the smallest form so far."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A distinct failure in its smallest form; ``number`` is the case it was first seen in."""

    outcome: Outcome
    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The device can run nothing more in this process; ``outcome`` is what cost it."""

    outcome: Outcome
    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """A job is finished."""


Event = Ready | Examined | Smaller | Shrunk | Lost | Done
