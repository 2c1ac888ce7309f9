"""What a call asks: the problem, from the facts of its arrays and its options. Whatever makes no sense is told here."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Sequence
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call.options import Options
from attnswitch.errors import InvalidProblem
from attnswitch.problem import CONTIGUOUS, DTYPES, GRAD_OPERANDS, Mask, Problem

__all__ = [
    "INTEGERS",
    "check_alike",
    "check_beside",
    "describe",
    "fitting",
    "lengths_beside",
    "result_beside",
    "swap_heads",
    "swapped",
]

_HEADS_LAST = (0, 2, 1, 3)
#: What lengths and offsets may be.
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def describe(
    facts: Sequence[Facts | None], options: Options, *, lengths: bool, seeded: bool, grads: str | None = None
) -> Problem:
    """The problem of a call, from the facts of query, key, value and attn_mask as the caller passed them.

    ``grads`` None means: what torch's autograd would ask for. Raises ``InvalidProblem`` where they do not go together.
    """
    q, k, v, m = facts
    assert q is not None
    assert k is not None
    assert v is not None
    if q.library == "torch":
        _check_untraced()
    q, k, v, axes = fitting(q, k, v, m, options)
    mask, mask_memory = None, CONTIGUOUS
    if m is not None:
        mask, mask_memory = _mask_over(m.dtype, axes), m.memory
    if grads is None:
        asks = q.grad or k.grad or v.grad or (m is not None and m.grad)
        grads = "".join([a for a, f in zip(GRAD_OPERANDS, facts, strict=True) if f and f.grad]) if asks else ""
    (batch, heads_q, seq_q, dim_qk), (_, heads_kv, seq_k, dim_v) = q.shape, v.shape
    o = options
    return Problem.of(
        *(batch, heads_q, heads_kv, seq_q, seq_k, dim_qk, dim_v, q.dtype),
        *(o.is_causal, o.causal_alignment, o.window, mask, lengths, o.scale, o.softcap),
        *(o.dropout_p, seeded and o.dropout_p > 0.0, o.return_lse, grads, o.deterministic),
        *(False, False, False, 0, 0, "", False),  # varlen, sinks, alibi, page, splits, cache, tree
        *(q.memory, k.memory, v.memory, mask_memory, False),
    )


def fitting(q: Facts, k: Facts, v: Facts, m: Facts | None, options: Options) -> tuple[Facts, Facts, Facts, str]:
    """Query, key and value in (B, H, L, D) order, and which of the axes (b, h, q, k) the mask spans.

    Raises ``InvalidProblem`` where they do not go together.
    """
    check_alike(q, k, v)
    if options.layout == "BLHD":
        q, k, v = swapped(q), swapped(k), swapped(v)
    _check_shapes(q, k, v, options)
    if m is None:
        return q, k, v, ""
    check_beside(m, "attn_mask", q)
    return q, k, v, _spanned(m, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))


def _check_untraced() -> None:
    """Under a trace sizes are tensors, of which no two are equal."""
    if sys.modules["torch"].jit.is_tracing():
        raise InvalidProblem(
            "torch.jit.trace records what torch is asked to do, which cannot see the choice of a kernel nor kernels"
            " that are not torch's: use torch.compile or torch.export"
        )


def check_alike(q: Facts, k: Facts, v: Facts) -> None:
    """Query, key and value share a library, a device and a dtype."""
    if q[:3] != k[:3] or q[:3] != v[:3]:
        places = tuple(f"{kind}:{index}" for kind, index in (q.device, k.device, v.device))
        for what, values, remedy in (
            ("library", (q.library, k.library, v.library), "pass arrays of one library"),
            ("device", places, "move them to one device"),
            ("dtype", (q.dtype, k.dtype, v.dtype), "cast them to one dtype"),
        ):
            if len(set(values)) > 1:
                raise InvalidProblem(
                    f"query, key and value differ in {what}: {values[0]}, {values[1]} and {values[2]}; {remedy}"
                )
    if q.dtype not in DTYPES:
        raise InvalidProblem(f"query, key and value have dtype {q.dtype}: expected one of {', '.join(DTYPES)}")


def _check_shapes(q: Facts, k: Facts, v: Facts, options: Options) -> None:
    for role, facts in (("query", q), ("key", k), ("value", v)):
        if len(facts.shape) != 4:
            raise InvalidProblem(
                f"{role} has shape {facts.shape}: expected four axes, {', '.join(options.layout)}"
                " (add axes of length 1 for a missing batch or head)"
            )
    (batch, heads, _, dim), (batch_k, heads_k, length_k, dim_k) = q.shape, k.shape
    batch_v, heads_v, length_v, _ = v.shape
    wrong, expected = "", "; expected query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv)"
    if not batch == batch_k == batch_v:
        wrong = "the batch of query, key and value must agree"
    elif heads_k != heads_v:
        wrong = "the head count of key and value must agree"
    elif length_k != length_v:
        wrong = "the length of key and value must agree"
    elif dim != dim_k:
        wrong = "the head dimension of query and key must agree"
    elif options.enable_gqa is False and heads != heads_k:
        wrong = "the head counts differ and enable_gqa=False forbids it; leave enable_gqa out or pass True"
        expected = ""
    if wrong:
        shapes = f"query {q.shape}, key {k.shape}, value {v.shape}, as (B, H, L, D)"
        raise InvalidProblem(f"{shapes}: {wrong}{expected}")


def check_beside(facts: Facts, role: str, query: Facts, first: str = "query") -> None:
    """``role`` lives in the library and on the device of query, or what is ``first``. Raises ``InvalidProblem``."""
    if facts[:2] != query[:2]:
        raise InvalidProblem(
            f"{role} is a {facts.library} array on {facts.device[0]}:{facts.device[1]}, {first} a {query.library} array"
            f" on {query.device[0]}:{query.device[1]}: pass both in one library, on one device"
        )


def result_beside(
    array: Array | None, role: str, shape: tuple[int, ...], query: Facts, native: str, layout: str = "BHLD"
) -> Array | None:
    """A result or its gradient that the caller gives beside query, as an array of ``native`` that kernels take.

    It is of ``shape`` once the heads of ``layout`` "BLHD" stand before L; of packed sequences, "THD", as it is given.
    None stays None. Raises ``InvalidProblem`` where it does not go with query.
    """
    if array is None:
        return None
    packed = layout == "THD"
    array, facts = arrays.take(array, role)
    check_beside(facts, role, query)
    if facts.dtype not in DTYPES:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
    turned = layout == "BLHD" and len(shape) == 4
    if turned:
        facts = swapped(facts)
    if facts.shape != shape:
        axes = "(T, H, D) or (H, T)" if packed else "(B, H, L, D) or (B, H, L)"
        raise InvalidProblem(f"{role} has shape {facts.shape}: expected {shape}, as {axes}")
    array = swap_heads(array) if turned else array
    # Not part of the problem, so no backend was asked; torch could not take it.
    array = array.copy() if facts.memory.negative else array
    if packed:
        array = (array.swapaxes(0, 1) if len(shape) == 3 else array)[None]
    return arrays.passage(array, query.taken_as, native)


def swap_heads(array: Array) -> Array:
    """(B, L, H, D) as (B, H, L, D) or back: a view."""
    return array.swapaxes(1, 2)


def swapped(facts: Facts) -> Facts:
    """Facts after ``swap_heads``; left alone where the rank is wrong, which is reported later."""
    if len(facts.shape) != 4:
        return facts
    return facts._replace(
        shape=tuple(facts.shape[axis] for axis in _HEADS_LAST), strides=tuple(facts.strides[a] for a in _HEADS_LAST)
    )


def _spanned(m: Facts, scores: tuple[int, int, int, int]) -> str:
    """Which of the axes (b, h, q, k) of ``scores`` the mask spans."""
    rank = len(m.shape)
    axes = zip("bhqk"[4 - rank :], m.shape, scores[4 - rank :], strict=True) if 1 <= rank <= 4 else ()
    spanned = [axis for axis, size, wanted in axes if size != 1 and size == wanted]
    if not 1 <= rank <= 4 or len(spanned) + m.shape.count(1) != rank:
        raise InvalidProblem(
            f"attn_mask has shape {m.shape}: it does not broadcast to (B, Hq, Lq, Lk) = {scores};"
            " axes are matched from the right and have the full length or 1"
        )
    if m.dtype != "bool" and m.dtype not in DTYPES:
        raise InvalidProblem(
            f"attn_mask has dtype {m.dtype}: expected bool (True = attend) or a float dtype (added to the scores)"
        )
    return "".join(spanned)


_mask_over = functools.cache(Mask)


def lengths_beside(lengths: Any, query: Facts, seq_k: int, role: str = "key_lengths", most: str = "Lk") -> Array:
    """``role`` as an integer array (B,) beside query; host values are checked against 0..Lk, which ``most`` names."""
    batch = query.shape[0]
    if query.device[0] == "cuda" and arrays.library_of(lengths):
        host, facts = arrays.take(lengths, role)
        if facts.device[0] == "cpu" and facts.dtype in INTEGERS:  # like a list
            lengths = host.tolist()
    if not arrays.library_of(lengths):
        if not isinstance(lengths, Sequence) or not all(
            isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in lengths
        ):
            raise InvalidProblem(f"{role}={lengths!r}: expected {batch} integers, one for each batch entry")
        _check_lengths([int(n) for n in lengths], seq_k, role, most)
        lengths = arrays.numbers_as_array([int(n) for n in lengths], query.taken_as, query.device)
        facts = arrays.facts(lengths, role)
    else:
        lengths, facts = arrays.take(lengths, role)
        check_beside(facts, role, query)
    if facts.shape != (batch,):
        raise InvalidProblem(f"{role} has shape {facts.shape}: expected ({batch},), one length for each batch entry")
    if batch and facts.dtype not in INTEGERS:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected integers of 8 to 64 bits")
    if facts.device[0] == "cpu":  # elsewhere reading the values would cost a synchronisation
        _check_lengths(lengths.tolist(), seq_k, role, most)
    return lengths.copy() if facts.memory.negative else lengths  # a handful of integers


def _check_lengths(lengths: list[int], seq_k: int, role: str, most: str) -> None:
    for length in lengths:
        if not 0 <= length <= seq_k:
            raise InvalidProblem(f"{role} holds {length}: expected 0 to {most} = {seq_k}")
