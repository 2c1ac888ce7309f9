"""What the process that measures in the background and the one it works for say to each other."""

from __future__ import annotations

import enum
from typing import NamedTuple

from attnswitch.problem import Problem
from attnswitch.wisdom.record import Record

__all__ = ["Answer", "Ask", "Say"]


class Say(enum.Enum):
    """A word, for which there is no more to say."""

    #: The worker is there, and waits to be asked.
    READY = enum.auto()
    #: A step is done: it goes on when it is told to.
    REST = enum.auto()
    #: Another program has a class measured: it looks again when it is told to.
    BUSY = enum.auto()
    #: Go on.
    GO = enum.auto()


class Ask(NamedTuple):
    """What to measure, where torch calls it, and with how many threads of torch's; None for as many as it likes."""

    problem: Problem
    where: str
    threads: int | None


class Answer(NamedTuple):
    """All that is known of the class now, whoever measured it."""

    records: tuple[Record, ...]
