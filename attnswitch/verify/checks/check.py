"""``Check``: one property, what it says, and why it is there beside the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Failure
from attnswitch.verify.trial import Trial

__all__ = ["Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """One property that a right backend has.

    ``holds`` looks at a trial and returns the failure, or None; it may run the backend again on changed operands, and
    raises ``NotApplicable`` where it finds that it has nothing to say. ``says`` states the property in one line.
    ``why`` argues what it is for where another check would see the same faults.
    """

    name: str
    says: str
    why: str
    applies: Callable[[Case], bool]
    holds: Callable[[Trial], Failure | None]
    #: Looked at on every case, from the one run that there is anyway.
    always: bool = False
    #: Makes operands of its own, and does not look at what came back for those of the case.
    alone: bool = False
    #: Needs arrays on an NVIDIA GPU.
    gpu: bool = False
    #: Holds of sequences that lie one after another as well, of caches in pages, and of keys in parts.
    varlen: bool = False

    def suits(self, case: Case, device: str) -> bool:
        """Whether there is anything to look at in ``case`` on ``device``."""
        plain = not (case.varlen or case.page or case.parts)
        return self.applies(case) and (device != "cpu" or not self.gpu) and (self.varlen or plain)
