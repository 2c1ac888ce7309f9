"""Four identities between the gradients and the operands, which need no reference and cost O(L).

For each key head, with the sums over the query heads that share it (derived from dS = P (Z dP - D + dlse)):
  I1  sum_j dK_j = scale sum_i dlse_i q_i      (no softcap, no sinks)
  I2  sum_j dV_j = sum over live rows of dO_i  (no dropout, no sinks)
  I3  <V, dV> = <O, dO>
  I4  <Q, dQ> = <K, dK>
How far rounding can move the sums follows from the error sums of single rows (``bounds.row_errors``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import alike
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Trial
from attnswitch.verify.truth.bounds import TINY, UNITS

__all__ = ["CHECKS"]

_NAME = "identities"
#: Scores up to which it is written out which are visible.
_WRITTEN_OUT = 2**25


def _applies(case: Case) -> bool:
    return {"q", "k", "v"} <= set(case.grads) and not case.poison and not case.unseeded and case.work > 0


def _identities(trial: Trial) -> Failure | None:
    case, data, got = trial.case, trial.data, trial.results
    if not all(np.isfinite(got[name]).all() for name in ("out", "grad query", "grad key", "grad value")):
        raise NotApplicable("an overflow, which the reference judges")
    if trial.subject.exact.rows is not None and (case.sinks or case.alibi):
        raise NotApplicable("rows are sampled, and tell nothing of heads with another sink or slope")
    unit, scale = UNITS[case.dtype], abs(case.softmax_scale)
    q, k, v, do, dlse = (data[role] for role in ("query", "key", "value", "grad_out", "grad_lse"))
    shape = (case.batch, case.heads_q, case.seq_q)
    precision = trial.precision(case)
    rows = trial.subject.exact.row_errors(precision)
    p, ds, size = (np.broadcast_to(rows[name], shape)[..., None] for name in ("p", "ds", "size"))
    alive = _alive(trial)[..., None]
    lost = TINY[case.dtype]  # what a stored gradient may lose to underflow

    def kv(x: Any) -> Any:
        """Sum over the rows of each key head: (B, Hkv, ...)."""
        return x.sum(2).reshape(case.batch, case.heads_kv, case.group, -1).sum(2)

    # A row of which nothing can be said must not turn into NaN where it is multiplied by 0.
    summed = (case.seq_q * case.group + case.seq_k + 16) * UNITS[precision.accumulator]
    moved_k, moved_v = (np.minimum(x, 1e30) for x in (ds + (4 * unit + summed) * size, p + 4 * unit + summed))
    k_max, v_max = (np.repeat(np.abs(x).max(2, keepdims=True), case.group, axis=1) for x in (k, v))
    found: list[Failure | None] = []
    with np.errstate(all="ignore"):
        if not (case.softcap or case.sinks):
            found.append(
                alike(
                    _NAME,
                    "grad key",
                    got["grad key"].sum(2),
                    case.softmax_scale * kv(np.where(alive, dlse[..., None], 0.0) * q),
                    scale * kv(np.abs(q) * moved_k) + case.seq_k * lost,
                    "I1: the key gradients do not add up to what lse's gradient adds",
                )
            )
        if not (case.dropout or case.sinks):
            found.append(
                alike(
                    _NAME,
                    "grad value",
                    got["grad value"].sum(2),
                    kv(np.where(alive, do, 0.0)),
                    kv(np.abs(do) * moved_v) + case.seq_k * lost,
                    "I2: the value gradients do not add up to the upstream gradient",
                )
            )
        found.append(
            alike(
                _NAME,
                "grad value",
                (v * got["grad value"]).sum((2, 3)),
                kv(do * got["out"]).sum(-1),
                2 * kv(np.abs(do) * v_max * moved_v * _thinned(case)).sum(-1)
                + lost * np.abs(v).sum((2, 3))
                + lost * kv(np.abs(do)).sum(-1),
                "I3: <V, dV> is not <O, dO>",
            )
        )
        found.append(
            alike(
                _NAME,
                "grad query",
                kv(q * got["grad query"]).sum(-1),
                (k * got["grad key"]).sum((2, 3)),
                2 * scale * kv(np.abs(q) * k_max * moved_k).sum(-1)
                + lost * (np.abs(k).sum((2, 3)) + kv(np.abs(q)).sum(-1)),
                "I4: <Q, dQ> is not <K, dK>",
            )
        )
    return first_of(*found)


def _thinned(case: Case) -> float:
    """The factor on the weights that dropout keeps."""
    return 1.0 / max(1.0 - case.dropout, 1e-300) if case.dropout else 1.0


def _alive(trial: Trial) -> Any:
    """Rows that see any key: by the exact lse, or what hides, or at great lengths by the backend's own output."""
    exact = trial.subject.exact
    if exact.rows is None:
        return exact.values["lse"] > -np.inf
    case = trial.case
    if case.mask is None and case.lengths is None and case.window is None and case.alignment == "top_left":
        return np.ones((case.batch, case.heads_q, case.seq_q), np.bool_)
    if math.prod(case.scores) <= _WRITTEN_OUT:
        return trial.subject.visible.any(-1)
    return (trial.results["out"] != 0.0).any(-1)


CHECKS = (
    Check(
        _NAME,
        "sums of the gradients agree with each other and with the operands (four identities)",
        "It sees wrong gradients with no reference: at lengths where there is none it is the only check of dK and dV.",
        _applies,
        _identities,
        always=True,
    ),
)
