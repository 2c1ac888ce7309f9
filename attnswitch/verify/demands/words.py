"""The features of a problem that a requirement may name, in the words of a problem's text form.

    causal  causal-br        from the top left, from the bottom right; where both are the same, either
    bottom-right             alignment of a window or of alibi that is not causal
    gqa  mqa                 query heads share key heads; share one
    window  softcap  scale   a window, a softcap, a scale of the caller's
    mask=bool  mask=float    an attn_mask; a float one is added
    lengths                  key_lengths
    dropout  seeded          dropout_p, whose mask the backend draws; with a seed of the caller's
    sinks  alibi             sinks, and slopes of ALiBi
    cache=fp8e4m3 (or fp8e5m2, int8)   pages stored in 8 bits
    splits                   num_splits
    tree                     tree_mask, with page
    latent (or mla)          values that are the first columns of the keys of a cache, in the same memory
    parts                    keys in parts: a call for each, merged, gradients by the output and lse of the whole
    lse                      the lse is returned as well
    grad  grad=m             gradients of query, key and value, or some of them; of a float mask besides
    deterministic            the same bits every time
    nonfinite                NaN and inf among keys and values
    strided                  operands that do not lie contiguously
    turned                   operands that run backwards in memory, which torch's cannot
    empty                    no batch, query or key, or a sequence without some

and the forms of a call, of which a case has one, or packed queries over a cache in pages both:

    dense  varlen  page      operands (B, H, L, D); sequences without padding; a cache in pages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from attnswitch.problem import CACHES
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.placings import TURNED

__all__ = ["ALIASES", "FEATURES", "FORMS", "covered", "forms"]

FORMS = ("dense", "varlen", "page")
#: Other spellings.
ALIASES = {"grads": "grad", "backward": "grad", "paged": "page", "packed": "varlen", "key_lengths": "lengths"}
ALIASES |= {"mla": "latent", "merge": "parts"}


def forms(case: Case) -> set[str]:
    """The forms of the call of ``case``."""
    return {name for name, has in (("varlen", case.varlen), ("page", case.page > 0)) if has} or {"dense"}


def _either(case: Case) -> bool:
    """Whether causal means the same from either corner: each sequence has as many queries as keys, or is a cache's."""
    if case.page:
        return True
    return case.query_lengths == case.lengths if case.varlen else case.seq_q == case.seq_k and case.lengths is None


def _empty(case: Case) -> bool:
    return 0 in (case.batch, case.seq_q, case.seq_k, *(case.lengths or ()), *(case.query_lengths or ()))


def _placed(case: Case) -> set[str]:
    """The ways in which its operands lie."""
    return {*asdict(case.placing).values()}


#: What a case must be for each word to say something of it.
FEATURES: dict[str, Callable[[Case], bool]] = {
    "causal": lambda c: c.causal and (_either(c) or c.alignment == "top_left"),
    "causal-br": lambda c: c.causal and (_either(c) or c.alignment == "bottom_right"),
    "bottom-right": lambda c: (
        c.alignment == "bottom_right" and not (c.causal or _either(c)) and bool(c.window is not None or c.alibi)
    ),
    "gqa": lambda c: c.group > 1,
    "mqa": lambda c: c.group > 1 and c.heads_kv == 1,
    "window": lambda c: c.window is not None,
    "softcap": lambda c: c.softcap > 0,
    "scale": lambda c: c.scale is not None,
    "mask=bool": lambda c: c.mask is not None and c.mask.dtype == "bool",
    "mask=float": lambda c: c.mask is not None and c.mask.dtype != "bool",
    "lengths": lambda c: c.lengths is not None and forms(c) == {"dense"},
    "dropout": lambda c: c.unseeded,
    "seeded": lambda c: c.dropout > 0 and not c.unseeded,
    "sinks": lambda c: bool(c.sinks),
    "alibi": lambda c: bool(c.alibi),
    **{
        f"cache={short}": lambda c, long=long: c.cache == long  # type: ignore[misc]
        for short, long in zip(("fp8e4m3", "fp8e5m2", "int8"), CACHES, strict=True)
    },
    "splits": lambda c: c.splits > 0,
    "tree": lambda c: bool(c.tree),
    "latent": lambda c: c.latent,
    "parts": lambda c: c.parts > 0,
    "lse": lambda c: c.lse and not c.parts,  # whose calls have to return it
    "grad": lambda c: bool(set(c.grads) & set("qkv")),
    "grad=m": lambda c: "m" in c.grads,
    "deterministic": lambda c: c.deterministic,
    "nonfinite": lambda c: c.poison,
    "strided": lambda c: bool(_placed(c) - {"contiguous", *TURNED}) or c.layout != "BHLD",
    "turned": lambda c: bool(_placed(c) & {*TURNED}),
    "empty": _empty,
}
#: Features of which a case that has one has others too: naming any of them is enough.
_ALIKE = (("causal", "causal-br"), ("gqa", "mqa"))


def covered(case: Case, named: frozenset[str]) -> bool:
    """Whether ``named`` says all that ``case`` is beyond a plain problem."""
    has = {word for word, holds in FEATURES.items() if holds(case)}
    for alike in _ALIKE:
        if has & named & {*alike}:
            has -= {*alike}
    form = named & {*FORMS} or {"dense"}
    return has <= named and forms(case) <= form
