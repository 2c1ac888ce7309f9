"""From a problem and a device to a plan: every backend with its reasons, the choice, and why."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnswitch import api
from attnswitch.errors import BackendUnavailable, InvalidProblem, Unsupported
from attnswitch.machine import (
    divergences,
    registry,  # api imports this module: for calls of plans alone
)
from attnswitch.machine.backend import Backend, Kernel
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem
from attnswitch.wisdom import view
from attnswitch.wisdom.view import generation

if TYPE_CHECKING:
    from attnswitch.wisdom.record import Time, Untimed, Verdict
    from attnswitch.wisdom.view import Near

__all__ = ["FAILED", "Candidate", "Plan", "compiled", "forget", "generation", "make_plan", "require"]


#: How the reason begins why a plan chose nothing, where a backend was named.
_FORCED = "backend="
#: How the reason of a backend begins that raised where it should have answered.
FAILED = "it failed while planning"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend looked at for one problem; ``reasons`` empty means that it takes it."""

    backend: str
    reasons: tuple[str, ...] = ()
    #: Why this machine cannot run it; not asked where the plan is for absent hardware.
    unavailable: str | None = None
    #: What it took on problems of this class on this machine, or why that could not be measured.
    time: Time | None = None
    untimed: Untimed | None = None
    #: How it did on the nearest problems that were measured, where those of this class tell too little.
    near: Near | None = None
    #: A mismatch that was found on this machine and concerns it.
    fault: Verdict | None = None
    #: Text of the config to compile it with, "" for the heuristic's choice.
    config: str = ""

    @property
    def fits(self) -> bool:
        """Whether it takes the problem, so that it can be asked for."""
        return not self.reasons and self.unavailable is None

    @property
    def trusted(self) -> bool:
        """Whether it takes the problem and can be chosen for it."""
        return self.fits and self.fault is None

    @property
    def open(self) -> bool:
        """Whether it can be chosen and nobody has tried to measure it."""
        return self.trusted and self.time is None and self.untimed is None


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
    why: str

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.chosen.backend if self.chosen else None

    @property
    def open(self) -> bool:
        """Whether measuring could change the choice: it is free, and between backends of which not all were."""
        if not self.device.present or self.chosen is None or self.why.startswith("forced"):
            return False
        trusted = [candidate for candidate in self.candidates if candidate.trusted]
        return len(trusted) > 1 and any(candidate.open for candidate in trusted)

    def why_not(self, candidate: Candidate) -> tuple[str, ...]:
        """The reasons that ``candidate`` was not chosen; empty for the chosen one."""
        if candidate is self.chosen:
            return ()
        # What the problem is comes before what this machine lacks: no driver makes a GPU kernel take CPU arrays.
        reasons = candidate.reasons or ((candidate.unavailable,) if candidate.unavailable else ())
        if reasons:
            return reasons
        if self.chosen is None and self.why.startswith(_FORCED):
            return ("it takes the problem, but another backend was asked for",)
        if self.why.startswith("forced"):
            return (f"it takes the problem, but backend={self.backend!r} was asked for",)
        if fault := candidate.fault:
            return (
                f"it was wrong on this machine on {fault.date[:10]}: {fault.why} (case {fault.case}, {fault.problem});"
                " it is left out until another version gets that case right, or until"
                f" `attnswitch wisdom forget --backend {candidate.backend}`",
            )
        if self.chosen is not None and self.chosen.time is None and self.chosen.near is None:
            return (f"it takes the problem, but stands behind {self.backend} in the declared order",)
        if untimed := candidate.untimed:
            return (
                f"it takes the problem, but was not timed when that was tried on {untimed.date[:10]}: {untimed.why}",
            )
        return (f"it takes the problem, {_slower(candidate, self.chosen)}",)

    def remarks(self, candidate: Candidate) -> tuple[str, ...]:
        """What ``candidate`` says of how it computes the problem, if it takes it."""
        backend = registry.loaded(candidate.backend) if candidate.fits else None
        try:
            return tuple(map(str, backend.remarks(self.problem, self.device, candidate.config))) if backend else ()
        except Exception as error:  # which is no reason against it
            return (f"{FAILED}: {type(error).__name__}: {error}",)

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
        return api.run_plan(self, query, key, value, attn_mask, key_lengths, seed, layout)

    def __str__(self) -> str:
        lines = [f"problem  {self.problem}", f"device   {self.device}"]
        lines.append(f"choice   {self.backend or 'none'} ({self.why})")
        width = max(len(candidate.backend) for candidate in self.candidates)
        for candidate in self.candidates:
            for line, reason in enumerate((*(self.why_not(candidate) or ("chosen",)), *self.remarks(candidate))):
                lines.append(f"  {candidate.backend if line == 0 else '':{width}}  {reason}")
        return "\n".join(lines)


