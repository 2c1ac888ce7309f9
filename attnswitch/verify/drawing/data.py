"""The operands of a case: what each distribution, mask, sink and slope holds, from the numbers of ``generator``."""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import Any

import numpy as np

from attnswitch.arrays import Array
from attnswitch.verify.drawing import stored, trees
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.generator import float64, hashed, normal, rounded, shifted, uniform

__all__ = [
    "ALIBI_KINDS",
    "DISTRIBUTIONS",
    "LARGEST",
    "MASK_KINDS",
    "SINK_KINDS",
    "operands",
]

#: Distributions of query, key and value, plainest first.
DISTRIBUTIONS = (
    "normal",
    "integers",
    "uniform",
    "equal",
    "negative",
    "large",
    "outlier",
    "onehot",
    "needle",
    "rising",
    "falling",
    "activations",
)

_STREAMS = {"query": 1, "key": 2, "value": 3, "attn_mask": 4, "grad_out": 5, "grad_lse": 6, "rare": 7, "poison": 8}
_STREAMS |= {"sinks": 19, "alibi_slopes": 20, "key_scale": 21, "value_scale": 22, "tree": 23}


def operands(case: Case, xp: Any = np) -> dict[str, Array]:
    """query, key, value, grad_out and grad_lse as float64, and attn_mask, sinks and alibi_slopes where there are any.

    A bool mask is bool, sinks are (Hq,), and alibi_slopes (1 or B, Hq). Of a cache of 8 bits key and value are what it
    stands for, with key_scale and value_scale (B, Hkv, Lk / page). Values are exact in the storage types, or in 8 bits.
    Of a case with a tree attn_mask is the mask that its bits stand for. ``grad_lse`` is zero unless the case asks for
    lse.
    """
    b, h, lq, lk = case.scores
    shapes: dict[str, tuple[int, ...]] = {
        "query": (b, h, lq, case.dim_qk),
        "key": (b, case.heads_kv, lk, case.dim_qk),
        "value": (b, case.heads_kv, lk, case.dim_v),
    }
    q, k, v = _MAKERS[case.data](xp, case, shapes)
    made = {
        "query": rounded(q, case.dtype),
        "key": rounded(k, case.dtype),
        "value": rounded(v, case.dtype),
        "grad_out": rounded(normal(xp, case.data_seed, _STREAMS["grad_out"], (b, h, lq, case.dim_v)), case.dtype),
        "grad_lse": rounded(
            normal(xp, case.data_seed, _STREAMS["grad_lse"], (b, h, lq)) * float(case.lse),
            "float64" if case.dtype == "float64" else "float32",
        ),
    }
    if case.unseeded:
        # With V = I the output is the dropped softmax itself, which shows the mask that was drawn.
        made["value"] = made["value"] * 0.0 + _identity(xp, lk, case.dim_v)
    if case.poison:
        made["key"], made["value"] = _poisoned(xp, case, made["key"], made["value"])
    for role in ("query", "key", "value", "grad_out"):
        made[role] = _repeated(xp, made[role], getattr(case.placing, role))
    for role in ("key", "value") if case.cache else ():
        u = uniform(np, case.data_seed, _STREAMS[f"{role}_scale"], (case.heads_kv, lk // case.page))
        made[role], made[f"{role}_scale"] = stored.stored(case, made[role], u)
    if case.latent:
        made["value"] = made["key"][..., : case.dim_v]
        made |= {"value_scale": made["key_scale"]} if case.cache else {}
    if case.mask is not None:
        made["attn_mask"] = _mask(xp, case)
    if case.tree:
        draws = uniform(np, case.data_seed, _STREAMS["tree"], (b, lq, lq))
        made["attn_mask"] = xp.asarray(trees.mask(case, draws))
    if case.sinks:
        made["sinks"] = _sinks(xp, case)
    if case.alibi:
        made["alibi_slopes"] = _slopes(xp, case)
    return made


def _plain(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    return tuple(normal(xp, case.data_seed, _STREAMS[role], shape) for role, shape in shapes.items())


def _integers(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Sparse integers from -2 to 2: sums are exact, so that any deviation is a bug and not rounding."""
    made = []
    for role, shape in shapes.items():
        bits = hashed(xp, case.data_seed, _STREAMS[role], math.prod(shape))
        value = (shifted(bits, 8) % 5 - 2) * ((shifted(bits, 40) & 3) == 0)
        made.append(float64(xp, value).reshape(shape))
    return tuple(made)


def _uniform(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """U[0, 1), as PyTorch's own tests draw: for comparison, a weak distribution."""
    return tuple(uniform(xp, case.data_seed, _STREAMS[role], shape) for role, shape in shapes.items())


def _equal(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """All logits equal, and not 0: every key is the same."""
    q, k, v = _plain(xp, case, shapes)
    return q, k[:, :, :1] + 0.0 * k, v


def _negative(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """All logits far below 0: a running maximum that starts at 0, or a finite stand-in for -inf, shows."""
    q, k, v = _plain(xp, case, shapes)
    return 16.0 * (abs(q) + 0.25), -16.0 * (abs(k) + 0.25), v


def _large(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Logits of standard deviation 16: a peaked softmax."""
    q, k, v = _plain(xp, case, shapes)
    return 16.0 * q, k, v


def _outlier(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """N(0, 1) with one element in 64 ten times wider: FlashAttention-3's N(0, 1) + N(0, 100) at small sizes."""
    made = []
    for (role, shape), x in zip(shapes.items(), _plain(xp, case, shapes), strict=True):
        rare = hashed(xp, case.data_seed + _STREAMS[role], _STREAMS["rare"], math.prod(shape)).reshape(shape)
        made.append(x * (1.0 + 9.0 * float64(xp, (rare & 63) == 0)))
    return tuple(made)


def _onehot(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Each query selects one key, whose logit is 0; all others are far below. Values are the key's number.

    Key j carries the bits of j as +-1 and their negated count; query i the same bits of its target and 1, times a gain.
    """
    lq, lk, d = case.seq_q, case.seq_k, case.dim_qk
    bits = max(1, (lk - 1).bit_length())
    if d < bits + 1:
        return _needle(xp, case, shapes)
    j = xp.arange(lk, dtype=xp.int64)
    target = (xp.arange(lq, dtype=xp.int64) * 7 + case.data_seed % 64 + lk - 1) % max(lk, 1)
    gain = min(2.0**11, 2.0 ** math.ceil(math.log2(64.0 / max(abs(case.softmax_scale), 2.0**-5))))
    key = xp.zeros((lk, d), dtype=xp.float64)
    query = xp.zeros((lq, d), dtype=xp.float64)
    for bit in range(bits):
        key[:, bit] = float64(xp, (j >> bit & 1) * 2 - 1)
        query[:, bit] = float64(xp, (target >> bit & 1) * 2 - 1) * gain
    key[:, bits] = -float(bits)
    query[:, bits] = gain
    number = float64(xp, j % 251) * 1.0 - 125.0
    zeros = {role: xp.zeros(shape, dtype=xp.float64) for role, shape in shapes.items()}
    return zeros["query"] + query, zeros["key"] + key, zeros["value"] + number[:, None]


def _needle(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """The last key outweighs all others: dropping it, or reading one too few, changes everything."""
    q, k, v = _plain(xp, case, shapes)
    last = float64(xp, xp.arange(case.seq_k, dtype=xp.int64) == case.seq_k - 1)[:, None]
    return 0.25 * q + 2.0, k * (1.0 - last) + 4.0 * last, v


def _ramp(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]], sign: float) -> tuple[Array, Array, Array]:
    q, k, v = _plain(xp, case, shapes)
    height = float64(xp, xp.arange(case.seq_k, dtype=xp.int64))[:, None] * (sign * 8.0 / max(case.seq_k, 1))
    return 0.25 * q + 1.0, 0.25 * k + rounded(height, "bfloat16"), v


def _rising(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """The running maximum rises in every tile."""
    return _ramp(xp, case, shapes, 1.0)


def _falling(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """The running maximum is met in the first tile."""
    return _ramp(xp, case, shapes, -1.0)


@functools.cache
def _recorded() -> dict[str, Any]:
    path = resources.files("attnswitch.verify.drawing") / "activations.npz"
    with resources.as_file(path) as file, np.load(file) as stored:
        return {role: stored[role].astype(np.float64) for role in ("query", "key", "value")}


def _activations(xp: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a trained sentence encoder, tiled cyclically over the shape."""
    made = []
    for role, shape in shapes.items():
        stored = _recorded()[role]  # (heads, length, dim)
        index = [
            (np.arange(size) + case.data_seed) % extent for size, extent in zip(shape[1:], stored.shape, strict=True)
        ]
        x = np.broadcast_to(stored[np.ix_(*index)], shape)
        made.append(xp.asarray(np.array(x)))
    return tuple(made)


_MAKERS = {
    "normal": _plain,
    "integers": _integers,
    "uniform": _uniform,
    "equal": _equal,
    "negative": _negative,
    "large": _large,
    "outlier": _outlier,
    "onehot": _onehot,
    "needle": _needle,
    "rising": _rising,
    "falling": _falling,
    "activations": _activations,
}


def _identity(xp: Any, rows: int, columns: int) -> Array:
    return float64(xp, xp.arange(rows)[:, None] == xp.arange(columns)[None, :])


def _repeated(xp: Any, x: Array, placing: str) -> Array:
    """Values made equal along the axis that an expanded operand repeats."""
    axis = {"expanded-batch": 0, "expanded-heads": 1, "expanded-rows": 2}.get(placing)
    if axis is None or x.shape[axis] == 0:
        return x
    first = tuple(slice(0, 1) if a == axis else slice(None) for a in range(4))
    return x[first] + xp.zeros(x.shape, dtype=xp.float64)


def _poisoned(xp: Any, case: Case, key: Array, value: Array) -> tuple[Array, Array]:
    """NaN in one key, NaN and inf in one value, in one head; past the lengths everything is NaN."""
    key, value = (x + xp.zeros(x.shape, dtype=xp.float64) for x in (key, value))  # maybe a view of shared values
    word = int(hashed(np, case.data_seed, _STREAMS["poison"], 1)[0]) & (2**63 - 1)
    if case.seq_k and case.batch:
        b, h, j = word % case.batch, (word >> 8) % case.heads_kv, (word >> 16) % case.seq_k
        if word >> 40 & 1:
            key[b, h, j, 0] = math.nan
        value[b, h, -1 - j, 0] = math.nan
        value[b, h, -1 - j, -1] = math.inf
    for b, length in enumerate(case.lengths or ()):
        key[b, :, length:] = math.nan
        value[b, :, length:] = math.nan
    return key, value


#: The largest number of each dtype.
LARGEST = {
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float32": 2.0**127 * (2 - 2.0**-23),
    "float64": 2.0**1023 * (2 - 2.0**-52),
}
#: Masks that hide by a large negative number, whole rows included; None is the least number of the type.
_FLOORS = {"finite-min": None, "minus-1e4": -1e4, "minus-1e9": -1e9}
#: What a mask may hold.
MASK_KINDS = ("random", "all", "none", "dead-rows", "blocks", "smooth", *_FLOORS)


def _mask(xp: Any, case: Case) -> Array:
    """The attn_mask with four axes, as bool or float64."""
    recipe = case.mask
    assert recipe is not None
    shape = tuple(size if axis in recipe.axes else 1 for axis, size in zip("bhqk", case.scores, strict=True))
    u = uniform(xp, case.data_seed, _STREAMS["attn_mask"], shape)
    rows = uniform(xp, case.data_seed, _STREAMS["rare"], (*shape[:3], 1))
    blocks = (xp.arange(shape[3]) // 64 % 2 == 1) & (u > -1.0)
    keep = {
        "all": u >= 0.0,
        "none": u < 0.0,
        "random": u < 0.7,
        "dead-rows": (u < 0.7) & (rows < 0.5),
        "blocks": blocks,
    }
    if recipe.dtype == "bool":
        return keep[recipe.kind]
    smooth = normal(xp, case.data_seed, _STREAMS["attn_mask"], shape)
    if recipe.kind in _FLOORS:
        floor = _FLOORS[recipe.kind] or -LARGEST[recipe.dtype]
        floors = rounded(xp.zeros(shape, dtype=xp.float64) + floor, recipe.dtype) if _FLOORS[recipe.kind] else floor
        return xp.where((u < 0.7) & (rows < 0.5), 0.0 * u, floors + 0.0 * u)
    smooth = rounded(smooth, recipe.dtype)
    if recipe.kind == "smooth":
        return smooth
    return xp.where(keep[recipe.kind], smooth, -math.inf + 0.0 * u)


#: Sinks: N(0, 1); so wide that some outweigh all keys; none, far above, ordinary and far below in turn.
_SINKS = {"normal": (None,), "wide": (None,), "extreme": (-math.inf, 1e4, None, -1e4)}
#: Slopes: negative powers of two; of each batch entry its own; 0, negative, steep and ordinary in turn.
_SLOPES = {"geometric": (None,), "batch": (None,), "extreme": (0.0, -0.125, 8.0, None)}
SINK_KINDS, ALIBI_KINDS = tuple(_SINKS), tuple(_SLOPES)


def _sinks(xp: Any, case: Case) -> Array:
    sinks = normal(xp, case.data_seed, _STREAMS["sinks"], (case.heads_q,)) * (16.0 if case.sinks == "wide" else 1.0)
    return _in_turn(rounded(sinks, case.heads_dtype(case.sinks)), case.data_seed, _SINKS[case.sinks])


def _slopes(xp: Any, case: Case) -> Array:
    slopes = xp.asarray([2.0 ** -(1 + 8 * h // case.heads_q) for h in range(case.heads_q)], dtype=xp.float64)[None]
    if case.alibi == "batch":
        slopes = 0.25 * normal(xp, case.data_seed, _STREAMS["alibi_slopes"], (case.batch, case.heads_q))
    return _in_turn(rounded(slopes, case.heads_dtype(case.alibi)), case.data_seed, _SLOPES[case.alibi])


def _in_turn(values: Array, first: int, numbers: tuple[float | None, ...]) -> Array:
    """``values`` of each head, some replaced by ``numbers``, which are exact in the type that these are passed in."""
    for h in range(values.shape[-1]):
        number = numbers[(h + first) % len(numbers)]
        if number is not None:
            values[..., h] = number
    return values
