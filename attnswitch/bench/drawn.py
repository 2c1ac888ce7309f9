"""Problems drawn at random as applications might ask for them: what a choice is judged on, since nobody tuned for it.

Batch and lengths are even in their logarithms; ``KINDS`` and the other tables say how often the rest is. What is too
large for the kind of device is drawn again. The same seed draws the same problems everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from attnswitch.problem import DTYPES, Problem, cost

__all__ = ["KINDS", "draw"]

_T = TypeVar("_T", str, int)

#: What is asked for beside the plainest problem, and how often. {dtype} is a float mask's, {window} a number of keys.
KINDS = {
    "": 10,
    "causal": 12,
    "causal-br": 3,
    "lengths": 3,
    "causal lengths": 2,
    "causal-br lengths": 2,
    "mask=bool:k": 1,
    "mask=bool:bk": 3,
    "mask=bool:qk": 2,
    "mask=bool:bqk": 2,
    "mask=bool:bhqk": 1,
    "causal mask=bool:bk": 2,
    "mask={dtype}:qk": 1,
    "mask={dtype}:hqk": 3,
    "mask={dtype}:bhqk": 1,
    "causal mask={dtype}:hqk": 1,
    "causal window={window},0": 4,
    "window={window},{window}": 2,
    "causal window={window},0 lengths": 1,
    "causal softcap=50": 2,
    "causal softcap=30 window={window},0": 1,
}
#: What may stand beside any of them, one draw in so many.
_RARELY = {"dropout=0.1": 20, "deterministic": 25}
#: One draw in so many is a decode step, and one a few new tokens behind many old ones.
_DECODE, _FEW = 6, 20
#: What a decode step is beside plain.
_DECODING = {"": 6, "lengths": 3, "mask=bool:bk": 2, "mask={dtype}:bhqk": 1, "causal-br window={window},0": 1}
_DIMS = {64: 8, 128: 10, 32: 2, 40: 1, 72: 1, 80: 2, 96: 2, 160: 1, 256: 3}
#: DeepSeek's heads: 192 of query and key, 128 of value. One draw in so many.
_WIDE, _WIDE_OFTEN = "192/128", 25
#: Heads of query and key that share a key head, where the number of heads is a multiple.
_GROUPS = (1, 1, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The most that may be asked of a kind of device, and the types with how often each is."""

    dtypes: Mapping[str, int]
    heads: tuple[int, ...]
    batch: int
    length: tuple[int, int]
    keys: tuple[int, int]
    #: Operations of a forward by dtype, 2.5 times less of a step with gradients; bytes of all operands.
    flops: Mapping[str, float]
    bytes: float


_SCALES = {
    "cuda": _Scale(
        {"bf16": 10, "fp16": 4, "fp32": 4},
        (1, 4, 8, 12, 16, 24, 32, 40, 64),
        64,
        (16, 16_384),
        (128, 65_536),
        {"bf16": 1.2e12, "fp16": 1.2e12, "fp32": 1.2e11},
        2e9,
    ),
    "cpu": _Scale(
        {"fp32": 8, "bf16": 3, "fp16": 1},
        (1, 4, 8, 12, 16, 32),
        16,
        (8, 2048),
        (32, 8192),
        {"fp32": 3e9, "bf16": 1.5e9, "fp16": 3e8},
        1e8,
    ),
}


def draw(kind: str, count: int, seed: int) -> list[Problem]:
    """The first ``count`` problems of ``seed`` for a device of ``kind``, "cuda" or "cpu"; about half have gradients."""
    random_ = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        problem = _problem(random_, _SCALES[kind])
        if problem is not None:
            found[problem] = None
    return list(found)


def _problem(draw: random.Random, scale: _Scale) -> Problem | None:
    """A problem, or None where it came out too large."""
    dtype, heads = _one_of(draw, scale.dtypes), draw.choice(scale.heads)
    group = draw.choice([factor for factor in _GROUPS if heads % factor == 0])
    dim = _WIDE if draw.randrange(_WIDE_OFTEN) == 0 else str(_one_of(draw, _DIMS))
    batch, long = _even(draw, 1, scale.batch), _even(draw, *scale.keys)
    step, grad = draw.random(), draw.random() < 0.5
    if step < 1 / _DECODE:
        length, kind, grad = f"1x{long}", _one_of(draw, _DECODING), False
    elif step < 1 / _DECODE + 1 / _FEW:
        length, kind, grad = f"{_even(draw, 2, 64)}x{long}", "causal-br", False
    else:
        queries, kind = _even(draw, *scale.length), _one_of(draw, KINDS)
        keys = _even(draw, *scale.length) if draw.randrange(6) == 0 else queries
        length = f"{queries}x{keys}"
        if draw.randrange(3) == 0:  # lengths of applications are round as often as not
            length = "x".join(str(-(-int(side) // 128) * 128) for side in length.split("x"))
    keys = int(length.split("x")[1])
    beside = [text for text, often in _RARELY.items() if draw.randrange(often) == 0]
    parts = [
        kind.format(dtype=dtype, window=_even(draw, max(1, keys // 32), keys)),
        *beside,
        *(["grad"] if grad else []),
    ]
    problem = Problem.parse(f"b{batch} h{heads}/{heads // group} s{length} d{dim} {dtype} {' '.join(parts)}")
    most = scale.flops[dtype] / (2.5 if grad else 1)
    return problem if cost.flops(problem) <= most and _bytes(problem) <= scale.bytes else None


def _bytes(problem: Problem) -> int:
    """Of operands and results; a mask counts twice, as a backend may need another of it."""
    scores = cost.rows(problem) * problem.seq_k * DTYPES[problem.dtype] if problem.mask is not None else 0
    return cost.least_bytes(problem) + min(scores, 2 * cost.mask_bytes(problem))


def _even(draw: random.Random, low: int, high: int) -> int:
    """An integer, even in its logarithm."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _one_of(draw: random.Random, often: Mapping[_T, int]) -> _T:
    return draw.choices(list(often), list(often.values()))[0]
