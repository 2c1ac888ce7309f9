"""Running again: the same call, the same values lying otherwise in memory, another problem of the shape in between.

Kernels are compiled and cached by some key; a fact that the key lacks shows when two problems differ in it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import elements, identical
from attnswitch.verify.checks.reference import exact_of, heavy, heavy_weights
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
from attnswitch.verify.launch.call import hosted
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial
from attnswitch.verify.truth.exact import Exact

__all__ = ["CHECKS"]

#: How often the same call is made.
REPEATS = 4
#: Distances up to which all are looked at for a dropout mask that comes again.
_NEAR = 65


def _repeatable(case: Case) -> bool:
    return not case.unseeded and case.scores[2] > 0


def _repeat(trial: Trial) -> Failure | None:
    """To the bit where the backend promises it (it takes ``deterministic=True``), else within rounding."""
    if not trial.repeats:
        got = trial.run(trial.subject)
        return within(trial, "repeat", got, trial.results, "it differs when the same call is made again")
    same = trial.repeatable(trial.subject)
    first = trial.run(same)
    for n in range(2, REPEATS + 1):
        again = trial.run(same)
        message = f"it is promised to repeat its bits, and call {n} of the same differs from the first"
        found = first_of(*(identical("repeat", name, again[name], first[name], message) for name in first))
        if found is not None:
            return found
    return None


def _placed_otherwise(case: Case) -> bool:
    moved = case.placing != Placing() or case.layout != "BHLD"
    return moved and _repeatable(case) and not case.poison and case.work > 0


def _layouts(trial: Trial) -> Failure | None:
    """Plainly placed, then as before again: two orders of the same pair of layouts."""
    case, subject = trial.case, trial.subject
    plain = subject.derive("plain", lambda: (case.replace(placing=Placing(), layout="BHLD"), subject.data))
    got = trial.run(plain)
    found = within(trial, "layouts", got, trial.results, "the same values lying plainly in memory give another")
    if found is None:
        again = trial.run(subject)
        found = within(trial, "layouts", again, trial.results, "it differs after a call with another memory layout")
    return found


def _varied(case: Case) -> bool:
    return not case.poison and not case.unseeded and case.work > 0 and case.work <= 2**22


def _variant(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """The same shapes with one fact changed that a cache of compiled kernels might leave out of its key."""
    case, data = subject.case, subject.data
    choice = case.data_seed % 4
    if choice == 0:
        return case.replace(scale=case.softmax_scale * 0.5 + 0.0625), data
    if choice == 1:
        return case.replace(causal=not case.causal), data
    if choice == 2 and case.mask is None and not (case.varlen or case.page):
        mask = MaskRecipe("bool", "bhqk", 4, "random")
        other = case.replace(mask=mask)
        return other, {**data, "attn_mask": Subject(other).data["attn_mask"]}
    if choice == 2 and case.page:
        other = case.replace(tree="" if case.tree else "random")
        bits = {} if case.tree else {"attn_mask": Subject(other).data["attn_mask"]}
        return other, {role: values for role, values in data.items() if role != "attn_mask"} | bits
    other = case.replace(data_seed=(case.data_seed + 1) % 2**64)
    return other, Subject(other).data


def _variants(trial: Trial) -> Failure | None:
    other = trial.subject.derive("variant", lambda: _variant(trial.subject))
    trial.results  # noqa: B018 - read before the next call
    got = trial.run(other)
    wrong, _ = elements(other.exact, got, trial.limits(other))
    if wrong is not None:
        message = f"after a call of the same shape: {wrong.message} (this call: {other.case})"
        return Failure("variants", message, wrong.result, wrong.index, wrong.got, wrong.expected, wrong.bound)
    kept = hosted(trial.returned.results)
    message = "a later call of the same shape wrote to a result that was already returned"
    overwritten = first_of(*(identical("variants", name, kept[name], trial.results[name], message) for name in kept))
    if overwritten is not None:
        return overwritten
    again = trial.run(trial.subject)
    return within(trial, "variants", again, trial.results, "it differs after a call of the same shape with other facts")


def _drawn(case: Case) -> bool:
    return case.unseeded and case.dropout < 1.0 and case.work > 0


def _fresh_masks(trial: Trial) -> Failure | None:
    """Two calls without a seed, from different states of torch's generator: equal masks would be chance."""
    case, exact = trial.case, exact_of(trial)
    undecided, _ = heavy_weights(exact)
    if undecided < _few(case):
        raise NotApplicable("two masks of so few weights may be equal by chance")
    if (what := _shared(trial, exact)) is not None:
        return Failure("fresh-dropout", f"{what} drop the same weights", "out")
    other = trial.subject.derive("redrawn", lambda: (case.replace(data_seed=case.data_seed + 1), trial.data))
    got = trial.run(other)["out"] != 0.0
    if (got == (trial.results["out"] != 0.0)).all():
        return Failure("fresh-dropout", "two calls without a seed drop the same weights", "out")
    return None


def _few(case: Case) -> float:
    """So many weights are dropped alike by chance once in 2^60."""
    alike = case.dropout**2 + (1 - case.dropout) ** 2
    return -60 / math.log2(alike) if alike < 1.0 else math.inf


def _shared(trial: Trial, exact: Exact) -> str | None:
    """What shares one mask: whatever is so far apart along an axis drops the same."""
    if exact.rows is not None:
        return None
    (answer,) = exact.answers
    kept = trial.results["out"][..., : trial.case.seq_k] != 0.0
    decided = np.broadcast_to(heavy(answer), kept.shape)
    for what, steps in _steps(kept.shape):
        here = tuple(slice(max(step, 0), min(step, 0) or None) for step in steps)
        there = tuple(slice(max(-step, 0), min(-step, 0) or None) for step in steps)
        both = decided[here] & decided[there]
        if both.sum() >= _few(trial.case) and (kept[here] == kept[there])[both].all():
            return what
    return None


def _steps(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """From a weight to another that may share its number: along each axis, and where two have one sum or difference.

    Of long axes the first distances, and powers of two.
    """
    names = "batch entries", "heads", "queries", "keys"
    for axis, what in enumerate(names):
        far = {2**power for power in range((shape[axis] - 1).bit_length())}
        for distance in sorted(far | set(range(1, min(shape[axis], _NEAR)))):
            yield f"{what} that are {distance} apart", tuple(distance * (n == axis) for n in range(4))
    for first in (0, 2):
        for step, of in ((-1, "sum"), (1, "difference")):
            yield (
                f"{names[first]} and {names[first + 1]} of one {of}",
                tuple({first: 1, first + 1: step}.get(n, 0) for n in range(4)),
            )


CHECKS = (
    Check(
        "repeat",
        "the same call gives the same, to the bit where the backend promises it",
        "Bitwise, on the same call: sums whose order varies stay within every error bound.",
        _repeatable,
        _repeat,
        varlen=True,
    ),
    Check(
        "layouts",
        "the same values lying otherwise in memory give the same, whichever was first",
        "It needs no reference, and calls pairs of layouts of one shape in both orders.",
        _placed_otherwise,
        _layouts,
        varlen=True,
    ),
    Check(
        "variants",
        "a call of the same shape with other facts between two equal calls changes neither",
        "It finds what a cache of kernels or buffers leaves out of its key.",
        _varied,
        _variants,
        varlen=True,
    ),
    Check(
        "fresh-dropout",
        "without a seed each call, batch entry, head, query and key has a dropout mask of its own",
        "It compares masks: one that is the same every time, or everywhere, is of the right share and right by itself.",
        _drawn,
        _fresh_masks,
    ),
)
