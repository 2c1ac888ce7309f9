"""Problems measured one after the other; what each brings is remembered at once, so that a run can be taken up again.

The verifier's part runs in a process of its own: a kernel that crashes there, or does not come back, is a finding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnswitch import planner
from attnswitch.device import Device
from attnswitch.problem import Problem
from attnswitch.tune import trial
from attnswitch.tune.trial import Effort, Trial
from attnswitch.verify.outcome import AUTO
from attnswitch.verify.session import apart
from attnswitch.wisdom import view

__all__ = ["Tuned", "known", "run"]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one problem: the backend chosen before and since, and the trial between."""

    problem: Problem
    before: str | None
    after: str | None
    trial: Trial


def known(problem: Problem, where: str) -> bool:
    """Whether measuring was tried of all that may be chosen for the class of ``problem``, with what is here now."""
    plan = planner.make_plan(problem, Device.parse(where))
    return plan.chosen is not None and not any(candidate.open for candidate in plan.candidates)


def run(problems: Sequence[Problem], where: str, effort: Effort, timeout: float) -> Iterator[Tuned]:
    """Measure ``problems`` on the device that torch calls ``where``; ``timeout`` seconds are for one verified case.

    Raises ``OSError`` if what was measured cannot be remembered.
    """
    device = Device.parse(where)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(apart.pool(where, AUTO, timeout))
        for problem in problems:
            before = planner.make_plan(problem, device).backend
            found = trial.run(problem, where, effort, pool.examine)
            view.remember(found.records)
            yield Tuned(problem, before, planner.make_plan(problem, device).backend, found)
