"""Partial results to the whole: attention over keys that were dealt among several calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts, Intercepted
from attnswitch.call.describe import check_beside
from attnswitch.call.entry import is_traced
from attnswitch.call.options import LAYOUTS
from attnswitch.errors import InvalidProblem
from attnswitch.machine.inputs import heads_last
from attnswitch.names import one_of
from attnswitch.problem import DTYPES

__all__ = ["merge"]


def merge(outs: Sequence[Array], lses: Sequence[Array], *, layout: str = "BHLD") -> tuple[Array, Array]:
    """Output and lse of all keys, from those of parts that share no key.

    ``lse = log(sum(exp(lse_i)))`` and ``out = sum(exp(lse_i - lse) * out_i)``, in the type of the lses. What is merged
    may be merged again: where parts of the keys come one after another (ring attention), one result is held at a time.

    Each part is a call of its own, whose ``is_causal`` and ``window`` count from its own corner. Of a causal sequence
    in chunks, the keys of the queries' own chunk are causal; those of earlier chunks need nothing, nor does a prefix
    that sequences share. Whatever else hides needs an ``attn_mask``. ``attention_backward`` says how gradients are made
    of parts without autograd.

    Args:
        outs: (B, Hq, Lq, Dv) each, of one library, device and dtype; or (T, Hq, Dv), as ``attention_varlen`` has them.
        lses: (B, Hq, Lq) each, as ``attention(..., return_lse=True)`` gives them; or (Hq, T).
        layout: "BLHD" where outs of four axes are (B, Lq, Hq, Dv); the lses are (B, Hq, Lq) either way.

    Returns:
        (out, lse), like the first of each; differentiable for torch. A row that no part sees has output 0, lse -inf.

    Raises:
        InvalidProblem: there are no parts, or they do not go together.
    """
    shape = tuple(getattr(outs, "shape", ()))
    if len(shape) == 4:  # of which each entry would pass for sequences without padding
        raise InvalidProblem(f"merge: outs is one array of shape {shape}: expected a list of those of the parts")
    try:
        outs, lses = list(outs), list(lses)
    except TypeError as error:
        raise InvalidProblem(f"merge takes a list of outs and a list of lses: {error}") from None
    if not outs or len(outs) != len(lses):
        raise InvalidProblem(f"merge of {len(outs)} outs and {len(lses)} lses: expected as many of each, at least one")
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout={layout!r}: {one_of(layout, LAYOUTS)}")
    library, caller = _checked(outs, lses, layout)
    if library == "dlpack":
        outs, lses = ([arrays.passage(array, "dlpack", "torch") for array in group] for group in (outs, lses))
    xp = _functions(library)
    turned = layout == "BLHD" or len(outs[0].shape) == 3
    if turned:
        outs = [out.swapaxes(-3, -2) for out in outs]
    with xp.errstate(all="ignore") if library == "numpy" else nullcontext():
        out, lse = _merged(xp, outs, lses)
    out = heads_last(out, outs[0]) if turned else out
    if library == "dlpack":
        return arrays.passage(out, "torch", "dlpack", caller), arrays.passage(lse, "torch", "dlpack", caller)
    return out, lse


def _functions(library: str) -> Any:
    if library not in ("torch", "dlpack"):
        return import_module(library)
    import torch  # by a statement, which graphs can trace

    return torch


def _merged(xp: Any, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Of outs (..., Lq, Dv) and lses (..., Lq), by the functions of ``xp``."""
    parts = xp.stack(lses)
    top = parts.max(0)
    top = (top.values.detach() if xp.__name__ == "torch" else top)[None]
    weights = xp.exp(parts - xp.where(top == -xp.inf, xp.zeros_like(top), top))
    total = weights.sum(0)
    seen = total != 0
    total = xp.where(seen, total, xp.ones_like(total))
    lse = xp.where(seen, xp.log(total) + top[0], xp.full_like(total, -xp.inf))
    shares = (weights / total)[..., None]
    out = sum(share * arrays.cast(part, share.dtype) for share, part in zip(shares, outs, strict=True))
    return arrays.cast(out, outs[0].dtype), lse


def _taken(array: Array, role: str) -> Facts:
    try:
        return arrays.take(array, role)[1]
    except Intercepted:  # all that is done with it is torch's, which needs no address
        arrays.check_dense(array, role)
        return arrays.outline(array)


def _facts(array: Array, role: str) -> Facts:
    facts = arrays.outline(array) if is_traced(array) else _taken(array, role)
    if facts.dtype not in DTYPES:
        raise InvalidProblem(f"merge: {role} have dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
    return facts


def _checked(outs: Sequence[Array], lses: Sequence[Array], layout: str) -> tuple[str, Array]:
    """The library of the parts, and one of its arrays. Raises ``InvalidProblem`` where they differ."""
    library = arrays.library_of(outs[0])
    out_facts, lse_facts = (
        [_facts(array, role) for array in parts] for role, parts in (("outs", outs), ("lses", lses))
    )
    first, rows = out_facts[0], lse_facts[0]
    if len(first.shape) not in (3, 4):
        raise InvalidProblem(
            f"merge: outs have shape {first.shape}: expected four axes each, {', '.join(layout)}, or T, H, D"
        )
    for facts, role in (*((f, "outs") for f in out_facts), *((f, "lses") for f in lse_facts)):
        check_beside(facts, f"merge: one of {role}", first, "the first of outs")
    *batch, one, other, _ = first.shape
    wanted = (*batch, one, other) if layout == "BHLD" and batch else (*batch, other, one)
    for facts, role, shape, beside in (
        *((f, "out", first.shape, first) for f in out_facts),
        *((f, "lse", wanted, rows) for f in lse_facts),
    ):
        if facts.shape != shape:
            axes = layout if batch else "THD"
            raise InvalidProblem(
                f"merge: one {role} has shape {facts.shape}; expected {shape} beside outs {first.shape} ({axes})"
            )
        if facts.dtype != beside.dtype:
            raise InvalidProblem(f"merge: the {role}s have dtypes {beside.dtype} and {facts.dtype}: cast them to one")
    return library, outs[0]
