"""What a call, or a plan, has measured of a class of problems that is met for the first time, as the policy wants."""

from __future__ import annotations

from importlib import import_module

from attnswitch.call import recording
from attnswitch.machine.device import Device
from attnswitch.planning import planner, waiting
from attnswitch.planning.choice import stands_for
from attnswitch.planning.policy import Policy, share
from attnswitch.problem import Problem

__all__ = ["at_sight"]

#: What measures at first sight, and what has that done in the background; reached as backends are: nothing here imports
#: the tools.
_SIGHT = "attnswitch.tune.sight"
_LEARN = "attnswitch.tune.learn"


def at_sight(problem: Problem, device: Device, backend: str | None, policy: Policy) -> bool:
    """Under MEASURE measure what a choice lacks, under LEARN have it measured in the background.

    Returns whether nothing is left that could be measured at another time. Raises ``InvalidProblem`` for an
    ATTNSWITCH_LEARN_SHARE that is none.
    """
    if backend is None:
        problem = stands_for(problem)
    if policy is Policy.MEASURE:
        plan = planner.make_plan(problem, device, backend, policy)
        return not plan.open or import_module(_SIGHT).measure(plan, device.where)
    if policy is Policy.LEARN:
        _learn(problem, device, backend)
    return True


def _learn(problem: Problem, device: Device, backend: str | None) -> None:
    """Have the class measured, if it is met for the first time and the choice is free."""
    if backend is not None or problem.is_empty or not device.present or recording.is_paused():
        return
    share()
    if waiting.add(problem, device):
        import_module(_LEARN).begin()
