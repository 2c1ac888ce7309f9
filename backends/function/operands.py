"""Inputs of the contract as arguments of a function, by what they say; and what it returns as the contract's results.

Inputs are (B, H, L, D), or (1, H, T, D) where sequences lie one after another, or caches (P, H, page, D).
"""

from __future__ import annotations

import sys
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .signature import Reading

__all__ = ["arguments", "kept", "results"]


def arguments(reading: Reading, problem: Problem, inputs: Inputs, stated: bool) -> dict[str, Any]:
    """What to call the function with: what the problem says, and whatever has no default. ``stated`` asks for lse."""
    said = {**_operands(reading, problem, inputs), **_heads(inputs), **_positions(reading, problem)}
    p = problem
    word = "mask" if reading.takes("mask") else "bias"
    usual = {
        "mask": None,
        "bias": None,
        "scale": p.softmax_scale,
        "dropout": 0.0,
        "softcap": 0.0,
        "seed": None,
        "slopes": None,
        "sinks": None,
        "lengths": None,
        "grouped": False,
        "deterministic": False,
        "lse": False,
        "splits": 0,
        "tree": None,
        "left": reading.like.unlimited,
        "right": reading.like.unlimited,
    }
    told = {
        word: inputs.attn_mask,
        "scale": p.scale,
        "dropout": p.dropout or None,
        "softcap": p.softcap or None,
        "seed": inputs.seed if p.seeded else None,
        "grouped": p.group > 1 or None,
        "deterministic": p.deterministic or None,
        "lse": stated or None,
        "splits": p.splits or None,
    }
    said |= {word: value for word, value in told.items() if value is not None}
    said = {**{word: usual[word] for word in reading.required & usual.keys()}, **said}
    return {word: value for word, value in said.items() if reading.takes(word)}


def _operands(reading: Reading, problem: Problem, inputs: Inputs) -> dict[str, Any]:
    layout = reading.like.layout
    query, key, value = inputs[:3]
    said: dict[str, Any] = {}
    if layout == "BLHD":
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    elif layout == "THD":
        query, key, value = (x[0].swapaxes(0, 1) for x in (query, key, value))
    elif layout == "pages":
        query = query[0].swapaxes(0, 1) if problem.varlen else query.swapaxes(1, 2)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        said["table"] = _integers(inputs.block_table, query)
        if inputs.tree_mask is not None:
            said["tree"] = inputs.tree_mask[0] if problem.varlen else inputs.tree_mask
    if inputs.offsets is not None:
        edges = [_integers(edge, query) for edge in inputs.offsets]
        said |= {"edges_q": edges[0], "edges_k": edges[-1]}
        said |= {"longest_q": problem.seq_q, "longest_k": problem.seq_k}
    if inputs.key_lengths is not None:
        said["lengths"] = _integers(inputs.key_lengths, query)
    return {"query": query, "key": key, "value": value, **said}


def _heads(inputs: Inputs) -> dict[str, Any]:
    """What there is one of for each head. Slopes that are the same in all sequences are (Hq,)."""
    slopes = inputs.alibi_slopes
    if slopes is not None and slopes.shape[0] == 1:
        slopes = slopes[0]
    found = {"slopes": slopes, "sinks": inputs.sinks}
    return {word: array for word, array in found.items() if array is not None}


def _positions(reading: Reading, problem: Problem) -> dict[str, Any]:
    """What hides by position. One query at the last key sees all, which a function that counts otherwise is told."""
    p, like = problem, reading.like
    causal = p.causal and (like.alignment == "bottom_right" or reading.takes("alignment") or not p.sees_all)
    said: dict[str, Any] = {"causal": causal, "alignment": p.alignment}
    if p.window is not None:
        sides = tuple(like.unlimited if side is None else side for side in p.window)
        if "window" in reading.says:
            said["window"] = sides
        else:
            said["left"], said["right"] = sides
    elif "window" in reading.required:
        said["window"] = (like.unlimited, like.unlimited)
    return said


def results(reading: Reading, inputs: Inputs, returned: Any, stated: bool) -> tuple[Any, Any]:
    """Output and lse, None if it is not ``stated``.

    Raises ``TypeError`` for what is neither an array nor, where the lse was asked for, an array and the lse in a tuple.
    """
    out, lse = returned, None
    if stated:
        if not isinstance(returned, tuple | list) or len(returned) < 2:
            raise TypeError(f"{reading.call} returned {_kind(returned)} where output and lse were asked for")
        out, lse = returned[:2]
    for what, array in (("output", out), ("lse", lse)):
        if not hasattr(array, "shape") and (what == "output" or stated):
            raise TypeError(f"{reading.call} returned {_kind(array)} as its {what}: expected an array")
    layout, rank = reading.like.layout, len(out.shape)
    if (layout == "BLHD" or layout == "pages") and rank == 4:
        out = out.swapaxes(1, 2)
    elif layout in ("THD", "pages") and rank == 3:
        out = out.swapaxes(0, 1)[None]
        lse = lse if lse is None else lse[None]
    if inputs.offsets is None:
        return out, lse
    return _ended(out, lse, inputs)


def kept(inputs: Inputs) -> Inputs:
    """Torch's ``inputs`` with gradients of 0 past the last sequence, where nobody says what a backward writes."""
    if inputs.offsets is None:
        return inputs
    torch: Any = sys.modules["torch"]
    edges = inputs.offsets.query, inputs.offsets.key, inputs.offsets.key
    query, key, value = (_hooked(x, _past(torch, x, edge)[:, None]) for x, edge in zip(inputs[:3], edges, strict=True))
    return inputs._replace(query=query, key=key, value=value)


def _hooked(operand: Any, past: Any) -> Any:
    if not operand.requires_grad:
        return operand
    view = operand.view_as(operand)
    view.register_hook(lambda grad: grad.masked_fill(past, 0.0))
    return view


def _ended(out: Any, lse: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Results with what the contract has past the last sequence, where nobody says what a function writes."""
    assert inputs.offsets is not None
    xp: Any = sys.modules["torch" if hasattr(out, "new_full") else type(out).__module__.partition(".")[0]]
    past = _past(xp, out, inputs.offsets.query)
    out = xp.where(past[:, None], xp.zeros_like(out), out)
    return out, lse if lse is None else xp.where(past, xp.full_like(lse, -float("inf")), lse)


def _past(xp: Any, rows: Any, edges: Any) -> Any:
    """Which of (1, H, T, D) lie past the last sequence, (T,)."""
    beside = {"device": rows.device} if hasattr(rows, "new_full") else {}
    return xp.arange(rows.shape[2], **beside) >= (edges.to(rows.device) if beside else edges)[-1]


def _integers(array: Any, query: Any) -> Any:
    """``array`` as int32 beside ``query``, as kernels read it."""
    if hasattr(query, "new_full"):
        return array.to(query.device, dtype=sys.modules["torch"].int32).contiguous()
    return array.astype("int32")


def _kind(value: Any) -> str:
    many = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return "None" if value is None else f"a {type(value).__name__}{many}"
