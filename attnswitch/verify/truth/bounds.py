"""How far a correct kernel may be from the exact answer: a running error bound for every element.

First-order rounding error analysis, carried along the computation with exact quantities and absolute values, from the
precision that a backend declares (``Precision``). No tolerance is chosen: u is half a unit in the last place of a
type, sums of n terms lose n units, and every rounding the backend admits to is counted. Background: Higham, "Accuracy
and Stability of Numerical Algorithms" (2002), and Blanchard, Higham and Higham on log-sum-exp and softmax (2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnswitch.machine.backend import Precision
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.data import LARGEST
from attnswitch.verify.truth.oracle import Answer, Float, grouped, unbroadcast

__all__ = ["TINY", "UNITS", "bounds", "row_errors"]

#: Unit roundoff of the types, and what vanishes: torch and GPUs may flush subnormals of the wide types to 0.
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "tf32": 2.0**-11}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
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
        acc=UNITS[acc],
        weights=UNITS[weights] * twice,
        weights_tiny=TINY[weights],
        store=UNITS[dtype],
        store_tiny=TINY[dtype],
        lse=UNITS[lse],
        inputs=UNITS["tf32"] if precision.score_inputs == "tf32" else 0.0,
        group=UNITS[dtype] if precision.group_sum == "storage" else 0.0,
        renewed=precision.statistics == "exact",
        exp=precision.exp,
    )


@dataclass(frozen=True, slots=True)
class _Forward:
    """Error bounds of the forward that the backward goes on with."""

    score: Float  # absolute error of the scores, (B, Hq, Lq, Lk)
    log_p: Float
    alive: Float
    out: Float
    lse: Float
    sums: Float  # of the row's sums, before the lse is stored


def bounds(a: Answer, precision: Precision) -> dict[str, Float]:
    """Largest error of each element of ``a.values`` that rounding under ``precision`` explains.

    Gradients are left out where the case asks for none.
    """
    u = _units(a.case.dtype, precision, a.case.dropout > 0)
    with np.errstate(all="ignore"):
        forward = _forward(a, u)
        found = {"out": forward.out, "lse": forward.lse}
        if a.case.grads:
            found |= _gradients(a, u, forward)
        return {name: np.where(np.isnan(bound), np.inf, bound) for name, bound in found.items()}


def row_errors(a: Answer, precision: Precision) -> dict[str, Float]:
    """Sums over the keys of each row, (B, Hq, Lq): errors of P ("p") and dS ("ds") in a backward, and |dS| ("size").

    What the gradients of all keys add up to is known without a reference; this is how far rounding can move such sums.
    """
    u = _units(a.case.dtype, precision, a.case.dropout > 0)
    with np.errstate(all="ignore"):
        forward = _forward(a, u)
        ds = _score_gradient_error(a, u, forward) + (u.weights + 4 * u.acc) * np.abs(a.ds) + u.weights_tiny
        sums = {"ds": (ds * a.visible).sum(-1), "size": np.abs(a.ds).sum(-1)}
        if u.renewed and not (
            u.inputs or u.exp or a.case.sinks
        ):  # whatever the scores, weights over their own sum add up to 1
            size_lse = np.minimum(np.abs(np.where(forward.alive, a.lse, 0.0)), _TRUSTED_LSE)
            n = a.case.seq_k + 8
            sums["p"] = n * (u.acc + u.weights_tiny) + 4 * u.lse * size_lse + u.weights * a.p.sum(-1) + 8 * u.acc
        else:  # the sum is the forward's, whose scores may be rounded otherwise
            p = _again(a, u, forward) + u.weights * a.p + u.weights_tiny
            sums["p"] = (p * a.visible).sum(-1)
        return {name: np.nan_to_num(part, nan=np.inf, posinf=np.inf) for name, part in sums.items()}


def _score_error(a: Answer, u: _Units) -> Float:
    """Absolute error of the scores as they enter exp, (B, Hq, Lq, Lk)."""
    case = a.case
    size = abs(case.softmax_scale) * (np.abs(a.q) @ np.abs(a.k).mT)
    e = ((case.dim_qk + 4) * u.acc + 2 * u.inputs + _scaled(case)) * size
    if case.softcap:
        # tanh is flat where it saturates; the slope at the near end of the interval covers all of it.
        t = np.maximum(np.arctanh(np.minimum(np.abs(a.tanh), 1 - 1e-16)) - e / case.softcap, 0.0)
        e = e * (1.0 / np.cosh(np.minimum(t, 300.0)) ** 2) + _CALL * u.acc * np.abs(case.softcap * a.tanh)
        e = e + _CALL * u.acc * case.softcap * 2.0**-10
    size_s = np.abs(a.s)
    top = np.max(size_s, axis=-1, initial=0.0, keepdims=True, where=a.visible)
    top = np.maximum(top, np.where(a.sink > -np.inf, np.abs(a.sink), 0.0)[..., None])
    return e + 2 * u.acc * a.added + 4 * u.acc * (size_s + top) + _CALL * u.acc + u.exp


def _scaled(case: Case) -> float:
    """What an element of 8 bits is off by, relative to its size, once it is multiplied by its scale."""
    if not case.cache:
        return 0.0
    return UNITS["float64" if case.dtype == "float64" else "float32"]


def _sink_error(a: Answer, u: _Units) -> Float:
    """Absolute error of what the sink's exp is taken of, (B, Hq, Lq)."""
    size = np.where(a.sink > -np.inf, np.abs(a.sink), 0.0) + np.abs(np.where(a.lse > -np.inf, a.lse, 0.0))
    return 4 * u.acc * size + _CALL * u.acc + u.exp


