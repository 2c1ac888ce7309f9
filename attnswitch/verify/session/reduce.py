"""A failing case made smaller by trying plainer ones, for failures that Hypothesis cannot shrink.

It is for cases that were given rather than drawn, and for those that take their process with them: each try is dear, so
the bold steps come first. The order is fixed, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from attnswitch.verify.drawing.case import Case, Placing

__all__ = ["reduced"]

_PLAIN = Case()
#: Fields that are set back to their default, the most telling first.
_FEATURES = (
    *(
        "mask",
        "dropout",
        "poison",
        "window",
        "splits",
        "cache",
        "tree",
        "latent",
        "parts",
        "page",
        "query_lengths",
        "lengths",
        "softcap",
        "sinks",
        "alibi",
        "alignment",
        "causal",
    ),
    *("lse", "deterministic", "layout", "scale", "data", "library", "data_seed"),
)
_SIZES = ("batch", "heads_kv", "group", "seq_q", "dim_v", "dim_qk", "seq_k")


def reduced(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """The smallest case found in ``tries`` calls of ``fails`` that still fails; ``case`` itself is taken to."""
    refuted: set[Case] = set()

    def accepts(candidate: Case) -> bool:
        nonlocal tries
        if tries <= 0 or candidate in refuted:
            return False
        tries -= 1
        if fails(candidate):
            return True
        refuted.add(candidate)
        return False

    case = next((bold for bold in _bold(case) if bold != case and accepts(bold)), case)
    before = None
    while before != case and tries > 0:
        before = case
        for step in _STEPS:
            case = next((smaller for smaller in step(case) if smaller != case and accepts(smaller)), case)
    return case


def _bold(case: Case) -> Iterator[Case]:
    """The plainest case, with its lengths, and with one feature of ``case`` beside: most failures need no more."""
    plain = Case(dtype=case.dtype, library=case.library, check=case.check, grads=case.grads)
    yield _consistent(plain)
    plain = plain.replace(seq_q=case.seq_q, seq_k=case.seq_k)
    yield _consistent(plain)
    for name in _FEATURES:
        if getattr(case, name) != getattr(_PLAIN, name):
            feature = {name: getattr(case, name), "dropout_seed": case.dropout_seed if name == "dropout" else None}
            feature |= {"lengths": case.lengths} if name in ("page", "cache", "tree", "latent") else {}
            feature |= {"page": case.page} if name in ("cache", "tree", "latent") else {}
            feature |= {"scales": case.scales} if name == "cache" else {}
            feature |= {"lse": True} if name == "parts" else {}
            yield _consistent(plain.replace(batch=case.batch, **feature))
    yield _consistent(
        case.replace(**{name: getattr(_PLAIN, name) for name in (*_FEATURES, "placing") if name != "library"})
    )


def _without(name: str, case: Case) -> Iterator[Case]:
    """Field ``name`` at its default."""
    yield _consistent(case.replace(**{name: getattr(_PLAIN, name)}))


def _narrower(case: Case) -> Iterator[Case]:
    """A window of the position itself."""
    if case.window is not None:
        yield case.replace(window=(0, 0))


def _shorter(name: str, case: Case) -> Iterator[Case]:
    """Size ``name`` smaller, the smallest first."""
    if (case.check, name) == ("one-hot", "dim_qk"):  # with room for fewer bits the probe cannot name the key
        return
    size = getattr(case, name)
    for smaller in sorted({1, 8 if name.startswith("dim") else 2, size // 2, size // 2 + 1, size - 1}):
        if 0 < smaller < size:
            yield _consistent(case.replace(**{name: smaller}))


def _unplaced(role: str, case: Case) -> Iterator[Case]:
    """One operand lying plainly."""
    yield case.replace(placing=case.placing.replace(**{role: "contiguous"}))


_STEPS: tuple[Callable[[Case], Iterator[Case]], ...] = (
    *(partial(_without, name) for name in ("grads", "check", "placing", *_FEATURES)),
    *(partial(_shorter, name) for name in _SIZES),
    _narrower,
    *(partial(_unplaced, field.name) for field in fields(Placing)),
)


def _consistent(case: Case) -> Case:
    """What belongs together, kept together."""
    if case.page:
        plain = {"mask": None, "grads": "", "dropout": 0.0, "alignment": "bottom_right"}
        width = max(-(-case.seq_k // case.page), 1) * case.page
        case = case.replace(seq_k=width, **plain) if case.lengths else case.replace(page=0)
    if not case.page:
        case = case.replace(splits=0, cache="", tree="")
    if not case.page or case.dim_v > case.dim_qk:
        case = case.replace(latent=False)
    if not (case.lse and case.mergeable):
        case = case.replace(parts=0)
    if not case.cache:
        case = case.replace(scales="")
    if case.lengths is not None:
        lengths = (case.lengths * case.batch)[: case.batch]
        case = case.replace(lengths=tuple(min(length, case.seq_k) for length in lengths))
    if case.query_lengths is not None:
        of_each = (case.query_lengths * case.batch)[: case.batch]
        shorter = tuple(min(length, case.seq_q) for length in of_each)
        case = case.replace(query_lengths=None if case.lengths is None or case.mask else shorter)
    if case.mask is None and "m" in case.grads:
        case = case.replace(grads=case.grads.replace("m", ""))
    if not (case.causal or case.window or case.page or case.alibi):
        case = case.replace(alignment="top_left")
    if not case.dropout:
        return case.replace(dropout_seed=None)
    if case.dropout_seed is None:  # its mask is read off V = I
        case = case.replace(dim_v=max(case.seq_k, 1))
    return case
