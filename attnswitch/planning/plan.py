"""``Plan``: what was chosen for a problem on a device, all the others, and why; called with arrays, the attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnswitch.machine.device import Device
from attnswitch.planning import explain
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.choice import Basis
from attnswitch.problem import Problem

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The choice for one problem on one device, with all the others and why. ``str(plan)`` explains it.

    Called with arrays of its problem, it is the attention. ``chosen`` is None where nothing fits (``explain`` returns
    such plans, ``plan`` raises instead).
    """

    problem: Problem
    device: Device
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    basis: Basis
    #: The backend that was asked for.
    named: str | None = None
    #: What runs it on arrays.
    run: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.chosen.backend if self.chosen else None

    @property
    def open(self) -> bool:
        """Whether measuring could change the choice: it is free, and between backends of which not all were."""
        if not self.device.present or self.chosen is None or self.basis is Basis.FORCED:
            return False
        trusted = [candidate for candidate in self.candidates if candidate.trusted]
        return len(trusted) > 1 and any(candidate.open for candidate in trusted)

    @property
    def why(self) -> str:
        """What the choice rests on, in a sentence."""
        return explain.why(self)

    def why_not(self, candidate: Candidate) -> tuple[str, ...]:
        """The reasons that ``candidate`` was not chosen; empty for the chosen one."""
        return explain.why_not(self, candidate)

    def remarks(self, candidate: Candidate) -> tuple[str, ...]:
        """What ``candidate`` says of how it computes the problem, if it takes it."""
        return explain.remarks(self, candidate)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        attn_mask: Any = None,
        key_lengths: Any = None,
        seed: int | None = None,
        layout: str = "BHLD",
    ) -> Any:
        """``attention`` by the backend chosen here, on arrays of the plan's problem, which says the rest.

        Raises:
            InvalidProblem: the arrays are of another problem.
            Unsupported: the plan chose nothing.
        """
        assert self.run is not None
        return self.run(self, query, key, value, attn_mask, key_lengths, seed, layout)

    def __str__(self) -> str:
        return explain.table(self)
