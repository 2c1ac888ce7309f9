"""From a problem and a device to a plan: every backend with its reasons, the choice, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from attnswitch import divergences, registry
from attnswitch.backend import Backend, Kernel
from attnswitch.device import Device
from attnswitch.errors import BackendUnavailable, InvalidProblem, Unsupported
from attnswitch.problem import Problem

__all__ = ["FAILED", "Candidate", "Plan", "compiled", "make_plan", "require"]


#: How the reason of a backend begins that raised where it should have answered.
FAILED = "it failed while planning"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend looked at for one problem; ``reasons`` empty means that it takes it."""

    backend: str
    reasons: tuple[str, ...] = ()
    #: Why this machine cannot run it; not asked where the plan is for absent hardware.
    unavailable: str | None = None

    @property
    def fits(self) -> bool:
        """Whether it can be chosen."""
        return not self.reasons and self.unavailable is None


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for one problem on one device, with all the others and why. ``str(plan)`` explains it.

    ``chosen`` is None where nothing fits (``explain`` returns such plans, ``plan`` raises instead).
    """

    problem: Problem
    device: Device
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    why: str

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.chosen.backend if self.chosen else None

    def why_not(self, candidate: Candidate) -> tuple[str, ...]:
        """The reasons that ``candidate`` was not chosen; empty for the chosen one."""
        if candidate is self.chosen:
            return ()
        # What the problem is comes before what this machine lacks: no driver makes a GPU kernel take CPU arrays.
        reasons = candidate.reasons or ((candidate.unavailable,) if candidate.unavailable else ())
        if reasons:
            return reasons
        if self.chosen is None:
            return ("it takes the problem, but another backend was asked for",)
        if self.why.startswith("forced"):
            return (f"it takes the problem, but backend={self.backend!r} was asked for",)
        return (f"it takes the problem, but stands behind {self.backend} in the declared order",)

    def __str__(self) -> str:
        lines = [f"problem  {self.problem}", f"device   {self.device}"]
        lines.append(f"choice   {self.backend or 'none'} ({self.why})")
        width = max(len(candidate.backend) for candidate in self.candidates)
        for candidate in self.candidates:
            for line, reason in enumerate(self.why_not(candidate) or ("chosen",)):
                lines.append(f"  {candidate.backend if line == 0 else '':{width}}  {reason}")
        return "\n".join(lines)


def _candidate(name: str, problem: Problem, device: Device) -> Candidate:
    backend = registry.load(name)
    if isinstance(backend, str):
        return Candidate(name, unavailable=backend)
    try:
        unavailable = backend.unavailable() if device.present else None
        answer = backend.supports(problem, device)
        reasons = (answer,) if isinstance(answer, str) else tuple(str(reason) for reason in answer)
        reasons += divergences.refusals(backend, problem, device)
        if not reasons:
            next(iter(backend.configs(problem, device)))
    except Exception as error:  # a broken plug-in is a reason, not a crash
        return Candidate(name, unavailable=f"{FAILED}: {type(error).__name__}: {error}")
    return Candidate(name, reasons, unavailable)


def make_plan(problem: Problem, device: Device, backend: str | None = None) -> Plan:
    """Plan ``problem`` on ``device``; never raises for want of a fitting backend.

    Raises ``InvalidProblem`` for an unknown ``backend``.
    """
    if backend is not None and not isinstance(backend, str):
        raise InvalidProblem(f"backend={backend!r}: expected a name, one of {', '.join(registry.names())}")
    return remembered(problem, device, backend)


@functools.lru_cache(maxsize=4096)
def remembered(problem: Problem, device: Device, backend: str | None) -> Plan:
    """The plan, made once for the same facts."""
    if backend is not None:
        registry.load(backend)
    names = registry.names()
    if backend is not None and backend not in names:  # a target, which is in no table
        names = (*names, backend)
    candidates = tuple(_candidate(name, problem, device) for name in names)
    if backend is not None:
        named = next(candidate for candidate in candidates if candidate.backend == backend)
        if named.fits:
            return Plan(problem, device, candidates, named, f"forced by backend={backend!r}")
        return Plan(problem, device, candidates, None, f"backend={backend!r} was asked for and does not take it")
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    why = (
        "first in the declared order that takes the problem; nothing was measured" if chosen else "no backend takes it"
    )
    return Plan(problem, device, candidates, chosen, why)


def require(plan: Plan, backend: str | None) -> Plan:
    """``plan`` if it chose something.

    Raises:
        BackendUnavailable: the backend that was named cannot run on this machine.
        Unsupported: nothing that may be used takes the problem; the message lists every reason.
    """
    if plan.chosen is not None:
        return plan
    if backend is None:
        raise Unsupported(f"no backend takes this problem\n{plan}", plan)
    named = next(candidate for candidate in plan.candidates if candidate.backend == backend)
    others = ", ".join(candidate.backend for candidate in plan.candidates if candidate.fits)
    remedy = f"leave backend out, or use one of: {others}" if others else "no other backend takes it either"
    what = f"backend {backend!r} was asked for on {plan.device}"
    if named.unavailable:
        raise BackendUnavailable(f"{what} and cannot run here: {named.unavailable}\n{remedy}")
    reasons = "".join(f"\n  - {reason}" for reason in named.reasons)
    raise Unsupported(f"{what} and does not take {plan.problem}:{reasons}\n{remedy}", plan)


def compiled(plan: Plan) -> tuple[Backend, Kernel]:
    """The chosen backend and its kernel for the plan's problem. Raises ``CompileError``."""
    assert plan.chosen is not None
    return kernel(plan.chosen.backend, plan.problem, plan.device)


@functools.lru_cache(maxsize=1024)
def kernel(name: str, problem: Problem, device: Device) -> tuple[Backend, Kernel]:
    """The kernel of backend ``name`` with its heuristic config, built once for the same facts."""
    backend: Any = registry.load(name)
    return backend, backend.compile(problem, device, next(iter(backend.configs(problem, device))))
