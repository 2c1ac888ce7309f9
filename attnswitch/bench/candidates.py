"""Candidates by name: a backend of attnswitch or a peer, and the call that one makes of a workload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import attnswitch
from attnswitch import registry
from attnswitch.bench.record import Status
from attnswitch.bench.workload import Workload
from attnswitch.errors import InvalidProblem

__all__ = ["AUTO", "Attend", "Refused", "of_backend"]

#: One attention call, ready to run: the output, differentiable where the workload's operands require gradients.
Attend = Callable[[], torch.Tensor]
#: The dispatcher's own choice, as a candidate.
AUTO = "auto"


class Refused(Exception):
    """A candidate does not take a workload, or cannot run here; ``str`` is the reason. Nothing was launched."""

    def __init__(self, reason: str, status: Status = "refused") -> None:
        super().__init__(reason)
        self.status: Status = status


def of_backend(name: str, work: Workload) -> Attend:
    """The public call with ``backend=name``, as a user makes it. Raises ``Refused``."""
    backend = None if name == AUTO else name
    if backend is not None and ":" not in name and name not in registry.names():
        raise Refused(f"backend {name!r} is not known here", "unavailable")
    keywords = work.keywords()
    operands = (work.query, work.key, work.value)
    try:
        plan = attnswitch.explain(*operands, backend=backend, **keywords)
    except InvalidProblem as error:
        raise Refused(str(error)) from None
    if plan.chosen is None:
        if backend is None:
            raise Refused(plan.why)
        named = next(candidate for candidate in plan.candidates if candidate.backend == backend)
        raise Refused("; ".join(plan.why_not(named)), "refused" if named.reasons else "unavailable")
    attend: Callable[[], Any] = functools.partial(attnswitch.attention, *operands, backend=backend, **keywords)
    return (lambda: attend()[0]) if work.problem.lse else attend
