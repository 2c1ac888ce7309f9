"""Cases without what no backend of a run takes (``Backend.lacks``): else most draws would be refused.

A case is changed after it was drawn, so that it makes the same choices as ever, and shrinks alike.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from attnswitch.verify.drawing.case import Case

__all__ = ["without"]

#: What a case has in place of a feature that is lacking.
_PLAIN: dict[str, dict[str, Any]] = {
    "causal": {"causal": False},
    "deterministic": {"deterministic": False},
    "dropout": {"dropout": 0.0, "dropout_seed": None},
    "grads": {"grads": ""},
    "group": {"group": 1},
    "lse": {"lse": False},
    "mask": {"mask": None},
    "nonfinite": {"poison": False},
    "scale": {"scale": None},
    "sinks": {"sinks": ""},
    "alibi": {"alibi": ""},
    "softcap": {"softcap": 0.0},
    "splits": {"splits": 0},
    "window": {"window": None},
    "cache": {"cache": "", "scales": ""},
    "tree": {"tree": ""},
}
#: Rows of a page, the first that divide the room for keys.
_PAGES = (16, 4, 1)


def without(case: Case, lacks: Collection[str]) -> Case:
    """``case`` without the features that ``lacks`` names."""
    if not lacks:
        return case
    changes: dict[str, Any] = {}
    for name, plain in _PLAIN.items():
        changes |= plain if name in lacks else {}
    if "seeded" in lacks and case.dropout_seed is not None:
        changes |= _PLAIN["dropout"]
    if "key_lengths" in lacks and not (case.varlen or case.page):
        changes["lengths"] = None
    case = case.replace(**changes)
    if "empty" in lacks:
        case = _filled(case)
    if case.grads and case.lse and "lse_grads" in lacks:
        case = case.replace(lse=False)
    if "dense" in lacks and not (case.varlen or case.page):
        case = _packed(case)
    if "unpaged" in lacks and not case.page and case.seq_k:
        case = _paged(case)
    if case.page and case.varlen and "packed" in lacks:
        case = case.replace(query_lengths=None)
    if case.mask is not None and "masked_causal" in lacks:
        case = case.replace(causal=False)
    if case.parts and not (case.lse and case.mergeable):
        case = case.replace(parts=0)
    return _aligned(_masked(case, lacks), lacks)


def _filled(case: Case) -> Case:
    """With one of everything that there is none of."""
    lengths, queries = (
        None if given is None else tuple(max(1, n) for n in given) or (1,)
        for given in (case.lengths, case.query_lengths)
    )
    batch, lq, lk = (max(1, n) for n in (case.batch, case.seq_q, case.seq_k))
    return case.replace(batch=batch, seq_q=lq, seq_k=max(lk, case.page), lengths=lengths, query_lengths=queries)


def _masked(case: Case, lacks: Collection[str]) -> Case:
    """With a float mask of the operands' type, if any other is lacking; and no gradient of one that is gone."""
    mask = case.mask
    if mask is not None and mask.dtype == "bool" and "bool" in lacks:
        case = case.replace(mask=replace(mask, dtype=case.dtype, kind="smooth"))
    if mask is not None and mask.dtype != "bool" and "mixed" in lacks:
        kind = "minus-1e4" if (mask.kind, case.dtype) == ("minus-1e9", "float16") else mask.kind
        case = case.replace(mask=replace(mask, dtype=case.dtype, kind=kind))
    return case if mask is not None else case.replace(grads=case.grads.replace("m", ""))


def _aligned(case: Case, lacks: Collection[str]) -> Case:
    """With positions that count from the other corner, or one where both are the same, if neither is known."""
    if case.page:
        return case
    positional = case.causal or case.window is not None or bool(case.alibi)
    if "top_left" in lacks and "bottom_right" in lacks:
        if not positional or case.varlen or case.lengths or case.unseeded:
            return case
        length = min(case.seq_q, case.seq_k)
        return case.replace(seq_q=length, seq_k=length, alignment="top_left")
    if "bottom_right" in lacks:
        return case.replace(alignment="top_left")
    return case.replace(alignment="bottom_right") if "top_left" in lacks and positional else case


def _packed(case: Case) -> Case:
    """The same as sequences without padding, as many queries in each."""
    return case.replace(
        query_lengths=(case.seq_q,) * case.batch,
        lengths=case.lengths or (case.seq_k,) * case.batch,
        mask=None,
        layout="BHLD",
        **(_PLAIN["dropout"] if case.unseeded else {}),
    )


def _paged(case: Case) -> Case:
    """The same of keys in pages."""
    return case.replace(
        page=next(rows for rows in _PAGES if case.seq_k % rows == 0),
        lengths=case.lengths or (case.seq_k,) * case.batch,
        alignment="bottom_right",
        mask=None,
        grads="",
        layout="BHLD",
        **_PLAIN["dropout"],
    )
