"""A failing case made smaller by trying plainer ones, for failures that Hypothesis cannot shrink.

It is for cases that were given rather than drawn, and for those that take their process with them: each try is dear, so
the bold steps come first. The order is fixed, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from attnswitch.verify.drawing.case import Case, Placing

__all__ = ["reduced"]

_PLAIN = Case()
#: Fields that are set back to their default, the most telling first.
_FEATURES = (
    *("mask", "dropout", "poison", "window", "lengths", "softcap", "alignment", "causal", "lse", "deterministic"),
    *("layout", "scale", "data", "library", "data_seed"),
)
_SIZES = ("batch", "heads_kv", "group", "seq_q", "dim_v", "dim_qk", "seq_k")


def reduced(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """The smallest case found in ``tries`` calls of ``fails`` that still fails; ``case`` itself is taken to."""
    for bold in _bold(case):
        if tries > 0 and bold != case:
            tries -= 1
            if fails(bold):
                case = bold
                break
    moved = True
    while moved and tries > 0:
        moved = False
        for smaller in _smaller(case):
            if smaller == case:
                continue
            if tries <= 0:
                break
            tries -= 1
            if fails(smaller):
                case, moved = smaller, True
                break
    return case


def _bold(case: Case) -> Iterator[Case]:
    """The plainest case with one feature of ``case``, or with its lengths: most failures need no more."""
    plain = Case(dtype=case.dtype, library=case.library, check=case.check, grads=case.grads)
    yield plain
    yield plain.replace(seq_q=case.seq_q, seq_k=case.seq_k)
    for name in _FEATURES:
        if getattr(case, name) != getattr(_PLAIN, name):
            yield _consistent(plain.replace(**{name: getattr(case, name)}))
    yield case.replace(**{name: getattr(plain, name) for name in (*_FEATURES, "placing") if name != "library"})


def _smaller(case: Case) -> Iterator[Case]:
    for name in ("grads", "check"):
        if getattr(case, name) != getattr(_PLAIN, name):
            yield case.replace(**{name: getattr(_PLAIN, name)})
    if case.placing != Placing():
        yield case.replace(placing=Placing())
    for name in _FEATURES:
        if getattr(case, name) != getattr(_PLAIN, name):
            yield _consistent(case.replace(**{name: getattr(_PLAIN, name)}))
    for name in _SIZES:
        size = getattr(case, name)
        for smaller in sorted({1, 8 if name.startswith("dim") else 2, size // 2, size // 2 + 1, size - 1}):
            if 0 < smaller < size:
                yield _consistent(case.replace(**{name: smaller}))
    if case.placing != Placing():
        for role in (field.name for field in fields(Placing)):
            if getattr(case.placing, role) != "contiguous":
                yield case.replace(placing=case.placing.replace(**{role: "contiguous"}))


def _consistent(case: Case) -> Case:
    """What belongs together, kept together."""
    if case.lengths is not None:
        lengths = (case.lengths * case.batch)[: case.batch]
        case = case.replace(lengths=tuple(min(length, case.seq_k) for length in lengths))
    if case.mask is None and "m" in case.grads:
        case = case.replace(grads=case.grads.replace("m", ""))
    if not (case.causal or case.window):
        case = case.replace(alignment="top_left")
    if case.dropout and case.dropout_seed is None:  # its mask is read off V = I
        case = case.replace(dim_v=max(case.seq_k, 1))
    return case
