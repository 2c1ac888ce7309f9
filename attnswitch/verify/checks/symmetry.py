"""Laws of attention as a function: what a change of the operands does to the results, known without a reference.

Operands are changed exactly (permuted, negated, scaled, summed as integers), so that only the kernel rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import alike
from attnswitch.verify.drawing.case import Case, MaskRecipe
from attnswitch.verify.drawing.generator import hashed
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial

__all__ = ["CHECKS", "within"]


def _finite(case: Case) -> bool:
    return not case.poison and case.work > 0


def _drawless(case: Case) -> bool:
    return _finite(case) and not case.dropout


def within(
    trial: Trial,
    check: str,
    got: dict[str, Any],
    expected: dict[str, Any],
    message: str,
    limits: dict[str, Any] | None = None,
    factor: float = 2.0,
) -> Failure | None:
    """Results that may differ by ``factor`` error bounds, each of them having one of its own."""
    exact = trial.subject.exact
    limits = limits or trial.limits()
    found = []
    for name, result in got.items():
        key = name.removeprefix("grad ")
        if name in expected and key in exact.values:
            mine, other = (exact.part(x, key).reshape(exact.values[key].shape) for x in (result, expected[name]))
            failure = alike(check, name, mine, other, factor * limits[key], message)
            if failure is not None and failure.index is not None:
                place = exact.place(failure.index, key)
                failure = Failure(check, failure.message, name, place, failure.got, failure.expected, failure.bound)
            found.append(failure)
    return first_of(*found)


# -- the order of the keys ---------------------------------------------------------------------------------------------


def _unordered(case: Case) -> bool:
    return _drawless(case) and not (case.hides_by_position or case.alibi) and case.seq_k > 1


def _order(case: Case) -> Any:
    """A permutation of the keys."""
    return np.argsort(hashed(np, case.data_seed, 13, case.seq_k), kind="stable")


def _permuted(subject: Subject) -> tuple[Case, dict[str, Any]]:
    order = _order(subject.case)
    changes = {role: subject.data[role][:, :, order] for role in ("key", "value")}
    mask = subject.data.get("attn_mask")
    if mask is not None and mask.shape[3] > 1:
        changes["attn_mask"] = mask[..., order]
    return subject.with_data(**changes)


def _permutation(trial: Trial) -> Failure | None:
    got = trial.run(trial.subject.derive("permuted", lambda: _permuted(trial.subject)))
    order = np.argsort(_order(trial.case))
    for name in ("grad key", "grad value"):
        if name in got:
            got[name] = got[name][:, :, order]
    if "grad attn_mask" in got and got["grad attn_mask"].shape[-1] > 1:
        got["grad attn_mask"] = got["grad attn_mask"][..., order]
    return within(trial, "permutation", got, trial.results, "the order of the keys changes it")


# -- a constant added to the scores ------------------------------------------------------------------------------------


def _shift_applies(case: Case) -> bool:
    return _drawless(case) and case.mask is None and not case.sinks and case.data not in ("large", "activations")


def _shift_by(case: Case) -> float:
    """Large enough to fall below stand-ins for -inf, and exact in every float type."""
    return (-32768.0, 4096.0, -4096.0, -16384.0)[case.data_seed % 4]


def _shifted(subject: Subject) -> tuple[Case, dict[str, Any]]:
    mask = MaskRecipe(subject.case.dtype, "", 4, "smooth")
    return subject.case.replace(mask=mask), {
        **subject.data,
        "attn_mask": np.full((1, 1, 1, 1), _shift_by(subject.case)),
    }


def _shift(trial: Trial) -> Failure | None:
    shifted = trial.subject.derive("shifted", lambda: _shifted(trial.subject))
    got = trial.run(shifted)
    if "lse" in got:
        got["lse"] = got["lse"] - _shift_by(trial.case)
    limits = trial.apart(shifted.exact, shifted.case)
    message = f"a constant of {_shift_by(trial.case):g}, added to every score by a mask of (1, 1, 1, 1), changes it"
    return within(trial, "shift", got, trial.results, message, limits, factor=1.0)


# -- values ------------------------------------------------------------------------------------------------------------


def _linear_applies(case: Case) -> bool:
    return _finite(case) and not case.unseeded


def _small(subject: Subject, stream: int) -> Any:
    word = hashed(np, subject.case.data_seed, stream, subject.data["value"].size) % 9
    return word.astype(np.float64).reshape(subject.data["value"].shape) * 1.0


def _linearity(trial: Trial) -> Failure | None:
    """O(V1 + V2) = O(V1) + O(V2) and O(V1 - V2) likewise, with integers, whose sums are exact."""
    subject = trial.subject
    one, two = _small(subject, 14), _small(subject, 15)
    outs = []
    for name, value in (("V1", one), ("V2", two), ("V1+V2", one + two)):

        def make(value: Any = value) -> tuple[Case, dict[str, Any]]:
            case, data = subject.with_data(value=value)
            return case.replace(grads="", lse=False), data

        outs.append(trial.run(subject.derive(name, make))["out"])
    summed = subject.derived["V1+V2"]  # its bound holds for the parts: they are no larger
    limits = trial.limits(summed)
    with np.errstate(invalid="ignore"):  # a wrong kernel may give inf and -inf
        parts = outs[0] + outs[1]
    return within(trial, "linearity", {"out": outs[2]}, {"out": parts}, "it is not linear in V", limits, factor=3.0)


def _hull_applies(case: Case) -> bool:
    return _drawless(case) and not case.sinks  # which take a share of the weights


def _ones(subject: Subject) -> tuple[Case, dict[str, Any]]:
    case, data = subject.with_data(value=np.ones_like(subject.data["value"]))
    return case.replace(grads="", lse=True), data


def _hull(trial: Trial) -> Failure | None:
    """Weights that add up to 1: values of 1 give 1, and no output leaves the range of the values."""
    case, exact = trial.case, trial.subject.exact
    value, lengths = trial.data["value"], case.lengths or (case.seq_k,) * case.batch
    limits, alive = trial.limits()["out"], np.isfinite(exact.values["lse"])[..., None]
    lowest, highest = np.zeros((2, case.batch, case.heads_kv, 1, case.dim_v))
    for b, length in enumerate(lengths):
        lowest[b, :, 0] = value[b, :, :length].min(1, initial=np.inf)
        highest[b, :, 0] = value[b, :, :length].max(1, initial=-np.inf)
    spread = (np.broadcast_to(np.repeat(x, case.group, 1), (*case.scores[:3], case.dim_v)) for x in (lowest, highest))
    low, high = (np.where(alive, exact.part(x), 0.0) for x in spread)
    out = exact.part(trial.results["out"])
    found = alike("hull", "out", out, np.clip(out, low, high), limits, "it leaves the range of the values")
    if found is not None:
        return found
    ones = trial.subject.derive("ones", lambda: _ones(trial.subject))
    try:
        got = trial.run(ones)
    except NotApplicable:
        return None
    return within(
        trial,
        "hull",
        {"out": got["out"]},
        {"out": np.where(np.isfinite(got["lse"])[..., None], 1.0, 0.0) + 0 * got["out"]},
        "values of 1 do not average to 1",
        trial.limits(ones),
        factor=1.0,
    )


CHECKS = (
    Check(
        "permutation",
        "the order of the keys has no effect where nothing hides by position",
        "It compares a kernel with itself: a key tile treated unlike the others shows at any length.",
        _unordered,
        _permutation,
    ),
    Check(
        "shift",
        "a constant added to all scores changes lse by it and nothing else",
        "It drives the scores to where a maximum that starts at 0, or a finite stand-in for -inf, shows.",
        _shift_applies,
        _shift,
    ),
    Check(
        "linearity",
        "the output is linear in V",
        "It needs no reference, and sees values that are dropped, clipped or mixed at any length.",
        _linear_applies,
        _linearity,
    ),
    Check(
        "hull",
        "the weights of a row add up to 1: no output leaves the range of the values",
        "It needs no reference, and sees a denominator that does not fit its numerator at any length.",
        _hull_applies,
        _hull,
    ),
)
