"""The float64 answer to a case, dense: everything at once as arrays (B, Hq, Lq, Lk), for the error bounds to use.

``attnswitch.verify.truth.rows`` answers again, row by row and without this file, so that no mistake is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnswitch.verify.drawing.case import Case

__all__ = ["Answer", "answer", "distances"]

#: NumPy arrays of float64 and bool. NumPy types its operators as unions that no expression below could use.
Float = Any
Bool = Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Exact results and the quantities they came from. Shapes as in ``Problem``; key heads are repeated in k and v.

    ``values`` maps "out", "lse" and the gradients ("query", "key", "value", "attn_mask", "sinks") to arrays computed as
    if NaN and inf in the inputs were 0; ``poisoned`` says where a visible NaN or inf makes the true element not finite.
    """

    case: Case
    q: Float
    k: Float
    v: Float
    grad_out: Float
    grad_lse: Float
    #: The size of what is added to the scores: mask and alibi.
    added: Float
    visible: Bool
    tanh: Float
    s: Float
    p: Float
    z: Float
    lse: Float
    #: The score and the weight of the sink in each row, (B, Hq, Lq); -inf and 0 where there is none.
    sink: Float
    p_sink: Float
    dp: Float
    ds: Float
    values: dict[str, Float]
    poisoned: dict[str, Bool] = field(default_factory=dict)


def distances(case: Case, at: tuple[int, int, Any] | None = None) -> Any:
    """How far each key stands after each query, (1 or B, 1, Lq, Lk); or (1, 1, rows, Lk) ``at`` some rows of one."""
    lengths, queries = (
        np.full(case.batch, most) if given is None else np.array(given, dtype=np.int64)
        for given, most in ((case.lengths, case.seq_k), (case.query_lengths, case.seq_q))
    )
    rows = np.arange(case.seq_q)
    if at is not None:
        b, _, rows = at
        lengths, queries = lengths[b : b + 1], queries[b : b + 1]
    distance = np.arange(case.seq_k)[None, None, None, :] - rows[None, None, :, None]
    return distance - (lengths - queries).reshape(-1, 1, 1, 1) if case.alignment == "bottom_right" else distance


def sink_scores(case: Case, data: dict[str, Any]) -> Any:
    """The score of the sink in each row, (B, Hq, Lq): -inf where there is none, as in rows past those of a sequence."""
    scores = np.zeros(case.scores[:3]) + (data["sinks"][:, None] if case.sinks else -np.inf)
    for b, queries in enumerate(case.query_lengths or ()):
        scores[b, :, queries:] = -np.inf
    return scores


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
    distance = distances(case, at)
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


def answer(
    case: Case,
    data: dict[str, Any],
    keep: Bool | None = None,
    visible: Bool | None = None,
    distance: Any = None,
    scores: Any = None,
) -> Answer:
    """The answer to ``case`` on ``data``; ``keep`` is the dropout mask, needed if the case has dropout.

    ``visible`` given stands for all that hides, ``distance`` for where keys and queries stand, and ``scores`` are those
    of the sinks: then ``case`` is one batch entry, one head and some rows of another.
    """
    with np.errstate(all="ignore"):
        distance = distances(case) if distance is None else distance
        return _answer(case, data, keep, visible, distance, sink_scores(case, data) if scores is None else scores)


def _answer(
    case: Case, data: dict[str, Any], keep: Bool | None, visible: Bool | None, distance: Any, sink: Float
) -> Answer:
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
    if case.alibi:
        bias = -data["alibi_slopes"][:, :, None, None] * np.abs(distance)
        s, added = s + bias, added + 2 * np.abs(bias)
    if mask is not None and mask.dtype != np.bool_:
        smooth = np.where(visible, np.broadcast_to(mask, s.shape), 0.0)
        s, added = s + smooth, added + np.abs(smooth)
    alive = visible.any(-1) | (sink > -np.inf)
    top = np.max(np.where(visible, s, -np.inf), axis=-1, initial=-np.inf, keepdims=True)
    top = np.where(alive[..., None], np.maximum(top, sink[..., None]), 0.0)
    weights = np.where(visible, np.exp(np.where(visible, s - top, -np.inf)), 0.0)
    of_sink = np.exp(sink[..., None] - top)
    total = weights.sum(-1, keepdims=True) + of_sink
    p_sink = (of_sink / np.where(alive[..., None], total, 1.0))[..., 0]
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
    if case.sinks:
        values["sinks"] = -(p_sink * centre).sum((0, 2))
    poisoned = _poisoned(
        case, visible, bad_k, bad_v, ~np.isfinite(np.repeat(data["value"], case.group, axis=1)), values
    )
    return Answer(case, q, k, v, do, dlse, added, visible, tanh, s, p, z, lse, sink, p_sink, dp, ds, values, poisoned)


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
    if "sinks" in values:
        found["sinks"] = rows.any((0, 2))
    if "attn_mask" in values:
        found["attn_mask"] = unbroadcast((visible & rows[..., None]).astype(np.float64), values["attn_mask"].shape) > 0
    return found