def _candidate(name: str, problem: Problem, device: Device) -> Candidate:
    backend = registry.load(name)
    if isinstance(backend, Missing):
        return Candidate(name, unavailable=backend.reason)
    try:
        unavailable = backend.unavailable() if device.present else None
        answer = backend.reasons(problem, device)
        reasons = (answer,) if isinstance(answer, str) else tuple(str(reason) for reason in answer)
        reasons += divergences.refusals(backend, problem, device)
        if not reasons:
            next(iter(backend.configs(problem, device)))
    except Exception as error:  # a broken plug-in is a reason, not a crash
        return Candidate(name, unavailable=f"{FAILED}: {type(error).__name__}: {error}")
    if reasons or unavailable is not None:
        return Candidate(name, reasons, unavailable)
    return _known(name, problem, device)


def _known(name: str, problem: Problem, device: Device) -> Candidate:
    """A backend that takes the problem, with what this machine knows of it."""
    from attnswitch.wisdom.record import Time  # slow to import, and first needed here

    wisdom = view.current()
    found, fault = wisdom.time(name, problem, device), wisdom.fault(name, problem, device)
    if isinstance(found, Time):
        return Candidate(name, time=found, fault=fault, config=found.config)
    return Candidate(name, untimed=found, fault=fault)


def make_plan(problem: Problem, device: Device, backend: str | None = None, policy: Policy = Policy.ESTIMATE) -> Plan:
    """Plan ``problem`` on ``device``; never raises for want of a fitting backend, and never measures.

    Raises ``InvalidProblem`` for an unknown ``backend``.
    """
    if backend is not None and not isinstance(backend, str):
        raise InvalidProblem(f"backend={backend!r}: expected a name, one of {', '.join(registry.names())}")
    return remembered(problem, device, backend, policy, generation())


def _slower(candidate: Candidate, chosen: Candidate | None) -> str:
    """What was measured of a candidate against what was of the chosen one, if anything was chosen."""
    if chosen and chosen.time and candidate.time:
        return f"but took {_said(candidate.time, chosen.time)} against {chosen.time.ms:.4g}"
    if chosen and chosen.near and candidate.near:
        times = candidate.near.slower / chosen.near.slower
        took = f"took {times:.3g} times as long as {chosen.backend} on the nearest that were measured"
        return f"but {took}" if times >= 1 else f"and {took}: too little to go before it in the order"
    if candidate.time:
        return f"and took {candidate.time.ms:.4g} ms, but what comes before it in the order was not measured beside it"
    return "but was not measured here"


def _said(time: Time, beside: Time) -> str:
    """A time, with its problem where that is not the one of the time that it stands beside."""
    return f"{time.ms:.4g} ms" + ("" if time.problem == beside.problem else f" on {time.problem}")


def ordered(problem: Problem, device: Device) -> tuple[str, ...]:
    """Names of all backends in the order that stands for ``problem`` where nothing was measured."""
    return tuple(sorted(registry.names(), key=lambda name: not _goes_first(name, problem, device)))


def _goes_first(name: str, problem: Problem, device: Device) -> bool:
    backend = registry.load(name)
    try:
        return not isinstance(backend, Missing) and bool(backend.goes_first(problem, device))
    except Exception:  # a broken plug-in stands where its row does
        return False


@functools.lru_cache(maxsize=4096)
def remembered(problem: Problem, device: Device, backend: str | None, policy: Policy, generation: int) -> Plan:
    """The plan, made once for the same facts and ``generation``."""
    if backend is not None:
        registry.load(backend)
    names = ordered(problem, device)
    if backend is not None and backend not in names:  # a target, which is in no table
        names = (*names, backend)
    if policy is Policy.WISDOM_ONLY and problem.is_empty:  # which takes no time, so that none is ever measured
        policy = Policy.ESTIMATE
    candidates = tuple(_candidate(name, problem, device) for name in names)
    if backend is None and policy is not Policy.WISDOM_ONLY:
        candidates = _with_nearest(candidates, problem, device)
    if backend is not None:
        named = next(candidate for candidate in candidates if candidate.backend == backend)
        if named.fits:
            return Plan(problem, device, candidates, named, f"forced by backend={backend!r}")
        return Plan(problem, device, candidates, None, f"{_FORCED}{backend!r} was asked for and does not take it")
    return Plan(problem, device, candidates, *_choice(candidates, policy))


