"""The arguments of one call, read once: checked, described as a ``Problem``, and brought to (B, H, L, D)."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call import finite
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Inputs
from attnswitch.problem import DTYPES, Mask, Memory, Problem
from attnswitch.problem.options import Options

__all__ = ["Call", "beside", "describe", "rank", "read", "swap_heads", "with_drawn_seed"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, ready to run: its problem, where it lives, and its arrays in (B, H, L, D) order."""

    problem: Problem
    library: str  # of the inputs here: "numpy", "cupy" or "torch"
    home: str  # of the caller's arrays: the same, or one known by DLPack
    device: tuple[str, int]
    inputs: Inputs
    layout: str
    like: Array  # the caller's query

    def to_backend(self, library: str) -> Inputs:
        """The inputs as arrays of ``library``, over the same memory."""
        if library == self.library:
            return self.inputs
        return self.inputs.map(lambda array: arrays.passage(array, self.library, library))

    def to_caller(self, array: Array, library: str, *, heads: bool = True) -> Array:
        """A result as an array of the caller's library, in the caller's layout."""
        if array is None:
            return None
        array = arrays.passage(array, library, self.library)
        array = swap_heads(array) if heads and self.layout == "BLHD" else array
        return array if self.home == self.library else arrays.passage(array, "torch", "dlpack", self.like)


def swap_heads(array: Array) -> Array:
    """(B, L, H, D) as (B, H, L, D) or back: a view."""
    return array.swapaxes(1, 2)


def read(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    key_lengths: Array | Sequence[int] | None,
    options: Options,
    grads: str | None = None,
) -> Call:
    """Read one call. ``grads`` None means: what torch autograd would ask for.

    Raises:
        InvalidProblem: the arguments cannot describe an attention problem; nothing has run.
    """
    caller = query
    (query, q), (key, k), (value, v) = (
        arrays.take(array, role) for array, role in ((query, "query"), (key, "key"), (value, "value"))
    )
    library = arrays.library_of(query)
    m = None
    if attn_mask is not None:
        attn_mask, m = arrays.take(attn_mask, "attn_mask")
    if grads is None:
        grads = _autograd(q.library, query, key, value, attn_mask)
    problem = describe(q, k, v, m, key_lengths is not None, options, grads)
    if options.layout == "BLHD":
        query, key, value = (swap_heads(array) for array in (query, key, value))
    if m is not None and len(m.shape) < 4:
        attn_mask = attn_mask[(None,) * (4 - len(m.shape))]  # type: ignore[index]
    lengths = None if key_lengths is None else _read_lengths(key_lengths, q, problem.seq_k, library)
    inputs = Inputs(query, key, value, attn_mask, lengths, options.seed)
    if finite.looked_for(finite.when(), q.device[0]) and not finite.finite(problem, q.device[0], inputs[:3]):
        problem = problem.replace(nonfinite=True)
    return Call(problem, library, q.library, q.device, inputs, options.layout, caller)


