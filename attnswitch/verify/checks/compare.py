"""Results held against exact values, or against each other, element by element; the worst element is reported."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.verify.outcome import Failure
from attnswitch.verify.truth.exact import Exact

__all__ = ["Ratios", "alike", "elements", "identical", "largest"]

#: The worst error / bound of a result, and the element it is at.
Ratios = dict[str, tuple[float, tuple[int, ...]]]

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": np.inf}


def largest(exact: Exact, key: str) -> float:
    """The largest finite number of the type that result ``key`` has."""
    case = exact.case
    if key == "lse":
        return np.inf
    if key == "sinks":
        return _LARGEST[case.heads_dtype(case.sinks)]
    return _LARGEST[case.mask.dtype if key == "attn_mask" and case.mask else case.dtype]


def elements(exact: Exact, results: dict[str, Any], limits: dict[str, Any]) -> tuple[Failure | None, Ratios]:
    """Every element that is known exactly against its bound; the first failing result, and the worst of each."""
    ratios: Ratios = {}
    failure = None
    for name, result in results.items():
        key = name.removeprefix("grad ")
        if key not in exact.values:
            continue
        value = exact.values[key]
        got = exact.part(result, key).reshape(value.shape)
        found, ratio, where = _result(exact, name, got, limits[key])
        ratios[name] = ratio, exact.place(where, key)
        failure = failure or found
    return failure, ratios


def _result(exact: Exact, name: str, got: Any, limit: Any) -> tuple[Failure | None, float, tuple[int, ...]]:
    key = name.removeprefix("grad ")
    value, poisoned = exact.values[key], exact.poisoned.get(key)
    if got.size == 0:
        return None, 0.0, ()
    if poisoned is not None and np.isfinite(got[poisoned]).any():
        where = _first(poisoned & np.isfinite(got))
        message = "a visible NaN or inf left no trace"
        return Failure("reference", message, name, exact.place(where, key), float(got[where])), np.inf, where
    with np.errstate(all="ignore"):
        overflows = np.abs(value) + limit >= largest(exact, key)
        error = np.where(got == value, 0.0, np.abs(got - value))
        error = np.where(np.isnan(error), np.inf, error)
        error = np.where(np.isinf(got) & overflows & (np.sign(got) == np.sign(value)), 0.0, error)
        clean = error > 0 if poisoned is None else (error > 0) & ~poisoned
        ratio = np.where(clean, np.where(np.isinf(error), np.inf, error / limit), 0.0)
    where = tuple(int(n) for n in np.unravel_index(int(ratio.argmax()), ratio.shape))
    worst = float(ratio[where])
    if worst <= 1.0:
        return None, worst, where
    count = int((ratio > 1.0).sum())
    kind = "" if np.isfinite(got[where]) else ", some not finite"
    message = f"{count} of {got.size} elements are off by more than rounding explains{kind}"
    numbers = float(got[where]), float(value[where]), float(limit[where])
    return Failure("reference", message, name, exact.place(where, key), *numbers), worst, where


def _first(flags: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in np.unravel_index(int(np.argmax(flags)), flags.shape))


def alike(check: str, result: str, got: Any, expected: Any, limit: Any, message: str) -> Failure | None:
    """Two arrays that may differ by ``limit``; equal infinities and NaN in both places are alike."""
    if got.size == 0:
        return None
    with np.errstate(all="ignore"):
        same = (got == expected) | (np.isnan(got) & np.isnan(expected)) | (np.abs(got - expected) <= limit)
    if same.all():
        return None
    with np.errstate(all="ignore"):
        excess = np.where(same, 0.0, np.nan_to_num(np.abs(got - expected) / np.maximum(limit, 1e-300), nan=np.inf))
    where = _first(excess == excess.max())
    limit = np.broadcast_to(limit, got.shape)
    numbers = float(got[where]), float(np.broadcast_to(expected, got.shape)[where]), float(limit[where])
    return Failure(check, f"{message} ({int((~same).sum())} of {got.size} elements)", result, where, *numbers)


def identical(check: str, result: str, got: Any, expected: Any, message: str) -> Failure | None:
    """Two arrays that have the same bits; NaN is like NaN."""
    return alike(check, result, got, expected, 0.0, message)
