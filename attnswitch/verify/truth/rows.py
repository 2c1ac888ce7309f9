"""The float64 answer again, independently: one row at a time, over the list of the keys that it sees.

Written from the contract with plain loops and none of ``oracle``'s code; the two are compared on every case.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnswitch.errors import VerificationError
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.truth.oracle import Answer, Float

__all__ = ["check_row", "cross_check"]


#: Rows looked at in one case; all of them if there are no more.
SAMPLE = 6
#: Relative disagreement that float64 rounding of either form can explain at these sizes.
AGREEMENT = 1e-9


def sees(case: Case, mask: Any, b: int, h: int, i: int, j: int) -> bool:
    """Whether query i of batch b, head h sees key j."""
    length = case.seq_k if case.lengths is None else case.lengths[b]
    if j >= length:
        return False
    queries = case.seq_q if case.query_lengths is None else case.query_lengths[b]
    if i >= queries:
        return False
    place = i if case.alignment == "top_left" else i + length - queries
    if case.causal and j > place:
        return False
    if case.window is not None:
        left, right = case.window
        if left is not None and j < place - left:
            return False
        if right is not None and j > place + right:
            return False
    if mask is not None:
        element = mask[tuple(n if size > 1 else 0 for n, size in zip((b, h, i, j), mask.shape, strict=True))]
        return bool(element) if mask.dtype == np.bool_ else element != -math.inf
    return True


def row(case: Case, data: dict[str, Any], z: Float, b: int, h: int, i: int) -> dict[str, Any]:
    """Output, lse and query gradient of one row, and what it adds to the gradients of the keys it sees.

    ``z`` (Lk,) is the row's dropout factor.
    """
    mask = data.get("attn_mask")
    g = h // case.group
    exists = case.query_lengths is None or i < case.query_lengths[b]
    sink = float(data["sinks"][h]) if case.sinks and exists else -math.inf
    keys = [j for j in range(case.seq_k) if sees(case, mask, b, h, i, j)]
    q, do, dlse = data["query"][b, h, i], data["grad_out"][b, h, i], float(data["grad_lse"][b, h, i])
    if not keys:
        alone = {"out": np.zeros(case.dim_v), "lse": sink, "query": np.zeros(case.dim_qk), "keys": keys}
        return alone | {"sinks": dlse if sink > -math.inf else 0.0}
    k, v = data["key"][b, g][keys], data["value"][b, g][keys]
    raw = case.softmax_scale * (k @ q)
    slope = np.ones_like(raw)
    logits = raw
    if case.softcap:
        logits = case.softcap * np.tanh(raw / case.softcap)
        slope = 1.0 / np.cosh(np.clip(raw / case.softcap, -300.0, 300.0)) ** 2
    if case.alibi:
        slopes, length = data["alibi_slopes"], case.seq_k if case.lengths is None else case.lengths[b]
        queries = case.seq_q if case.query_lengths is None else case.query_lengths[b]
        place = i if case.alignment == "top_left" else i + length - queries
        logits = logits - float(slopes[b if len(slopes) > 1 else 0, h]) * np.array([abs(place - j) for j in keys])
    if mask is not None and mask.dtype != np.bool_:
        wide = np.broadcast_to(mask, case.scores)[b, h, i][keys]
        logits = logits + wide
    every = np.append(logits, sink)  # one more key, of value 0
    lse = float(np.max(every)) + math.log(math.fsum(np.exp(every - np.max(every))))
    shares = np.exp(every - lse)
    shares = shares / math.fsum(shares)
    p, p_sink = shares[:-1], float(shares[-1])
    # Jacobian of the softmax, written out: dS = (diag(p) - p p^T) dP + p dlse.
    dp = z[keys] * (v @ do)
    ds = p * dp - p * float(p @ dp) + p * dlse
    return {
        "out": (p * z[keys]) @ v,
        "lse": lse,
        "query": case.softmax_scale * ((ds * slope) @ k),
        "key": case.softmax_scale * np.outer(ds * slope, q),
        "value": np.outer(p * z[keys], do),
        "sinks": p_sink * (dlse - float(p @ dp)),
        "scores": ds,
        "keys": keys,
    }


def cross_check(data: dict[str, Any], answer: Answer) -> None:
    """Hold ``answer`` against this form, on sampled rows, and on all where they are few (key gradients then too).

    Raises ``VerificationError`` if they disagree: one of the references is wrong, and no verdict may be given.
    """
    case = answer.case
    if answer.poisoned:
        return  # the loops would meet the NaN itself; the same positions are checked without poison
    places = list(np.ndindex(case.batch, case.heads_q, case.seq_q))
    every = len(places) <= SAMPLE
    chosen = places if every else [places[n * (len(places) - 1) // (SAMPLE - 1)] for n in range(SAMPLE)]
    sums = {name: np.zeros_like(answer.values[name]) for name in ("key", "value")}
    size = {name: np.zeros_like(answer.values[name]) for name in ("key", "value")}
    scores, by_sinks = np.zeros(case.scores), np.zeros(case.heads_q)
    agree = _Agreement(answer, case)
    with np.errstate(all="ignore"):
        for b, h, i in chosen:
            found = row(case, data, answer.z[b, h, i], b, h, i)
            for name in ("out", "lse", "query"):
                agree(name, (b, h, i), answer.values[name][b, h, i], found[name])
            for name in ("key", "value") if found["keys"] else ():
                sums[name][b, h // case.group, found["keys"]] += found[name]
                size[name][b, h // case.group, found["keys"]] += np.abs(found[name])
            by_sinks[h] += found["sinks"]
            if found["keys"]:
                scores[b, h, i, found["keys"]] = found["scores"]
    if every:
        for name in ("key", "value"):
            agree(name, (), answer.values[name], sums[name], float(np.max(size[name], initial=0.0)))
        if "sinks" in answer.values:
            agree("sinks", (), answer.values["sinks"], by_sinks)
        if "attn_mask" in answer.values:
            mask = answer.values["attn_mask"]
            axes = tuple(axis for axis, length in enumerate(mask.shape) if length == 1)
            terms = float(np.max(np.abs(scores).sum(axes), initial=0.0))
            agree("attn_mask", (), mask, scores.sum(axes, keepdims=True), terms)


def check_row(case: Case, data: dict[str, Any], some: Answer, at: tuple[int, int, int], n: tuple[int, int]) -> None:
    """Hold a row of ``some``, ``n`` being its head and its row, against this form of the row ``at`` of ``case``.

    ``some`` is the answer to a few rows of ``case``.

    Raises ``VerificationError`` if they disagree.
    """
    if some.poisoned:
        return
    agree = _Agreement(some, case)
    with np.errstate(all="ignore"):
        found = row(case, data, some.z[0][n], *at)
        for name in ("out", "lse", "query"):
            agree(name, at, some.values[name][0][n], found[name])


class _Agreement:
    """Whether two float64 results are as close as rounding leaves them, at the sizes of one answer to ``case``."""

    def __init__(self, answer: Answer, case: Case) -> None:
        self.case = case
        scores = float(np.max(np.abs(answer.s), initial=0.0, where=answer.visible))
        operands = max(float(np.max(np.abs(x), initial=0.0)) for x in (answer.q, answer.k, answer.v))
        upstream = float(np.max(np.abs(answer.grad_out), initial=0.0))
        # Scores lose digits as they grow; a gradient loses them against its terms, not against their sum.
        self.growth = 1.0 + scores
        self.terms = max(upstream * operands * max(abs(self.case.softmax_scale), 1.0), 1.0)

    def __call__(self, name: str, where: tuple[int, ...], dense: Any, loops: Any, terms: float = 0.0) -> None:
        dense, loops = np.asarray(dense), np.asarray(loops)
        terms = max(terms, self.terms, float(np.max(np.abs(loops), initial=0.0, where=np.isfinite(loops))))
        same = (dense == loops) | (np.abs(dense - loops) <= AGREEMENT * self.growth * terms)
        if not same.all():
            raise VerificationError(
                f"the two float64 references disagree on {name} at {where} of case {self.case}:"
                f" {dense[~same][:3]} and {loops[~same][:3]}; no verdict can be given"
            )