def _forward(a: Answer, u: _Units) -> _Forward:
    case = a.case
    n = case.seq_k + 8
    e = np.where(a.visible, _score_error(a, u), 0.0)
    alive = a.lse > -np.inf
    size_lse = np.abs(np.where(alive, a.lse, 0.0))
    log_p = np.where(a.visible, a.s - np.where(alive, a.lse, 0.0)[..., None], -np.inf)
    high, low = np.exp(log_p + e), np.exp(log_p - e).sum(-1)
    e_sink = _sink_error(a, u)
    more, low = a.p_sink * np.expm1(e_sink), low + a.p_sink * np.exp(-e_sink)

    # A weight is off by at most high - p, and the denominator can shrink to low; z is the dropout factor.
    abs_v, out = np.abs(a.v), np.abs(a.values["out"])
    moved = high - a.p
    spread = (moved * a.z) @ abs_v + (moved.sum(-1) + more)[..., None] * out
    spread = spread / np.maximum(np.where(alive, low, 1.0), 1e-300)[..., None]
    rounding = ((a.p * a.z) @ abs_v) * (u.weights + n * u.acc + _scaled(case))
    reach = np.max(abs_v, axis=-2, initial=0.0, keepdims=True)
    exact = spread + rounding + n * u.weights_tiny * reach * np.max(a.z, initial=1.0)
    if not case.dropout:  # whatever the weights, the output stays within the values that it averages
        exact = np.minimum(exact, (reach + out) * (1 + 2 * u.weights + n * u.acc + _scaled(case)))
    bound_out = exact * (1 + u.store) + u.store * out + u.store_tiny

    up, down = np.log(np.maximum(high.sum(-1) + a.p_sink + more, 1.0)), -np.log(np.maximum(low, 1e-300))
    sums = np.maximum(up, down) + n * u.acc
    bound_lse = sums * (1 + u.lse) + (u.lse + 2 * u.acc) * size_lse
    return _Forward(e, log_p, alive, np.where(alive[..., None], bound_out, 0.0), np.where(alive, bound_lse, 0.0), sums)


def _gradients(a: Answer, u: _Units, forward: _Forward) -> dict[str, Float]:
    case = a.case
    n, m = case.seq_k + 8, case.seq_q * case.group + 8
    abs_q, abs_k, abs_do = (np.abs(x) for x in (a.q, a.k, a.grad_out))
    pz, scale = a.p * a.z, abs(case.softmax_scale)
    ds, c = np.abs(a.ds), _score_gradient_error(a, u, forward)
    c_mask = c + (u.weights + 4 * u.acc) * ds + u.weights_tiny
    if case.softcap:
        tanh = np.abs(a.tanh)
        off = ((case.dim_qk + 4) * u.acc + 2 * u.inputs) * scale / case.softcap * (abs_q @ abs_k.mT)
        flat = np.minimum(2 * tanh * (off * (1 - tanh**2) + _CALL * u.acc) + _CALL * u.acc, 1.0)
        c, ds = (c + ds * 4 * u.acc) * np.minimum(1 - tanh**2 + flat, 1.0) + ds * flat, ds * (1 - tanh**2)
    c = np.where(a.visible, c + (u.weights + 4 * u.acc) * ds, 0.0)

    # dS may be scaled before or after it is rounded: what vanishes is not made smaller by a small scale.
    lost = max(scale, 1.0) * u.weights_tiny * a.visible
    found = {}
    if "sinks" in a.values:
        found["sinks"] = _sinks(a, u, forward)
    found["query"] = _stored((scale * (c + n * u.acc * ds) + lost) @ abs_k, np.abs(a.values["query"]), u)
    if "key" not in a.values:  # some rows of a case, whose sums over all rows are not known
        return found
    h = _again(a, u, forward)
    dv = h * a.z + (u.weights + m * u.acc) * pz + u.weights_tiny * a.visible * np.max(a.z, initial=1.0)
    for name, error, terms in (
        ("key", (scale * (c + m * u.acc * ds) + lost).mT @ abs_q, scale * ds.mT @ abs_q),
        ("value", dv.mT @ abs_do, pz.mT @ abs_do),
    ):
        rounded_heads: Any = 0.0
        if u.group and case.group > 1:  # where one of the heads overflows, so may their sum
            overflows = terms + error >= LARGEST[case.dtype]
            rounded_heads = np.where(overflows, np.inf, u.group * terms + u.store_tiny)
        found[name] = _stored(grouped(case, error + rounded_heads), np.abs(a.values[name]), u)
    if "attn_mask" in a.values and case.mask is not None:
        shape = a.values["attn_mask"].shape
        terms = math.prod(case.scores) // max(1, math.prod(shape)) + 8
        error = np.where(a.visible, c_mask, 0.0) + (u.group + terms * u.acc) * np.abs(a.ds)
        mask_units = _units(case.mask.dtype, Precision())
        found["attn_mask"] = _stored(unbroadcast(error, shape), np.abs(a.values["attn_mask"]), mask_units)
    return found


