"""Candidates by name: a backend of attnswitch or a peer, and the call that one makes of a workload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

import attnswitch
from attnswitch.bench.record import Status
from attnswitch.bench.workload import Workload
from attnswitch.errors import InvalidProblem
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.problem import Problem

__all__ = ["AUTO", "Attend", "Refused", "configs", "fitting", "of_backend", "with_configs"]

#: One attention call, ready to run: the output, differentiable where the workload's operands require gradients.
Attend = Callable[[], torch.Tensor]
#: The dispatcher's own choice, as a candidate.
AUTO = "auto"


class Refused(Exception):
    """A candidate does not take a workload, or cannot run here; ``str`` is the reason. Nothing was launched."""

    def __init__(self, reason: str, status: Status = "refused") -> None:
        super().__init__(reason)
        self.status: Status = status


def with_configs(names: tuple[str, ...], parts: tuple[str, ...], problem: Problem, device: Device) -> Iterator[str]:
    """Each backend, and after it, by name and text, its configs for ``problem`` whose text has one of ``parts``."""
    for name in names:
        yield name
        if parts:
            others = islice(configs(name, problem, device), 1, None)
            yield from (f"{name} {text}" for text in others if any(part in text for part in parts))


def configs(name: str, problem: Problem, device: Device) -> Iterator[str]:
    """The configs of a backend or target by text, its own choice first; none where it does not take ``problem``."""
    loaded = registry.load(name) if name in registry.names() or ":" in name else Missing("")
    if not isinstance(loaded, Missing) and not any(one_by_one.reasons(loaded, problem, device)):
        yield from map(str, loaded.configs(one_by_one.asked(loaded, problem), device))


def fitting(work: Workload) -> list[str]:
    """The backends that the dispatcher may choose for a workload. Raises ``InvalidProblem``."""
    plan = attnswitch.explain(work.query, work.key, work.value, **work.keywords())
    return [candidate.backend for candidate in plan.candidates if candidate.trusted]


def of_backend(name: str, work: Workload) -> Attend:
    """The public call with ``backend=name``, as a user makes it; with a config, if its text follows the name.

    Raises ``Refused``.
    """
    name, _, config = name.partition(" ")
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
    attend: Callable[[], Any] = functools.partial(work.function, *operands, backend=backend, **keywords)
    if config:
        if config not in configs(name, plan.problem, plan.device):
            raise Refused(f"{name} has no config {config!r} for {plan.problem}")
        plan = replace(plan, chosen=replace(plan.chosen, config=config))
        attend = functools.partial(plan, *operands, **work.arrays())
    return (lambda: attend()[0]) if work.problem.lse else attend
