"""The precision that a run demands: a level by name or a file, and the stricter of it and what a backend declares.

Each level is a ``Precision``. Types that it calls "storage" are those of the problem.

    fp16, bf16  as FlashAttention computes: sums in float32, weights rounded to storage before they meet V, gradients of
                a shared key head rounded to storage before they are summed, the backward from a stored lse, and the
                exponential of the hardware (ex2.approx, 2^-22)
    tf32        query and key rounded to TF32, weights not rounded; else as fp32
    fp32        float32 throughout, the backward from a stored lse, an exponential that is as good as its type

Of a problem in float64 every level, and every file, demands sums in float64 of operands as they are.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Precision
from attnswitch.names import one_of

__all__ = ["LEVELS", "demanded", "read", "stricter"]

#: Largest relative error of ex2.approx.f32, of NVIDIA's PTX.
_EX2 = 2.0**-22
_TENSOR_CORES = Precision(weights="storage", group_sum="storage", statistics="lse", exp=_EX2)
LEVELS: dict[str, Precision] = {
    "fp16": _TENSOR_CORES,
    "bf16": _TENSOR_CORES,
    "tf32": Precision(score_inputs="tf32", statistics="lse"),
    "fp32": Precision(statistics="lse"),
}
#: The values of each field, the strictest first.
_STRICTEST_FIRST: dict[str, tuple[str, ...]] = {
    "accumulator": ("float64", "float32"),
    "weights": ("accumulator", "storage"),
    "score_inputs": ("storage", "tf32"),
    "group_sum": ("accumulator", "storage"),
    "statistics": ("exact", "lse"),
}
#: Bytes of a file, of which six lines are needed.
_MOST = 2**16


def read(text: str) -> Precision:
    """The level called ``text``, or what the TOML file at the path ``text`` says.

    The file has fields of ``Precision``; one that is left out has its default there. Raises ``InvalidProblem``.
    """
    if text in LEVELS:
        return LEVELS[text]
    path = Path(text)
    if not path.is_file():
        raise InvalidProblem(f"precision {text!r} is not known; {one_of(text, LEVELS, ', or a TOML file')}")
    try:
        made = reading.made(Precision, reading.tables(path, _MOST))
        if not (math.isfinite(made.exp) and 0 <= made.exp < 1):
            raise InvalidProblem(f"exp is {made.exp}: expected a relative error from 0 to below 1")
    except OSError as error:
        raise InvalidProblem(f"{path}: it cannot be read: {error.strerror}") from None
    except InvalidProblem as error:
        raise InvalidProblem(f"{path}: {error}") from None
    return made


def stricter(one: Precision, other: Precision) -> Precision:
    """The stricter of two, field by field."""
    found: dict[str, Any] = {"exp": min(one.exp, other.exp)}
    for name, order in _STRICTEST_FIRST.items():
        found[name] = min(getattr(one, name), getattr(other, name), key=order.index)
    return Precision(**found)


def demanded(declared: Precision, level: Precision | None, dtype: str) -> Precision:
    """What a backend is held to that declares ``declared`` for a problem in ``dtype``, if ``level`` is demanded."""
    if level is None:
        return declared
    if dtype == "float64":
        level = replace(level, accumulator="float64", score_inputs="storage", exp=0.0)
    return stricter(declared, level)


assert _STRICTEST_FIRST.keys() | {"exp"} == {field.name for field in fields(Precision)}
