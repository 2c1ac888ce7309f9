"""What is known after a case was tried on a backend: the verdict, and the first property that a result broke."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from attnswitch.verify.drawing.case import Case

__all__ = ["AUTO", "Failure", "Kind", "Outcome", "Verdict", "first_of"]

Verdict = Literal["verified", "mismatch", "refused", "unavailable"]

#: Device, backend, check and sort: failures that share them are taken for the same fault.
Kind = tuple[str, str, str, str]

#: Stands for the dispatcher's own choice among the backends.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Failure:
    """A property that did not hold.

    ``check`` names the property (``attnswitch.verify.checks``), or is "crash", "hang" or "lost" where nothing came
    back; ``result`` is what broke it: "out", "lse", a gradient such as "grad query", or an operand.
    """

    check: str
    message: str
    result: str = ""
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    bound: float | None = None

    @property
    def title(self) -> str:
        """Check and result in a few words."""
        return f"{self.check}: {self.result}" if self.result else self.check

    @property
    def sort(self) -> str:
        """What tells it from others of its check: the result, whether numbers are lost in it; or what was raised."""
        if self.check == "crash":
            raised = self.message.partition(":")[0]
            return raised if raised.isidentifier() else ""
        got, expected = self.got, self.expected
        lost = got is not None and expected is not None and not math.isfinite(got) and math.isfinite(expected)
        return f"{self.result}, not finite" if lost else self.result


def first_of(*failures: Failure | None) -> Failure | None:
    """The first that is one."""
    return next((failure for failure in failures if failure is not None), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one case and backend.

    ``checks`` are the properties that were looked at; ``ratios`` holds the worst error / bound of each result and
    ``worst`` the element it is at; ``variant`` is the kernel that ran, where the backend says. ``starved`` is a refusal
    for want of memory, which may be there another time.
    """

    case: Case
    backend: str
    device: str
    verdict: Verdict
    chosen: str | None = None
    reasons: tuple[str, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    checks: tuple[str, ...] = ()
    worst: dict[str, tuple[int, ...]] = field(default_factory=dict)
    variant: str = ""
    seconds: float = 0.0
    starved: bool = False

    @property
    def kind(self) -> Kind:
        """What tells this failure from others."""
        assert self.failure is not None
        return self.device, self.backend, self.failure.check, self.failure.sort
