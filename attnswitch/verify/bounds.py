"""How far a correct kernel may be from the exact answer: a running error bound for every element.

First-order rounding error analysis, carried along the computation with exact quantities and absolute values, from the
precision that a backend declares (``Precision``). No tolerance is chosen: u is half a unit in the last place of a
type, sums of n terms lose n units, and every rounding the backend admits to is counted. Background: Higham, "Accuracy
and Stability of Numerical Algorithms" (2002), and Blanchard, Higham and Higham on log-sum-exp and softmax (2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnswitch.backend import Precision
from attnswitch.verify.oracle import Answer, Float, grouped, unbroadcast

__all__ = ["bounds"]

#: Unit roundoff of the types, and what vanishes: torch and GPUs may flush subnormals of the wide types to 0.
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "tf32": 2.0**-11}
_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
#: Roundings of exp, tanh and the like, in units of the accumulator; CUDA's own are within it.
_CALL = 8.0
#: A stored lse up to this size may be used by a backend that otherwise renews the row's sums.
_TRUSTED_LSE = 1024.0


@dataclass(frozen=True, slots=True)
class _Units:
    """Unit roundoffs of one backend on one problem: accumulator, weights, storage; and score inputs, 0 if exact."""

    acc: float
    weights: float
    weights_tiny: float
    store: float
    store_tiny: float
    lse: float
    inputs: float
    group: float
    renewed: bool
    exp: float


def _units(dtype: str, precision: Precision, dropout: bool = False) -> _Units:
    acc = precision.accumulator
    weights = dtype if precision.weights == "storage" else acc
    lse = "float64" if dtype == "float64" else "float32"
    # With dropout the weights are rounded, divided by 1 - p, and rounded again.
    twice = 2.0 if dropout and precision.weights == "storage" else 1.0
    return _Units(
        acc=_UNIT[acc],
        weights=_UNIT[weights] * twice,
        weights_tiny=_TINY[weights],
        store=_UNIT[dtype],
        store_tiny=_TINY[dtype],
        lse=_UNIT[lse],
        inputs=_UNIT["tf32"] if precision.score_inputs == "tf32" else 0.0,
        group=_UNIT[dtype] if precision.group_sum == "storage" else 0.0,
        renewed=precision.statistics == "exact",
        exp=precision.exp,
    )


def bounds(a: Answer, precision: Precision) -> dict[str, Float]:
    """Largest error of each element of ``a.values`` that rounding under ``precision`` explains."""
    with np.errstate(all="ignore"):
        found = _bounds(a, _units(a.case.dtype, precision, a.case.dropout > 0))
        return {name: np.where(np.isnan(bound), np.inf, bound) for name, bound in found.items()}


def _score_error(a: Answer, u: _Units) -> Float:
    """Absolute error of the scores as they enter exp, (B, Hq, Lq, Lk)."""
    case = a.case
    size = abs(case.softmax_scale) * (np.abs(a.q) @ np.abs(a.k).mT)
    e = ((case.dim_qk + 4) * u.acc + 2 * u.inputs) * size
    if case.softcap:
        # tanh is flat where it saturates; the slope at the near end of the interval covers all of it.
        t = np.maximum(np.arctanh(np.minimum(np.abs(a.tanh), 1 - 1e-16)) - e / case.softcap, 0.0)
        e = e * (1.0 / np.cosh(np.minimum(t, 300.0)) ** 2) + _CALL * u.acc * np.abs(case.softcap * a.tanh)
        e = e + _CALL * u.acc * case.softcap * 2.0**-10
    e = e + 2 * u.acc * np.abs(a.mask)
    top = np.max(np.where(a.visible, np.abs(a.s), 0.0), axis=-1, initial=0.0, keepdims=True)
    return e + 4 * u.acc * (np.abs(a.s) + top) + _CALL * u.acc + u.exp


def _bounds(a: Answer, u: _Units) -> dict[str, Float]:
    case = a.case
    n = case.seq_k + 8
    e = np.where(a.visible, _score_error(a, u), 0.0)
    log_p = np.where(a.visible, a.s - np.where(np.isfinite(a.lse), a.lse, 0.0)[..., None], -np.inf)
    high, low = (np.where(a.visible, np.exp(log_p + sign * e), 0.0) for sign in (1.0, -1.0))
    alive = a.visible.any(-1)
    least = np.where(alive, low.sum(-1), 1.0)  # the denominator cannot be smaller, in units of the true one

    # -- output and lse --
    abs_v, out = np.abs(a.v), np.abs(a.values["out"])
    moved = (high - a.p) * a.z
    spread = ((moved) @ abs_v) + (high - a.p).sum(-1)[..., None] * out
    spread = spread / np.maximum(least, 1e-300)[..., None]
    rounding = ((a.p * a.z) @ abs_v) * (u.weights + n * u.acc)
    flushed = n * u.weights_tiny * np.max(abs_v * 1.0, axis=-2, initial=0.0, keepdims=True) * np.max(a.z, initial=1.0)
    exact_out = spread + rounding + flushed
    # Whatever the weights, an undropped output stays within the values it averages.
    if not case.dropout:
        reach = np.max(abs_v, axis=-2, initial=0.0, keepdims=True)
        exact_out = np.minimum(exact_out, (reach + out) * (1 + 2 * u.weights + n * u.acc))
    bound_out = exact_out * (1 + u.store) + u.store * out + u.store_tiny
    bound_out = np.where(alive[..., None], bound_out, 0.0)

    up, down = np.log(np.maximum(high.sum(-1), 1.0)), -np.log(np.maximum(low.sum(-1), 1e-300))
    exact_lse = np.maximum(up, down) + n * u.acc
    bound_lse = np.where(
        alive, exact_lse * (1 + u.lse) + (u.lse + 2 * u.acc) * np.abs(np.where(alive, a.lse, 0.0)), 0.0
    )

    # -- gradients: P is computed again from the stored lse --
    size_lse = np.abs(np.where(alive, a.lse, 0.0))
    if u.renewed:
        size_lse = np.minimum(size_lse, _TRUSTED_LSE)
    again = exact_lse + 4 * u.lse * size_lse + 4 * u.acc
    h = np.where(a.visible, np.exp(log_p + e + again[..., None]), 0.0) - a.p
    abs_do = np.abs(a.grad_out)
    nv = case.dim_v + 8
    dp_size = (abs_do @ abs_v.mT) * a.z
    dp_error = nv * u.acc * dp_size
    centre_size = (abs_do * out).sum(-1)
    # D = rowsum(dO * O) sees the stored output; a composite sums P * dP instead, whose error is of the same kind.
    centre_error = (abs_do * bound_out).sum(-1) + nv * u.acc * centre_size
    centre_error = np.maximum(
        centre_error, (h * np.abs(a.dp * a.z) + (a.p + h) * dp_error).sum(-1) + n * u.acc * (a.p * dp_size).sum(-1)
    )
    centre_error = centre_error + (a.p * np.abs(a.dp * a.z)).sum(-1) * u.weights
    slope_ds = np.abs(a.z * a.dp - (a.grad_out * a.values["out"]).sum(-1)[..., None] + a.grad_lse[..., None])
    c = (h + u.weights * a.p + u.weights_tiny) * slope_ds + (a.p + h) * (
        dp_error
        + centre_error[..., None]
        + 4 * u.acc * (np.abs(a.z * a.dp) + (centre_size + np.abs(a.grad_lse))[..., None])
    )
    c_mask = c + (u.weights + 4 * u.acc) * np.abs(a.ds) + u.weights_tiny
    ds = np.abs(a.ds)
    if case.softcap:
        tanh = np.abs(a.tanh)
        raw_error = ((case.dim_qk + 4) * u.acc + 2 * u.inputs) * abs(case.softmax_scale) / case.softcap
        size = np.abs(a.q) @ np.abs(a.k).mT
        flat = np.minimum(2 * tanh * (raw_error * size * (1 - tanh**2) + _CALL * u.acc) + _CALL * u.acc, 1.0)
        c, ds = (c + ds * 4 * u.acc) * np.minimum(1 - tanh**2 + flat, 1.0) + ds * flat, ds * (1 - tanh**2)
    c = np.where(a.visible, c + (u.weights + 4 * u.acc) * ds, 0.0)

    abs_q, abs_k, scale = np.abs(a.q), np.abs(a.k), abs(case.softmax_scale)
    m = case.seq_q * case.group + 8
    # dS may be scaled before or after it is rounded: what vanishes is not made smaller by a small scale.
    lost = max(scale, 1.0) * u.weights_tiny * a.visible
    dq = (scale * (c + n * u.acc * ds) + lost) @ abs_k
    dk = (scale * (c + m * u.acc * ds) + lost).mT @ abs_q
    pz = a.p * a.z
    dv = (h * a.z + (u.weights + m * u.acc) * pz + u.weights_tiny * a.visible * np.max(a.z, initial=1.0)).mT @ abs_do
    found = {"out": bound_out, "lse": bound_lse, "query": _stored(dq, np.abs(a.values["query"]), u)}
    sizes = {"key": scale * ((ds).mT @ abs_q), "value": ((pz).mT @ abs_do)}
    for name, error in (("key", dk), ("value", dv)):
        error = grouped(case, error + (u.group * sizes[name] if case.group > 1 else 0.0))
        found[name] = _stored(error, np.abs(a.values[name]), u)
    if "attn_mask" in a.values:
        shape = a.values["attn_mask"].shape
        terms = math.prod(case.scores) // max(1, math.prod(shape))
        error = np.where(a.visible, c_mask, 0.0) + (u.group + (terms + 8) * u.acc) * np.abs(a.ds)
        mask_units = _units(case.mask.dtype, Precision()) if case.mask else u
        found["attn_mask"] = _stored(unbroadcast(error, shape), np.abs(a.values["attn_mask"]), mask_units)
    return found


def _stored(error: Float, size: Float, u: _Units) -> Float:
    """The error after rounding to the storage type; one more unit for a scale or a sum in it."""
    return error * (1 + 2 * u.store) + 2 * u.store * size + u.store_tiny
