"""The float64 answer to a case, dense: everything at once as arrays (B, Hq, Lq, Lk), for the error bounds to use.

``attnswitch.verify.truth.rows`` answers again, row by row and without this file, so that no mistake is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnswitch.verify.drawing.case import Case

__all__ = ["Answer", "answer"]

#: NumPy arrays of float64 and bool. NumPy types its operators as unions that no expression below could use.
Float = Any
Bool = Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Exact results and the quantities they came from. Shapes as in ``Problem``; key heads are repeated in k and v.

    ``values`` maps "out", "lse" and the gradients "query", "key", "value", "attn_mask" to arrays computed as if NaN and
    inf in the inputs were 0; ``poisoned`` says where a visible NaN or inf makes the true element not finite.
    """

    case: Case
    q: Float
    k: Float
    v: Float
    grad_out: Float
    grad_lse: Float
    mask: Float
    visible: Bool
    tanh: Float
    s: Float
    p: Float
    z: Float
    lse: Float
    dp: Float
    ds: Float
    values: dict[str, Float]
    poisoned: dict[str, Bool] = field(default_factory=dict)


def visible_positions(case: Case, mask: Any, at: tuple[int, int, Any] | None = None) -> Bool:
    """Which key each query sees, (B, Hq, Lq, Lk); or (1, 1, rows, Lk) ``at`` one batch entry, head and some rows."""
    lq, lk = case.seq_q, case.seq_k
    lengths, queries = (
        np.full(case.batch, most) if given is None else np.array(given, dtype=np.int64)
        for given, most in ((case.lengths, lk), (case.query_lengths, lq))
    )
    rows, shape = np.arange(lq), case.scores
    if at is not None:
        b, h, rows = at
        lengths, queries, shape = lengths[b : b + 1], queries[b : b + 1], (1, 1, len(rows), lk)
        mask = None if mask is None else mask_rows(mask, b, h, rows)
    lengths, queries = (x.reshape(-1, 1, 1, 1) for x in (lengths, queries))
    distance = np.arange(lk)[None, None, None, :] - rows[None, None, :, None]
    if case.alignment == "bottom_right":
        distance = distance - (lengths - queries)
    visible = (np.arange(lk) < lengths) & (rows[:, None] < queries)
    if case.causal:
        visible = visible & (distance <= 0)
    if case.window is not None:
        left, right = case.window
        if left is not None:
            visible = visible & (distance >= -left)
        if right is not None:
            visible = visible & (distance <= right)
    if mask is not None:
        visible = visible & (mask if mask.dtype == np.bool_ else mask != -np.inf)
    return np.broadcast_to(visible, shape)


def mask_rows(mask: Any, b: int, h: int, rows: Any) -> Any:
    """The part (1, 1, rows, Lk or 1) of a mask with four axes for one batch entry, head and some rows."""
    b, h = min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)
    part = mask[b : b + 1, h : h + 1]
    return part if mask.shape[2] == 1 else part[:, :, rows]


def answer(case: Case, data: dict[str, Any], keep: Bool | None = None, visible: Bool | None = None) -> Answer:
    """The answer to ``case`` on ``data``; ``keep`` is the dropout mask, needed if the case has dropout.

    ``visible`` given stands for all that hides: then ``case`` is one batch entry, one head and some rows of another.
    """
    with np.errstate(all="ignore"):
        return _answer(case, data, keep, visible)


