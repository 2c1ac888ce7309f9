"""``Record``: what came of one candidate on one row in one direction."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["PASSES", "Direction", "Kind", "Record", "Status"]

#: backward: the gradients alone. training: both in one call, as an application makes it.
Direction = Literal["forward", "backward", "training"]
#: Of each direction, whether each of its passes is a backward.
PASSES: dict[Direction, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "training": (False, True)}
Kind = Literal["speed", "decode", "memory"]
#: refused: it does not take the problem; unavailable: it cannot run here, or is not known; failed: it raised;
#: wrong: it ran, and its result is not the answer.
Status = Literal["measured", "wrong", "refused", "unavailable", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """One candidate on one row; what was not measured is None.

    ``ms``, ``ms_low``, ``ms_high``: median, 20th and 80th percentile of ``runs`` runs; ``host_ms``: what launching
    takes the host. ``tflops`` by the convention of ``problem.cost``, ``gbps`` of key and value read. ``percent`` of
    the limit measured in the same run: of the matrix product, or of the copy. ``memory``: peak bytes beyond the
    operands, on a GPU. ``deviation``: the largest ||result - reference|| / ||reference|| of a head in the slice that
    ``against`` names; None where there is nothing to compare with. ``why``: the reason, or the error, if it was not
    measured or is wrong.
    """

    suite: str
    row: str
    problem: str
    kind: Kind
    direction: Direction
    candidate: str
    status: Status
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    runs: int | None = None
    host_ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    percent: float | None = None
    memory: int | None = None
    deviation: float | None = None
    against: str | None = None
    why: str | None = None

    @property
    def group(self) -> tuple[str, str, str]:
        """What is compared with each other: suite, row and direction."""
        return self.suite, self.row, self.direction

    def to_json(self) -> dict[str, Any]:
        """The fields by name, numbers to six digits; NaN and inf as text, which JSON cannot hold as numbers."""
        return {name: _number(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def _number(value: float) -> float | str:
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
