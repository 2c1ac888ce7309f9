"""Every element of every result against the float64 answer, within the running error bound."""

from __future__ import annotations

from typing import Any

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import elements
from attnswitch.verify.outcome import Failure
from attnswitch.verify.trial import Trial
from attnswitch.verify.truth.exact import Exact
from attnswitch.verify.truth.oracle import Answer

__all__ = ["CHECKS", "exact_of", "heavy", "heavy_weights"]


def exact_of(trial: Trial) -> Exact:
    """The exact answer to a trial; where the backend drew the dropout mask, with the mask that its output shows."""
    case = trial.case
    if not case.unseeded:
        return trial.subject.exact
    # V = I: the output is the dropped softmax itself.
    return Exact(case, trial.data, trial.results["out"][..., : case.seq_k] != 0.0)


def _reference(trial: Trial) -> Failure | None:
    exact = exact_of(trial)
    failure, trial.ratios = elements(exact, trial.results, exact.limits(trial.precision(trial.case)))
    if failure is None and exact is not trial.subject.exact:
        return _plausible(exact)
    return failure


def heavy(answer: Answer) -> Any:
    """Which weights are too large to vanish by rounding, so that a 0 was dropped."""
    return answer.visible & (answer.p > 1e-4)


def heavy_weights(exact: Exact) -> tuple[int, int]:
    """How many weights are heavy, and how many of them were kept."""
    count = kept = 0
    for answer in exact.answers:
        decided = heavy(answer)
        count += int(decided.sum())
        kept += int((decided & (answer.z > 0)).sum())
    return count, kept


def _plausible(exact: Exact) -> Failure | None:
    """The share of kept heavy weights is what dropout_p says (6 sigma)."""
    (n, kept), p = heavy_weights(exact), exact.case.dropout
    if abs(kept - n * (1 - p)) > 6 * (n * p * (1 - p)) ** 0.5 + 1:
        return Failure("reference", f"{kept} of {n} weights were kept with dropout_p={p}", "dropout")
    return None


CHECKS = (
    Check(
        "reference",
        "every element is as close to the float64 answer as its rounding error bound",
        "It is the contract itself, for every element of every case; the others each see some faults in some cases.",
        lambda case: True,
        _reference,
        always=True,
        varlen=True,
    ),
)
