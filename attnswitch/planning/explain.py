"""A plan in words. Nothing here is worked out before somebody reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnswitch.machine import registry
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.choice import Basis
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.view import Near

if TYPE_CHECKING:
    from attnswitch.planning.plan import Plan

__all__ = ["remarks", "table", "why", "why_not"]


def why(plan: Plan) -> str:
    """What the choice of ``plan`` rests on."""
    match plan.basis:
        case Basis.FORCED:
            return f"forced by backend={plan.named!r}"
        case Basis.REFUSED:
            return f"backend={plan.named!r} was asked for and does not take it"
        case Basis.UNTAKEN:
            return "no backend takes it"
        case Basis.DISTRUSTED:
            return "every backend that takes it was wrong here"
        case Basis.UNMEASURED:
            return (
                "nothing was measured for it here, and the policy is wisdom-only; attnswitch tune --problem measures it"
            )
        case Basis.MEASURED:
            return f"measured here on {_times(plan)}"
        case Basis.NEAREST:
            return _nearest(plan)
        case Basis.DECLARED:
            times = any(candidate.time for candidate in plan.candidates if candidate.trusted)
            what = "others alone were measured with the versions of now" if times else "nothing was measured"
            return f"first in the declared order that takes the problem; {what}"


def why_not(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    """Why ``candidate`` was not chosen; empty for the chosen one."""
    chosen = plan.chosen
    if candidate is chosen:
        return ()
    # What the problem is comes before what this machine lacks: no driver makes a GPU kernel take CPU arrays.
    reasons = candidate.reasons or ((candidate.unavailable,) if candidate.unavailable else ())
    if reasons:
        return reasons
    if plan.basis is Basis.REFUSED:
        return ("it takes the problem, but another backend was asked for",)
    if plan.basis is Basis.FORCED:
        return (f"it takes the problem, but backend={plan.backend!r} was asked for",)
    if fault := candidate.fault:
        return (
            f"it was wrong on this machine on {fault.date[:10]}: {fault.why} (case {fault.case}, {fault.problem});"
            " it is left out until another version gets that case right, or until"
            f" `attnswitch wisdom forget --backend {candidate.backend}`",
        )
    if candidate.heavy and chosen is not None and not chosen.heavy:
        return (
            f"it takes the problem, but holds {_size(candidate.heavy)} beside the operands, which grow with Lq x Lk;"
            f" {chosen.backend} does without",
        )
    if chosen is not None and chosen.time is None and chosen.near is None:
        return (f"it takes the problem, but stands behind {plan.backend} in the declared order",)
    if untimed := candidate.untimed:
        return (f"it takes the problem, but was not timed when that was tried on {untimed.date[:10]}: {untimed.why}",)
    return (f"it takes the problem, {_slower(candidate, chosen)}",)


def remarks(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    """What ``candidate`` says of how it computes the problem, if it takes it."""
    if not candidate.fits:
        return ()
    try:
        backend = registry.loaded(candidate.backend)
        return tuple(map(str, backend.remarks(plan.problem, plan.device, candidate.config)))
    except Exception as error:  # which is no reason against it
        return (f"it failed while planning: {type(error).__name__}: {error}",)


def table(plan: Plan) -> str:
    """The problem, the device, the choice, and every candidate with its reasons."""
    lines = [f"problem  {plan.problem}", f"device   {plan.device}", f"choice   {plan.backend or 'none'} ({plan.why})"]
    width = max(len(candidate.backend) for candidate in plan.candidates)
    for candidate in plan.candidates:
        sentences = (*(why_not(plan, candidate) or ("chosen",)), *remarks(plan, candidate))
        for line, sentence in enumerate(sentences):
            lines.append(f"  {candidate.backend if line == 0 else '':{width}}  {sentence}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _slower(candidate: Candidate, chosen: Candidate | None) -> str:
    """What was measured of a candidate against what was of the chosen one, if anything was chosen."""
    if chosen and chosen.time and candidate.time:
        return f"but took {_beside(candidate.time, chosen.time)} against {chosen.time.ms:.4g}"
    if chosen and chosen.near and candidate.near:
        times = candidate.near.slower / chosen.near.slower
        took = f"took {times:.3g} times as long as {chosen.backend} on the nearest that were measured"
        return f"but {took}" if times >= 1 else f"and {took}: too little to go before it in the order"
    if candidate.time:
        return f"and took {candidate.time.ms:.4g} ms, but what comes before it in the order was not measured beside it"
    return "but was not measured here"


def _beside(time: Time, other: Time) -> str:
    """A time, with its problem where that is not the one of the time that it stands beside."""
    return f"{time.ms:.4g} ms" + ("" if time.problem == other.problem else f" on {time.problem}")


def _times(plan: Plan) -> str:
    """The date, the problem and every time, the fastest first."""
    timed = [(c.time, c.backend) for c in plan.candidates if c.trusted and c.time]
    timed.sort(key=lambda entry: entry[0].pace)
    first = timed[0][0]
    each = ", ".join(f"{backend} {_beside(time, first)}" for time, backend in timed)
    return f"{first.date[:10]}, on {first.problem}: {each}"


def _nearest(plan: Plan) -> str:
    ranked: Sequence[tuple[Near, str]] = [(c.near, c.backend) for c in plan.candidates if c.near]
    ranked = sorted(ranked, key=lambda entry: entry[0].slower)
    problems = ", ".join(str(problem) for problem in {problem: None for near, _ in ranked for problem in near.problems})
    each = ", ".join(f"{backend} {near.slower:.3g}" for near, backend in ranked)
    tie = (
        ""
        if plan.backend == ranked[0][1]
        else f"; as fast, as far as that tells, {plan.backend} comes first in the order"
    )
    return (
        f"nothing like it was measured; on the nearest here, {problems}, each took as many times as long as the"
        f" fastest: {each}{tie}"
    )