def describe(q: Facts, k: Facts, v: Facts, m: Facts | None, key_lengths: bool, options: Options, grads: str) -> Problem:
    """The problem of a call, from the facts of query, key, value and attn_mask as the caller passed them.

    Raises ``InvalidProblem`` where they do not go together.
    """
    _check_untraced(q.library)
    _check_alike(q, k, v)
    if options.layout == "BLHD":
        q, k, v = (_swapped(facts) for facts in (q, k, v))
    _check_shapes(q, k, v, options)
    mask, mask_memory = None, Memory()
    if m is not None:
        _check_beside(m, "attn_mask", q.library, q.device)
        mask, m = _described_mask(m, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        mask_memory = m.memory
    return _described(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        dim_qk=q.shape[3],
        dim_v=v.shape[3],
        dtype=q.dtype,
        causal=options.is_causal,
        alignment=options.causal_alignment,
        window=options.window,
        mask=mask,
        key_lengths=key_lengths,
        scale=options.scale,
        softcap=options.softcap,
        dropout=options.dropout_p,
        seeded=options.seed is not None and options.dropout_p > 0.0,
        lse=options.return_lse,
        grads=grads,
        deterministic=options.deterministic,
        query=q.memory,
        key=k.memory,
        value=v.memory,
        attn_mask=mask_memory,
    )


#: Equal facts make the same problem, validated once.
_described = functools.lru_cache(maxsize=4096)(Problem)


def _check_untraced(library: str) -> None:
    """Under a trace sizes are tensors, of which no two are equal."""
    if library == "torch" and sys.modules["torch"].jit.is_tracing():
        raise InvalidProblem(
            "torch.jit.trace records what torch is asked to do, which cannot see the choice of a kernel nor kernels"
            " that are not torch's: use torch.compile, which breaks its graph at the call"
        )


def _check_alike(q: Facts, k: Facts, v: Facts) -> None:
    """Query, key and value share a library, a device and a dtype."""
    for what, values, remedy in (
        ("library", (q.library, k.library, v.library), "pass arrays of one library"),
        (
            "device",
            tuple(f"{kind}:{index}" for kind, index in (q.device, k.device, v.device)),
            "move them to one device",
        ),
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
    names = "query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv)"
    shapes = f"query {q.shape}, key {k.shape}, value {v.shape}, as (B, H, L, D)"
    for what, sizes, who in (
        ("batch", {q.shape[0], k.shape[0], v.shape[0]}, "query, key and value"),
        ("head count", {k.shape[1], v.shape[1]}, "key and value"),
        ("length", {k.shape[2], v.shape[2]}, "key and value"),
        ("head dimension", {q.shape[3], k.shape[3]}, "query and key"),
    ):
        if len(sizes) > 1:
            raise InvalidProblem(f"{shapes}: the {what} of {who} must agree; expected {names}")
    if options.enable_gqa is False and q.shape[1] != k.shape[1]:
        raise InvalidProblem(
            f"{shapes}: the head counts differ and enable_gqa=False forbids it; leave enable_gqa out or pass True"
        )


def _check_beside(facts: Facts, role: str, library: str, device: tuple[str, int]) -> None:
    """``role`` lives in the library and on the device of query."""
    if (facts.library, facts.device) != (library, device):
        raise InvalidProblem(
            f"{role} is a {facts.library} array on {facts.device[0]}:{facts.device[1]}, query a {library} array"
            f" on {device[0]}:{device[1]}: pass both in one library, on one device"
        )


def _swapped(facts: Facts) -> Facts:
    """Facts after ``swap_heads``; left alone where the rank is wrong, which is reported later."""
    if len(facts.shape) != 4:
        return facts
    order = (0, 2, 1, 3)
    return facts._replace(
        shape=tuple(facts.shape[axis] for axis in order), strides=tuple(facts.strides[axis] for axis in order)
    )


def _described_mask(m: Facts, scores: tuple[int, int, int, int]) -> tuple[Mask, Facts]:
    """The mask's description, and its facts with four axes."""
    rank = len(m.shape)
    full = (1,) * (4 - rank) + m.shape
    if not 1 <= rank <= 4 or any(size not in (1, wanted) for size, wanted in zip(full, scores, strict=True)):
        raise InvalidProblem(
            f"attn_mask has shape {m.shape}: it does not broadcast to (B, Hq, Lq, Lk) = {scores};"
            " axes are matched from the right and have the full length or 1"
        )
    if m.dtype != "bool" and m.dtype not in DTYPES:
        raise InvalidProblem(
            f"attn_mask has dtype {m.dtype}: expected bool (True = attend) or a float dtype (added to the scores)"
        )
    axes = "".join(axis for axis, size, wanted in zip("bhqk", full, scores, strict=True) if size == wanted)
    m = m._replace(shape=full, strides=(0,) * (4 - rank) + m.strides)
    return Mask(m.dtype, axes), m


def _read_lengths(lengths: Any, query: Facts, seq_k: int, library: str) -> Array:
    """``key_lengths`` as an integer array (B,) beside query; host values are checked against 0..Lk."""
    batch = query.shape[0]
    if not arrays.library_of(lengths):
        if not isinstance(lengths, Sequence) or not all(
            isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in lengths
        ):
            raise InvalidProblem(f"key_lengths={lengths!r}: expected {batch} integers, one for each batch entry")
        _check_lengths([int(n) for n in lengths], seq_k)
        lengths = arrays.lengths_as_array([int(n) for n in lengths], library, query.device)
        facts = arrays.facts(lengths, "key_lengths")
    else:
        lengths, facts = arrays.take(lengths, "key_lengths")
        _check_beside(facts, "key_lengths", query.library, query.device)
    if facts.shape != (batch,):
        raise InvalidProblem(
            f"key_lengths has shape {facts.shape}: expected ({batch},), one length for each batch entry"
        )
    if batch and not facts.dtype.startswith(("int", "uint")):
        raise InvalidProblem(f"key_lengths has dtype {facts.dtype}: expected integers")
    if facts.device[0] == "cpu":  # elsewhere reading the values would cost a synchronisation
        _check_lengths([int(lengths[b]) for b in range(batch)], seq_k)
    return lengths.copy() if facts.memory.negative else lengths  # a handful of integers


def _check_lengths(lengths: list[int], seq_k: int) -> None:
    for length in lengths:
        if not 0 <= length <= seq_k:
            raise InvalidProblem(f"key_lengths holds {length}: expected 0 to Lk = {seq_k}")


def with_drawn_seed(call: Call) -> Call:
    """The call with a dropout seed of its own, for backends whose mask is a function of one.

    torch's CPU generator draws it, so that ``torch.manual_seed`` repeats it; NumPy's global one where torch is not
    loaded. A captured CUDA graph replays the seed that it was captured with.
    """
    if torch := sys.modules.get("torch"):
        seed = int(torch.randint(2**63 - 1, ()).item())
    else:
        numpy: Any = sys.modules["numpy"]
        seed = int(numpy.random.randint(2**63 - 1))
    return replace(call, inputs=call.inputs._replace(seed=seed))


def _autograd(library: str, query: Array, key: Array, value: Array, attn_mask: Array | None) -> str:
    if library != "torch" or not sys.modules["torch"].is_grad_enabled():
        return ""
    operands = zip("qkvm", (query, key, value, attn_mask), strict=True)
    return "".join(letter for letter, array in operands if getattr(array, "requires_grad", False))


def rank(array: Array) -> int:
    """Number of axes of a caller's array."""
    return len(arrays.take(array, "attn_mask")[1].shape)


def beside(array: Array | None, role: str, call: Call, shape: tuple[int, ...], library: str) -> Array | None:
    """``array`` checked against the call, in (B, H, L, D) order, as an array of ``library``; None stays None."""
    if array is None:
        return None
    array, facts = arrays.take(array, role)
    _check_beside(facts, role, call.home, call.device)
    if facts.dtype not in DTYPES:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
    if call.layout == "BLHD" and len(shape) == 4:
        array, facts = swap_heads(array), _swapped(facts)
    if facts.shape != shape:
        raise InvalidProblem(f"{role} has shape {facts.shape}: expected {shape}, as (B, H, L, D) or (B, H, L)")
    if facts.memory.negative:  # not part of the problem, so no backend was asked; torch could not take it
        array = array.copy()
    return arrays.passage(array, call.library, library)
