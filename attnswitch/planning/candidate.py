"""``Candidate``: one backend looked at for one problem, with what speaks against it and what is known of its speed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from attnswitch.machine.backend import Standing
from attnswitch.wisdom.record import Time, Untimed, Verdict
from attnswitch.wisdom.view import Near

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend looked at for one problem; ``reasons`` empty means that it takes it."""

    backend: str
    reasons: tuple[str, ...] = ()
    #: Why this machine cannot run it; not asked where the plan is for absent hardware.
    unavailable: str | None = None
    #: Whether that is because it raised where it should have answered.
    broken: bool = False
    #: What it took on problems of this class on this machine, or why that could not be measured.
    time: Time | None = None
    untimed: Untimed | None = None
    #: How it did on the nearest problems that were measured, where those of this class tell too little.
    near: Near | None = None
    #: Milliseconds that it is expected to take, where there is a forecast.
    expected: float | None = None
    #: A mismatch that was seen on this machine and concerns the problem.
    fault: Verdict | None = None
    #: Text of the config to compile it with, "" for the heuristic's choice.
    config: str = ""
    #: When it may be chosen without being named.
    standing: Standing = Standing.FREE
    #: Bytes that a call holds beside operands and results, where they grow with Lq x Lk and are many; else 0.
    heavy: int = 0

    @property
    def fits(self) -> bool:
        """Whether it takes the problem, so that it can be asked for."""
        return not self.reasons and self.unavailable is None

    @property
    def trusted(self) -> bool:
        """Whether it takes the problem and can be chosen for it without being named."""
        return self.fits and self.fault is None and self.standing.allows(self.time is not None)

    @property
    def open(self) -> bool:
        """Whether it could be chosen once it is measured, and nobody has tried that."""
        untried = self.time is None and self.untimed is None
        return self.fits and self.fault is None and untried and self.standing.unasked

    def to_try(self, asked: Collection[str]) -> bool:
        """Whether what tunes tries it, given the names of those that were asked for."""
        return self.fits and (self.standing.unasked or self.backend in asked)