def _sinks(a: Answer, u: _Units, forward: _Forward) -> Float:
    """Error of dsinks, which is computed from the stored output and lse, in the lse's type."""
    abs_do, out = np.abs(a.grad_out), np.abs(a.values["out"])
    rows = a.case.batch * a.case.seq_q + 8
    size = (abs_do * out).sum(-1) + np.abs(a.grad_lse)
    off = (abs_do * forward.out).sum(-1) + (a.case.dim_v + 8) * u.lse * size
    e = forward.lse + 4 * u.lse * (np.where(forward.alive, np.abs(a.lse), 0.0) + _CALL)
    high = a.p_sink * np.exp(np.minimum(e, 700.0))
    error = (high - a.p_sink) * size + high * off + (rows * u.lse + TINY["float32"]) * size
    return _stored(error.sum((0, 2)), np.abs(a.values["sinks"]), _units(a.case.heads_dtype(a.case.sinks), Precision()))


def _again(a: Answer, u: _Units, forward: _Forward) -> Float:
    """Error of P as the backward computes it again, from the stored lse or from renewed sums."""
    size_lse = np.abs(np.where(forward.alive, a.lse, 0.0))
    if u.renewed:
        size_lse = np.minimum(size_lse, _TRUSTED_LSE)
    again = forward.sums + 4 * u.lse * size_lse + 4 * u.acc
    found: Float = np.exp(forward.log_p + forward.score + again[..., None]) - a.p
    return found


def _score_gradient_error(a: Answer, u: _Units, forward: _Forward) -> Float:
    """Error of dS = P (Z dP - D + dlse) before it is rounded, where D = rowsum(dO O)."""
    case = a.case
    n, nv = case.seq_k + 8, case.dim_v + 8
    h = _again(a, u, forward)
    abs_do, out = np.abs(a.grad_out), np.abs(a.values["out"])
    dp, dp_size = np.abs(a.z * a.dp), (abs_do @ np.abs(a.v).mT) * a.z
    dp_error = nv * u.acc * dp_size
    d_size = (abs_do * out).sum(-1)
    # D sees the stored output; a composite sums P * dP instead. Either is allowed.
    stored = (abs_do * forward.out).sum(-1) + nv * u.acc * d_size
    summed = (h * dp + (a.p + h) * dp_error).sum(-1) + n * u.acc * (a.p * dp_size).sum(-1)
    d_error = np.maximum(stored, summed) + u.weights * (a.p * dp).sum(-1)
    d = (a.grad_out * a.values["out"]).sum(-1) - a.grad_lse
    slope = np.abs(a.z * a.dp - d[..., None])
    arithmetic = 4 * u.acc * (dp + (d_size + np.abs(a.grad_lse))[..., None])
    moved = (h + u.weights * a.p + u.weights_tiny) * slope
    found: Float = moved + (a.p + h) * (dp_error + d_error[..., None] + arithmetic)
    return found


def _stored(error: Float, size: Float, u: _Units) -> Float:
    """The error after rounding to the storage type; one more unit for a scale or a sum in it."""
    return error * (1 + 2 * u.store) + 2 * u.store * size + u.store_tiny
