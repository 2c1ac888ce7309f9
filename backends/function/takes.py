"""Why a function does not take a problem: what its signature does not say, and what its manner documents."""

from __future__ import annotations

from collections.abc import Iterator

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.through_torch import readable
from .signature import Reading

__all__ = ["lacks", "reasons"]

#: Features of a problem by the parameter that says them.
_FEATURES = {
    "causal": "causal",
    "scale": "scale",
    "window": "window",
    "softcap": "softcap",
    "dropout": "dropout",
    "sinks": "sinks",
    "slopes": "alibi",
    "lengths": "key_lengths",
    "lse": "lse",
    "splits": "splits",
    "tree": "tree",
    "seed": "seeded",
}


def lacks(reading: Reading) -> frozenset[str]:
    """What it never takes, as ``Backend.lacks`` names it."""
    like, own = reading.like, reading.like.name == "attnswitch"
    masks, numpy = reading.takes("mask") or reading.takes("bias"), reading.library == "numpy"
    grouped = like.grouped or reading.takes("grouped") or "gqa" in reading.promises
    corners = {"top_left", "bottom_right"} - {like.alignment}
    facts = {
        "mask": not masks,
        "masked_causal": like.name == "torch",
        "mixed": not own,
        "bool": not reading.takes("mask"),
        "nonfinite": not own,
        "group": not grouped,
        "deterministic": not (reading.takes("deterministic") or "deterministic" in reading.promises),
        "grads": reading.library != "torch" or reading.forward_alone,
        "lse_grads": not like.lse_grads,
        "cache": like.layout == "pages",
        "empty": not _promises_empty(reading),
        "dense": like.layout == "THD",
        "unpaged": like.layout == "pages",
        "packed": like.layout == "pages" and not reading.takes("edges_q"),
        "bfloat16": reading.library != "torch",
        "torch": numpy,
        "numpy": not numpy,
    }
    said = {feature for word, feature in _FEATURES.items() if not reading.takes(word)}
    return frozenset(
        said | {name for name, lacking in facts.items() if lacking} | (set() if reading.takes("alignment") else corners)
    )


def reasons(reading: Reading, problem: Problem, device: Device) -> Iterator[str]:
    """A sentence for each thing that cannot be said to the function, or that nothing says how it is meant."""
    yield from _of_library(reading, problem, device)
    yield from _of_layout(reading, problem)
    yield from _of_words(reading, problem)
    yield from _of_mask(reading, problem)
    yield from _of_positions(reading, problem)
    yield from _of_gradients(reading, problem)


def _of_library(reading: Reading, problem: Problem, device: Device) -> Iterator[str]:
    if reading.library == "torch":
        yield from readable(problem)
        return
    kind = "cpu" if reading.library == "numpy" else "cuda"
    if device.kind != kind:
        yield f"{reading.call} takes arrays of {reading.library}, and these are on {device.kind}"
    if problem.dtype == "bfloat16":
        yield f"dtype bfloat16: {reading.library} has none, and {reading.call} takes its arrays"


def _promises_empty(reading: Reading) -> bool:
    return reading.like.empty or "empty" in reading.promises


def _of_layout(reading: Reading, problem: Problem) -> Iterator[str]:
    layout = reading.like.layout
    if not ((problem.batch and problem.seq_q and problem.seq_k) or _promises_empty(reading)):
        sizes = f"batch {problem.batch}, {problem.seq_q} queries, {problem.seq_k} keys"
        yield f"{sizes}: that {reading.call} takes none of one is not known; if it does, say so with +empty"
    if layout == "THD" and not problem.varlen:
        yield f"a dense batch: {reading.call} takes sequences one after another (attention_varlen)"
    if layout == "pages":
        if not problem.page:
            yield f"no pages: {reading.call} takes keys in pages (attention_paged)"
        elif problem.varlen and not reading.takes("edges_q"):
            yield f"varlen: {reading.call} takes no cu_seqlens_q"
    elif layout == "THD" and problem.page:
        yield f"page={problem.page}: {reading.call} takes keys that lie one after another, not in pages"


def _of_words(reading: Reading, problem: Problem) -> Iterator[str]:
    p, promised = problem, reading.promises
    asked = {
        "causal": (p.causal and (reading.like.alignment == "bottom_right" or not p.sees_all), "causal"),
        "scale": (p.scale is not None, f"scale={p.scale}"),
        "window": (p.window is not None, f"window={p.window}"),
        "softcap": (p.softcap > 0.0, f"softcap={p.softcap}"),
        "dropout": (p.dropout > 0.0, f"dropout_p={p.dropout}"),
        "lengths": (p.key_lengths, "key_lengths"),
        "lse": (p.lse, "return_lse"),
        "deterministic": (p.deterministic and "deterministic" not in promised, "deterministic=True"),
    }
    for word, (wanted, told) in asked.items():
        if wanted and not reading.takes(word):
            name = (*reading.like.words.get(word, ()), told.partition("=")[0])[0]
            yield f"{told}: {reading.call} takes no {name}"
    if p.group > 1 and not (reading.like.grouped or reading.takes("grouped") or "gqa" in promised):
        yield (
            f"{p.heads_q} query heads, {p.heads_kv} key heads: {reading.call} takes no enable_gqa; if it shares heads"
            " all the same, say so with +gqa"
        )
    if p.seeded and p.dropout and not reading.takes("seed"):
        yield f"a dropout seed was given: {reading.call} draws from a generator of its own"
    if p.nonfinite and reading.like.name != "attnswitch":
        yield "NaN, inf or what overflows was seen: hidden positions weigh 0 there, and 0 * NaN is NaN"


def _of_mask(reading: Reading, problem: Problem) -> Iterator[str]:
    mask = problem.mask
    if mask is None:
        return
    if problem.causal and reading.like.name == "torch":
        yield f"causal beside attn_mask: {reading.call} is like torch, whose is_causal stands for a mask"
    if not reading.takes("mask") and (mask.is_bool or not reading.takes("bias")):
        yield f"attn_mask ({mask.dtype}): {reading.call} takes no attn_mask{'' if mask.is_bool else ' or bias'}"
    elif not mask.is_bool and mask.dtype != problem.dtype and reading.like.name != "attnswitch":
        yield f"attn_mask is {mask.dtype} and query {problem.dtype}: {reading.call} is given one type for both"


def _of_positions(reading: Reading, problem: Problem) -> Iterator[str]:
    p, way = problem, reading.like.alignment
    if not (p.positional or p.alibi) or reading.takes("alignment") or p.alignment == way:
        return
    square = p.seq_q == p.seq_k and not (p.key_lengths or p.varlen or p.page)
    if square or (p.sees_all and not p.alibi):
        return
    where = "where positions count from is not known" if way is None else f"it counts positions {way.replace('_', '-')}"
    yield (
        f"causal_alignment={p.alignment!r} with {p.seq_q} queries and {p.seq_k} keys: {reading.call} is like"
        f" {reading.like.name}, and {where}"
    )


def _of_gradients(reading: Reading, problem: Problem) -> Iterator[str]:
    p = problem
    if not p.grads:
        return
    if reading.library != "torch":
        yield f"gradients (grad={p.grads}): {reading.call} returns arrays of {reading.library}, which have none"
    elif reading.forward_alone:
        yield f"gradients (grad={p.grads}): the torch.autograd.Function of {reading.call} has no backward"
    elif p.lse and not reading.like.lse_grads:
        yield f"return_lse with gradients (grad={p.grads}): the lse of {reading.like.name} is not differentiable"
