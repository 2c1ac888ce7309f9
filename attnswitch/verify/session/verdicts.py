"""Outcomes of the verifier as records of wisdom: what is wrong on this machine, and what is right again."""

from __future__ import annotations

from collections.abc import Iterator

from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.verify.outcome import Outcome
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Verdict
from attnswitch.wisdom.signature import sign

__all__ = ["of_outcome"]

#: Characters that are kept of what was wrong.
_LONGEST = 300


def of_outcome(outcome: Outcome, case: str) -> Iterator[Verdict]:
    """The record to keep of ``outcome``, if any; ``case`` is the name of its case.

    A mismatch is recorded for the backend that ran, also where the dispatcher chose it. A right outcome is recorded
    only if other versions got the case wrong before.
    """
    backend = outcome.chosen or outcome.backend
    device = Device.parse(outcome.device)
    signature = sign(backend, device)
    if isinstance(signature, Missing):
        return
    problem = outcome.case.problem().replace(nonfinite=outcome.case.poison)
    if outcome.failure is not None:
        why = f"{outcome.failure.title}: {outcome.failure.message}"[:_LONGEST]
        yield Verdict(problem, backend, False, case, why, signature, view.now())
    elif outcome.verdict == "verified":
        standing = view.current().standing(backend, device)
        if any(fault.case == case and fault.signature != signature for fault in standing):
            yield Verdict(problem, backend, True, case, "", signature, view.now())