def _answer(case: Case, data: dict[str, Any], keep: Bool | None, visible: Bool | None) -> Answer:
    q = data["query"]
    k, v = (np.repeat(data[role], case.group, axis=1) for role in ("key", "value"))
    bad_k, bad_v = (~np.isfinite(x).all(-1) for x in (k, v))
    k, v = (np.where(np.isfinite(x), x, 0.0) for x in (k, v))
    mask = data.get("attn_mask")
    if visible is None:
        visible = visible_positions(case, mask)

    s = case.softmax_scale * (q @ k.mT)
    tanh = np.tanh(s / case.softcap) if case.softcap else np.zeros_like(s)
    s = case.softcap * tanh if case.softcap else s
    added = np.zeros_like(s)
    if mask is not None and mask.dtype != np.bool_:
        added = np.where(visible, np.broadcast_to(mask, s.shape), 0.0)
        s = s + added
    alive = visible.any(-1)
    top = np.max(np.where(visible, s, -np.inf), axis=-1, initial=-np.inf, keepdims=True)
    top = np.where(alive[..., None], top, 0.0)
    weights = np.where(visible, np.exp(np.where(visible, s - top, -np.inf)), 0.0)
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(alive[..., None], total, 1.0)
    lse = np.where(alive, top[..., 0] + np.log(np.where(alive[..., None], total, 1.0))[..., 0], -np.inf)

    z = np.ones_like(p) if keep is None else keep / max(1.0 - case.dropout, 1e-300)  # p = 1 keeps none
    out = (p * z) @ v
    do, dlse = data["grad_out"], data["grad_lse"]
    dp = do @ v.mT
    centre = (do * out).sum(-1) - dlse
    ds = p * (z * dp - centre[..., None])
    raw = ds * (1.0 - tanh**2) if case.softcap else ds
    dq = case.softmax_scale * (raw @ k)
    dk = case.softmax_scale * (raw.mT @ q)
    dv = (p * z).mT @ do
    values = {"out": out, "lse": lse, "query": dq, "key": grouped(case, dk), "value": grouped(case, dv)}
    if mask is not None and mask.dtype != np.bool_:
        values["attn_mask"] = unbroadcast(ds, mask.shape)
    poisoned = _poisoned(
        case, visible, bad_k, bad_v, ~np.isfinite(np.repeat(data["value"], case.group, axis=1)), values
    )
    return Answer(case, q, k, v, do, dlse, added, visible, tanh, s, p, z, lse, dp, ds, values, poisoned)


def grouped(case: Case, x: Float) -> Float:
    """Gradients of repeated key heads summed back to (B, Hkv, Lk, D)."""
    b, _, length, d = x.shape
    return x.reshape(b, case.heads_kv, case.group, length, d).sum(2)


def unbroadcast(x: Float, shape: tuple[int, ...]) -> Float:
    """``x`` (B, Hq, Lq, Lk) summed over the axes that have length 1 in ``shape``."""
    axes = tuple(axis for axis in range(4) if shape[axis] == 1 != x.shape[axis])
    return x.sum(axes, keepdims=True)


def _poisoned(
    case: Case, visible: Bool, bad_k: Bool, bad_v: Bool, bad_elements: Bool, values: dict[str, Float]
) -> dict[str, Bool]:
    """Where a NaN or inf among the keys and values must show, by reaching each result through visible positions."""
    if not (bad_k.any() or bad_v.any()):
        return {}
    rows_k = (visible & bad_k[:, :, None, :]).any(-1)
    rows = rows_k | (visible & bad_v[:, :, None, :]).any(-1)
    seen = visible.astype(np.float64)
    out = (seen @ bad_elements.astype(np.float64)) > 0
    keys_k, keys = ((visible & rows_[..., None]).any(2) for rows_ in (rows_k, rows))

    def spread(x: Bool, like: Float) -> Bool:
        return np.broadcast_to(x[..., None], (*x.shape, like.shape[-1]))

    found = {
        "out": out | rows_k[..., None],
        "lse": rows_k,
        "query": spread(rows, values["query"]),
        "key": grouped(case, spread(keys, values["key"]).astype(np.float64)) > 0,
        "value": grouped(case, spread(keys_k, values["value"]).astype(np.float64)) > 0,
    }
    if "attn_mask" in values:
        found["attn_mask"] = unbroadcast((visible & rows[..., None]).astype(np.float64), values["attn_mask"].shape) > 0
    return found
