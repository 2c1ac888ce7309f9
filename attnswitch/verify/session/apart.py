"""One case in a process of its own: what a test does whose backend runs on the CPU under an emulation only."""

from __future__ import annotations

from attnswitch.verify import emulation
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.plan import Plan, Target
from attnswitch.verify.session.pool import Isolated
from attnswitch.verify.terms import Terms

__all__ = ["check", "pool"]


def pool(device: str, backend: str, timeout: float, terms: Terms = Terms()) -> Isolated:  # noqa: B008
    """For single cases on ``device``, emulated if ``backend`` asks for that; starts nothing before the first."""
    target = Target(device, (), Space(), emulation=emulation.variables((backend,), device))
    return Isolated(Plan((target,), 0, 0, isolate=True, workers=1, timeout=timeout, terms=terms))


def check(case: Case, backend: str, device: str = "cpu", unguarded: bool = False, timeout: float = 600.0) -> Outcome:
    """``attnswitch.verify.check`` in a process of its own; ``unguarded`` runs the backend on what it refuses."""
    with pool(device, backend, timeout) as apart:
        return apart.attempt(case, backend, device, unguarded=unguarded)
