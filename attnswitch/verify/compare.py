"""What came back, held against what was asked for: form, inputs, and every element against its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnswitch import arrays
from attnswitch.philox import keep_mask
from attnswitch.verify.case import Case
from attnswitch.verify.oracle import Answer

__all__ = ["Failure", "Placed", "compare", "first_of", "form", "kept", "plausible", "unchanged"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first property that a result broke."""

    check: (
        str  # "out", "lse", a gradient ("grad query"), "shape", "dtype", "library", "nonfinite ...", "inputs", "crash"
    )
    message: str
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The arrays of a case as the caller holds them."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    key_lengths: Any
    grad_out: Any
    grad_lse: Any


def first_of(*failures: Failure | None) -> Failure | None:
    """The first that is one."""
    return next((failure for failure in failures if failure is not None), None)


def _expectedform(case: Case, placed: Placed) -> dict[str, tuple[tuple[int, ...], str]]:
    b, h, lq, lk = case.scores
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"out": ((b, h, lq, case.dim_v), case.dtype)}
    if case.lse:
        shapes["lse"] = ((b, h, lq), "float64" if case.dtype == "float64" else "float32")
    every = case.library != "torch"  # attention_backward gives all three
    for letter, name, shape in (
        ("q", "query", (b, h, lq, case.dim_qk)),
        ("k", "key", (b, case.heads_kv, lk, case.dim_qk)),
        ("v", "value", (b, case.heads_kv, lk, case.dim_v)),
    ):
        if letter in case.grads or (every and case.grads):
            shapes[f"grad {name}"] = (shape, case.dtype)
    if "m" in case.grads and case.mask is not None:
        shapes["grad attn_mask"] = (tuple(placed.attn_mask.shape), case.mask.dtype)
    return shapes


def form(case: Case, placed: Placed, results: dict[str, Any]) -> Failure | None:
    """Library, device, shape and dtype of every result."""
    where = arrays.facts(placed.query, "query")
    expected = _expectedform(case, placed)
    if missing := expected.keys() ^ results.keys():
        return Failure("shape", f"results {sorted(missing)} are missing or were not asked for")
    for name, (shape, dtype) in expected.items():
        facts = arrays.facts(results[name], name)
        for what, got, wanted in (
            ("library", facts.library, where.library),
            ("device", facts.device, where.device),
            ("shape", facts.shape, shape),
            ("dtype", facts.dtype, dtype),
        ):
            if got != wanted:
                return Failure(what, f"{name} has {what} {got}, expected {wanted}")
    return None


def unchanged(case: Case, data: dict[str, Any], placed: Placed) -> Failure | None:
    """The inputs still hold what they were made with."""
    held = {role: getattr(placed, role) for role in ("query", "key", "value", "grad_out")}
    if case.layout == "BLHD":
        held = {role: array.swapaxes(1, 2) for role, array in held.items()}
    if placed.attn_mask is not None:
        held["attn_mask"] = placed.attn_mask
    for role, array in held.items():
        if not np.array_equal(_host(array), data[role].reshape(array.shape), equal_nan=True):
            return Failure("inputs", f"{role} was written to")
    if placed.key_lengths is not None and tuple(_host(placed.key_lengths)) != case.lengths:
        return Failure("inputs", "key_lengths was written to")
    return None


def _host(array: Any) -> Any:
    """An array of any library and device as float64 (or bool) in NumPy."""
    library = arrays.library_of(array)
    if library != "numpy":
        array = arrays.passage(arrays.passage(array, library, "torch").detach().cpu(), "torch", "numpy")
    return array if array.dtype == np.bool_ else array.astype(np.float64)


def kept(case: Case, results: dict[str, Any] | None) -> Any:
    """The dropout mask of the case: by the seed, or read off the output, which is the dropped softmax where V = I."""
    if not case.dropout:
        return None
    b, h, lq, lk = case.scores
    if case.dropout_seed is None:
        assert results is not None
        return _host(results["out"])[..., :lk] != 0.0
    batch, head, row = np.ogrid[:b, :h, :lq]
    return keep_mask(case.dropout_seed, case.dropout, batch, head, row, 0, lk)


def plausible(answer: Answer) -> Failure | None:
    """The share of kept weights, among those too large to vanish by rounding, is what dropout_p says (6 sigma)."""
    case = answer.case
    heavy = answer.visible & (answer.p > 1e-4)
    n, p = int(heavy.sum()), case.dropout
    kept = int((heavy & (answer.z > 0)).sum())
    if abs(kept - n * (1 - p)) > 6 * (n * p * (1 - p)) ** 0.5 + 1:
        return Failure("dropout share", f"{kept} of {n} weights were kept with dropout_p={p}")
    return None


def compare(answer: Answer, results: dict[str, Any], limits: dict[str, Any]) -> tuple[Failure | None, dict[str, float]]:
    """Every element against its bound; the first failing result, and the worst error / bound of each."""
    ratios: dict[str, float] = {}
    failure = None
    for name, array in results.items():
        key = name.removeprefix("grad ")
        got, exact, limit = _host(array), answer.values[key], limits[key]
        got = got.reshape(exact.shape)
        found, ratio = _elements(name, got, exact, limit, answer.poisoned.get(key), answer.case, key)
        ratios[name] = ratio
        failure = failure or found
    return failure, ratios


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": np.inf}


def _elements(
    name: str, got: Any, exact: Any, limit: Any, poisoned: Any, case: Case, key: str
) -> tuple[Failure | None, float]:
    if got.size == 0:
        return None, 0.0
    clean = np.ones(got.shape, np.bool_) if poisoned is None else ~poisoned
    if poisoned is not None and np.isfinite(got[poisoned]).any():
        where = _index(poisoned & np.isfinite(got))
        return Failure(f"nonfinite {name}", "a visible NaN or inf left no trace", where, float(got[where])), np.inf
    dtype = "float64" if key == "lse" else (case.mask.dtype if key == "attn_mask" and case.mask else case.dtype)
    overflows = np.abs(exact) + limit >= _LARGEST[dtype]
    with np.errstate(all="ignore"):
        error = np.where(got == exact, 0.0, np.abs(got - exact))
        error = np.where(np.isnan(error), np.inf, error)
        error = np.where(np.isinf(got) & overflows & (np.sign(got) == np.sign(exact)), 0.0, error)
        ratio = np.where(clean & (error > 0), np.where(np.isinf(error), np.inf, error / limit), 0.0)
    worst = float(ratio.max())
    if worst <= 1.0:
        return None, worst
    where = tuple(int(n) for n in np.unravel_index(int(ratio.argmax()), ratio.shape))
    check = name if np.isfinite(got[where]) else f"nonfinite {name}"
    count = int((ratio > 1.0).sum())
    message = f"{count} of {got.size} elements are off by more than rounding explains"
    return Failure(check, message, where, float(got[where]), float(exact[where]), float(limit[where])), worst


def _index(flags: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in np.unravel_index(int(np.argmax(flags)), flags.shape))
