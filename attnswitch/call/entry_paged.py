"""Calls of a cache in pages as they come in: by themselves, or by the operators, as ``entry`` has others."""

from __future__ import annotations

from typing import Any

from attnswitch.arrays import Array, Intercepted
from attnswitch.call import options as read
from attnswitch.call import paged
from attnswitch.call.entry import check_plain, is_traced
from attnswitch.call.paged import Beside
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy

__all__ = ["Beside", "call", "run_plan"]

_Operands = tuple[Array, Array, Array]


def call(operands: _Operands, beside: Beside, backend: str | None, policy: Policy | str | None, *given: Any) -> Any:
    """What ``attention_paged`` returns; ``given`` are the options in the order of ``Options``."""
    if not is_traced(operands[0]):
        try:
            return paged.attend(operands, beside, read.of_call(*given), backend, policy)
        except Intercepted:
            pass
    return _operated(operands, beside, backend, policy, *given)


def run_plan(plan: Plan, operands: _Operands, beside: Beside) -> Any:
    """What calling ``plan`` does. In a graph a plan fixes the backend, the splits and the longest alone."""
    if not is_traced(operands[0]):
        try:
            return paged.run_plan(plan, operands, beside)
        except Intercepted:
            pass
    p = plan.problem
    return _operated(operands, paged.as_planned(beside, p), plan.taker(), None, *read.said_by(p, "BHLD"))


def _operated(operands: _Operands, beside: Beside, *rest: Any) -> Any:
    from attnswitch.call import operators, transforms  # of torch, which is there by now

    check_plain(paged.ROLES, operands, transforms.refuse_paged, *beside.heads)
    return operators.attention_paged(operands, beside, *rest)
