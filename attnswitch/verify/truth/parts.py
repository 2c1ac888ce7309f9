"""How far rounding lets results be that were merged from parts of the keys, and gradients that were summed over parts.

Output and lse: the bounds of the parts by their share, and the roundings of ``merge``. Gradients: P and D come from an
output and an lse that are off by as much, and each part is stored before they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnswitch.machine.backend import Precision
from attnswitch.verify.truth import oracle
from attnswitch.verify.truth.bounds import TINY, UNITS, bounds
from attnswitch.verify.truth.oracle import Answer, Bool, Float

__all__ = ["limits"]


def limits(
    a: Answer, data: dict[str, Any], precision: Precision, keys: Sequence[Bool], rows: Sequence[Bool]
) -> dict[str, Float]:
    """Bounds of what is made of the parts ``keys``, and of gradients of keys that are summed over the parts ``rows``.

    Each part says which keys, or which rows, are in it: (B|1, Lk) and (B|1, Lq). ``data`` is what ``a`` answers.
    """
    case, u = a.case, UNITS["float64" if a.case.dtype == "float64" else "float32"]
    store, tiny = UNITS[case.dtype], TINY[case.dtype]
    found = bounds(a, precision) | _merged(a, data, precision, [part[:, None, None, :] for part in keys], u)
    if not case.grads:
        return found
    with np.errstate(all="ignore"):
        lse = np.where(np.isfinite(a.lse), np.abs(a.lse), 0.0)
        # Which lse is a part's own is told but for 4 units in the last place.
        moved = np.expm1(found["lse"] + 8 * u * np.maximum(lse, 1.0))[..., None] * a.p
        slope = np.abs(a.dp - ((a.grad_out * a.values["out"]).sum(-1) - a.grad_lse)[..., None])
        centre = (np.abs(a.grad_out) * found["out"]).sum(-1)[..., None]
        scale = abs(case.softmax_scale)
        ds, dp = scale * (moved * slope + a.p * centre), moved.mT @ np.abs(a.grad_out)
        added = {
            "query": ds @ np.abs(a.k),
            "key": oracle.grouped(case, ds.mT @ np.abs(a.q)),
            "value": oracle.grouped(case, dp),
        }
        sizes = _sizes(a, [part[:, None, None, :] for part in keys], [part[:, None, :, None] for part in rows])
        for name in added.keys() & found.keys():
            error = found[name] + added[name]
            found[name] = error * (1 + 2 * store) + 2 * store * sizes[name] + 16 * tiny
        if "sinks" in found:
            of_row = (a.grad_out * a.values["out"]).sum(-1) - a.grad_lse
            found["sinks"] += (a.p_sink * (np.expm1(found["lse"]) * np.abs(of_row) + centre[..., 0])).sum((0, 2))
        return {name: np.where(np.isnan(bound), np.inf, bound) for name, bound in found.items()}


def _merged(a: Answer, data: dict[str, Any], precision: Precision, keys: Sequence[Bool], u: float) -> dict[str, Float]:
    with np.errstate(all="ignore"):
        alive, roundings = np.isfinite(a.lse), (2 * len(keys) + 16) * u
        top, drift = np.where(alive, a.lse, 0.0), np.zeros(a.lse.shape)
        reach, size = np.zeros(a.values["out"].shape), np.zeros(a.values["out"].shape)
        for part in keys:
            worst = np.zeros(reach.shape)
            for sinks in dict.fromkeys(("", a.case.sinks)):  # any of the parts may have them
                answer = _part(a, data, part, sinks)
                limit = bounds(answer, precision)
                share = np.exp(answer.lse - top)[..., None]
                worst = np.maximum(worst, np.where(share > 0, share * limit["out"], 0.0))
                drift = np.maximum(drift, np.where(np.isfinite(answer.lse), limit["lse"], 0.0))
            reach += worst
            size += share * np.abs(answer.values["out"])  # with the sinks or without
        lse = np.where(alive, drift + roundings + 2 * u * np.abs(top), 0.0)
        store = UNITS[a.case.dtype]
        out = reach * (1 + 2 * store) + (np.expm1(drift + lse)[..., None] + roundings) * size
        out = out + store * np.abs(a.values["out"]) + TINY[a.case.dtype]
        return {"out": np.where(alive[..., None], out, 0.0), "lse": lse}


def _part(a: Answer, data: dict[str, Any], keys: Bool, sinks: str) -> Answer:
    """The answer of some keys alone, with the sinks or without."""
    case = a.case
    added = case.mask is not None and case.mask.dtype != "bool"
    case = case.replace(
        causal=False,
        window=None,
        alignment="top_left",
        lengths=None,
        query_lengths=None,
        mask=case.mask if added else None,
        sinks=sinks,
        grads="",
    )
    data = {role: values for role, values in data.items() if role != "attn_mask" or added}
    return oracle.answer(case, data, visible=a.visible & keys)


def _sizes(a: Answer, keys: Sequence[Bool], rows: Sequence[Bool]) -> dict[str, Float]:
    """Absolute gradients of the parts, summed: what storing each rounds."""
    scale = abs(a.case.softmax_scale)
    return {
        "query": sum(scale * np.abs((a.ds * part) @ a.k) for part in keys),
        "key": sum(np.abs(oracle.grouped(a.case, scale * (a.ds * part).mT @ a.q)) for part in rows),
        "value": sum(np.abs(oracle.grouped(a.case, (a.p * part).mT @ a.grad_out)) for part in rows),
    }
