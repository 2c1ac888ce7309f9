"""From a problem and a device to a choice, a plan, and the kernel that was chosen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attnswitch.errors import BackendUnavailable, InvalidProblem, Unsupported
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.backend import Backend, Kernel
from attnswitch.machine.device import Device
from attnswitch.planning import choice
from attnswitch.planning.choice import Choice
from attnswitch.planning.field import Field, order
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem
from attnswitch.wisdom import view

__all__ = ["build", "choose", "compiled", "forget", "kernel", "make_plan", "ordered", "require"]


def choose(
    problem: Problem,
    device: Device,
    backend: str | None = None,
    policy: Policy = Policy.ESTIMATE,
    *,
    restarts: bool = False,
) -> Choice:
    """What a plan would choose, without what it says of the others.

    With ``restarts``, among those alone whose backward starts from what it is given. Raises ``InvalidProblem`` for an
    unknown ``backend``.
    """
    if backend is not None:
        _check_name(backend)
    return choice.choose(Field(problem, device, backend, restarts=restarts), backend, policy)


def build(
    problem: Problem,
    device: Device,
    backend: str | None,
    policy: Policy = Policy.ESTIMATE,
    *,
    restarts: bool = False,
) -> tuple[Backend, Kernel]:
    """The backend that is chosen and its kernel, for a problem that was not met before.

    With ``restarts``, among those alone whose backward starts from what it is given.

    Raises what ``require`` raises, ``InvalidProblem`` for an unknown ``backend``, and ``CompileError``.
    """
    if backend is not None:
        _check_name(backend)
    field = Field(problem, device, backend, restarts=restarts)
    chosen = choice.choose(field, backend, policy)
    if chosen.backend is None:
        plan = require(make_plan(problem, device, backend, policy))  # which raises, unless ``restarts`` left out all
        raise Unsupported(f"no other backend may be chosen, and {plan.backend} starts its backward from its own", plan)
    name = str(chosen.backend)
    if chosen.config:  # one of many: ``kernel`` looks it up by its text
        return kernel(name, problem, device, chosen.config)
    row = field.row(name)
    assert isinstance(row.backend, Backend)
    return row.backend, one_by_one.compiled(row.backend, problem, device, field.first[name])


def make_plan(
    problem: Problem,
    device: Device,
    backend: str | None = None,
    policy: Policy = Policy.ESTIMATE,
    run: Callable[..., Any] | None = None,
) -> Plan:
    """Plan ``problem`` on ``device``; never raises for want of a fitting backend, and never measures.

    ``run`` is what calling the plan does. Raises ``InvalidProblem`` for an unknown ``backend``.
    """
    if backend is not None:
        _check_name(backend)
    return _remembered(problem, device, backend, policy, run, view.generation)


@functools.lru_cache(maxsize=1024)
def _remembered(
    problem: Problem,
    device: Device,
    backend: str | None,
    policy: Policy,
    run: Callable[..., Any] | None,
    generation: int,
) -> Plan:
    """The plan, made once for the same facts and generation of wisdom."""
    field = Field(problem, device, backend)
    chosen = choice.choose(field, backend, policy)
    near = dict(chosen.near)
    candidates = tuple(replace(field.candidate(row), near=near.get(row.name)) for row in field.rows)
    named = next((candidate for candidate in candidates if candidate.backend == chosen.backend), None)
    return Plan(problem, device, candidates, named, chosen.basis, backend, run)


def _check_name(backend: object) -> None:
    if not isinstance(backend, str):
        raise InvalidProblem(f"backend={backend!r}: expected a name, one of {', '.join(registry.names())}")
    registry.load(backend)


def forget() -> None:
    """Drop every plan and kernel: what backends there are, or what they take, has changed."""
    view.changed()
    kernel.cache_clear()


def ordered(problem: Problem, device: Device) -> tuple[str, ...]:
    """Names of all backends in the order that stands for ``problem`` where nothing was measured."""
    return tuple(row.name for row in order(problem, device))


def require(plan: Plan) -> Plan:
    """``plan`` if it chose something.

    Raises:
        BackendUnavailable: the backend that was named cannot run on this machine.
        Unsupported: nothing that may be used takes the problem; the message lists every reason.
    """
    if plan.chosen is not None:
        return plan
    if plan.named is None:
        what = "no backend may be chosen for" if any(c.fits for c in plan.candidates) else "no backend takes"
        raise Unsupported(f"{what} this problem\n{plan}", plan)
    named = next(candidate for candidate in plan.candidates if candidate.backend == plan.named)
    others = ", ".join(candidate.backend for candidate in plan.candidates if candidate.fits)
    remedy = f"leave backend out, or use one of: {others}" if others else _without_others(plan)
    what = f"backend {plan.named!r} was asked for on {plan.device}"
    if named.unavailable:
        raise BackendUnavailable(f"{what} and cannot run here: {named.unavailable}\n{remedy}", plan)
    reasons = "".join(f"\n  - {reason}" for reason in named.reasons)
    raise Unsupported(f"{what} and does not take {plan.problem}:{reasons}\n{remedy}", plan)


def _without_others(plan: Plan) -> str:
    """What to do where no other backend takes a problem: some take its dropout if there is a seed."""
    if plan.problem.dropout > 0.0 and not plan.problem.seeded:
        seeded = make_plan(plan.problem.replace(seeded=True), plan.device)
        if fitting := ", ".join(candidate.backend for candidate in seeded.candidates if candidate.fits):
            return f"leave backend out, or use one of these with a seed: {fitting}"
    return "no other backend takes it either"


def compiled(plan: Plan) -> tuple[Backend, Kernel]:
    """The chosen backend and its kernel for the plan's problem. Raises ``CompileError``."""
    assert plan.chosen is not None
    return kernel(plan.chosen.backend, plan.problem, plan.device, plan.chosen.config)


@functools.lru_cache(maxsize=1024)
def kernel(name: str, problem: Problem, device: Device, config: str = "") -> tuple[Backend, Kernel]:
    """The kernel of backend ``name``, built once for the same facts.

    ``config`` is the text of one of the backend's configs; the heuristic's choice is taken for "", and for a text that
    is none of them for this problem: what was measured on one problem may not fit another of its class.
    """
    backend = registry.loaded(name)
    configs = iter(backend.configs(one_by_one.asked(backend, problem), device))
    first = next(configs)
    every = itertools.chain((first,), configs) if config else ()
    chosen = next((c for c in every if str(c) == config), first)
    return backend, one_by_one.compiled(backend, problem, device, chosen)