def _with_nearest(candidates: tuple[Candidate, ...], problem: Problem, device: Device) -> tuple[Candidate, ...]:
    """``candidates`` with what was measured nearest to ``problem``, if its class was not."""
    trusted = [candidate for candidate in candidates if candidate.trusted]
    if len(trusted) < 2 or _compared(trusted):
        return candidates
    near = view.current().nearest(problem, device, [candidate.backend for candidate in trusted])
    return tuple(replace(candidate, near=near.get(candidate.backend)) for candidate in candidates)


def _compared(trusted: Sequence[Candidate]) -> bool:
    """Whether there are times to choose by, of which one is, or might be, of the first in the declared order.

    Where others alone were tried, as after another version of its library came, nothing is known to be faster than it.
    """
    first = trusted[0]
    return (first.time or first.untimed) is not None and any(candidate.time for candidate in trusted)


def _choice(candidates: Sequence[Candidate], policy: Policy) -> tuple[Candidate | None, str]:
    """The fastest that was measured, else the first in the declared order; and why."""
    trusted = [candidate for candidate in candidates if candidate.trusted]
    if not trusted:
        faulty = any(candidate.fits for candidate in candidates)
        return None, "every backend that takes it was wrong here" if faulty else "no backend takes it"
    times = sorted(((c.time, c) for c in trusted if c.time), key=lambda entry: entry[0].pace)
    if times and (policy is Policy.WISDOM_ONLY or _compared(trusted)):
        return times[0][1], f"measured here on {_told(times)}"
    if policy is Policy.WISDOM_ONLY:
        return (
            None,
            f"nothing was measured for it here, and the policy is {policy}; attnswitch tune --problem measures it",
        )
    if near := sorted(((c.near, c) for c in trusted if c.near), key=lambda entry: entry[0].slower):
        return _nearest(near, trusted)
    what = "others alone were measured with the versions of now" if times else "nothing was measured"
    return trusted[0], f"first in the declared order that takes the problem; {what}"


def _nearest(ranked: Sequence[tuple[Near, Candidate]], trusted: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The first in the declared order of those that other classes call as fast as the fastest, as far as they tell."""
    from attnswitch.wisdom.classes import TIE  # slow to import, and first needed here

    best, fastest = ranked[0]
    chosen = next(c for c in trusted if c.near and c.near.slower <= TIE * best.slower)
    problems = ", ".join(str(problem) for problem in {problem: None for near, _ in ranked for problem in near.problems})
    each = ", ".join(f"{candidate.backend} {near.slower:.3g}" for near, candidate in ranked)
    tie = "" if chosen is fastest else f"; as fast, as far as that tells, {chosen.backend} comes first in the order"
    return chosen, (
        f"nothing like it was measured; on the nearest here, {problems}, each took as many times as long as the"
        f" fastest: {each}{tie}"
    )


def _told(times: Sequence[tuple[Time, Candidate]]) -> str:
    """The date, the problem and every time."""
    first = times[0][0]
    each = ", ".join(f"{candidate.backend} {_said(time, first)}" for time, candidate in times)
    return f"{first.date[:10]}, on {first.problem}: {each}"


def forget() -> None:
    """Drop every plan: the wisdom has changed, or what backends there are. Kernels are kept."""
    view.changed()
    remembered.cache_clear()


def require(plan: Plan, backend: str | None) -> Plan:
    """``plan`` if it chose something.

    Raises:
        BackendUnavailable: the backend that was named cannot run on this machine.
        Unsupported: nothing that may be used takes the problem; the message lists every reason.
    """
    if plan.chosen is not None:
        return plan
    if backend is None:
        what = "no backend may be chosen for" if any(c.fits for c in plan.candidates) else "no backend takes"
        raise Unsupported(f"{what} this problem\n{plan}", plan)
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
    return kernel(plan.chosen.backend, plan.problem, plan.device, plan.chosen.config)


@functools.lru_cache(maxsize=1024)
def kernel(name: str, problem: Problem, device: Device, config: str = "") -> tuple[Backend, Kernel]:
    """The kernel of backend ``name``, built once for the same facts.

    ``config`` is the text of one of the backend's configs; the heuristic's choice is taken for "", and for a text that
    is none of them for this problem: what was measured on one problem may not fit another of its class.
    """
    backend = registry.loaded(name)
    configs = iter(backend.configs(problem, device))
    first = next(configs)
    every = itertools.chain((first,), configs) if config else ()
    return backend, backend.compile(problem, device, next((c for c in every if str(c) == config), first))
