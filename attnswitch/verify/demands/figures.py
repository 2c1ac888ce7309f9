"""``Demanded``: of each demanded class, how many of its cases each backend took, got right and refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.outcome import Outcome

__all__ = ["Class", "Demanded", "Share"]


class Class(NamedTuple):
    """A demanded class on one backend: the problems within a requirement of which a word of it says something."""

    requirement: str
    word: str
    device: str
    backend: str


@dataclass(slots=True)
class Share:
    """How many cases were drawn, how many of them taken, and how many of those right; and why the others were refused.

    ``absent`` counts those that were not taken because the backend cannot run here.
    """

    drawn: int = 0
    taken: int = 0
    right: int = 0
    absent: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.drawn += 1
        self.taken += outcome.verdict not in ("refused", "unavailable")
        self.absent += outcome.verdict == "unavailable"
        self.right += outcome.verdict == "verified"
        self.reasons.update(outcome.reasons)

    @property
    def refused(self) -> bool:
        """Whether a case was not taken, by a backend that is here."""
        return self.tried and self.taken < self.drawn

    @property
    def tried(self) -> bool:
        """Whether the backend was here for any case."""
        return self.drawn > self.absent


class Demanded:
    """The demands of a run. ``places`` are the devices and backends that are held to ``requirements``."""

    def __init__(self, requirements: Iterable[Requirement] = (), places: Iterable[tuple[str, str]] = ()) -> None:
        self.requirements = tuple(requirements)
        held = tuple(places) if self.requirements else ()
        #: All cases within any of the requirements, by device and backend.
        self.whole = {place: Share() for place in held}
        self.classes = {
            Class(str(requirement), word, *place): Share()
            for place in held
            for requirement in self.requirements
            for word in requirement.words
        }

    def add(self, outcome: Outcome) -> None:
        """Count one outcome in every class that its case is of."""
        place = outcome.device, outcome.backend
        if place not in self.whole:
            return
        within = [requirement for requirement in self.requirements if requirement.admits(outcome.case)]
        if within:
            self.whole[place].add(outcome)
        for requirement in within:
            for word in requirement.classes(outcome.case):
                self.classes[Class(str(requirement), word, *place)].add(outcome)

    @property
    def fewest(self) -> int:
        """Cases of the class that has the fewest."""
        return min((share.drawn for share in self.classes.values()), default=0)

    def of(self, place: tuple[str, str]) -> Iterator[tuple[Class, Share]]:
        """The classes on one device and backend."""
        return ((each, share) for each, share in self.classes.items() if (each.device, each.backend) == place)

    @property
    def refused(self) -> list[Class]:
        """Classes of which a case was refused."""
        return [each for each, share in self.classes.items() if share.refused]

    @property
    def never(self) -> list[Class]:
        """Classes of which no case was tried."""
        return [each for each, share in self.classes.items() if not share.tried]
