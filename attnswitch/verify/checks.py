"""One case on one backend: run it through the public calls, compare every element with its bound, give a verdict."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import attnswitch
from attnswitch import arrays, registry
from attnswitch.backend import Precision
from attnswitch.device import Device
from attnswitch.errors import BackendUnavailable, Unsupported
from attnswitch.philox import keep_mask
from attnswitch.verify import bounds, layouts, oracle, rows
from attnswitch.verify.case import Case
from attnswitch.verify.data import operands
from attnswitch.verify.oracle import Answer

__all__ = ["AUTO", "Failure", "Outcome", "Verdict", "check", "examine"]

Verdict = Literal["verified", "mismatch", "refused", "unavailable"]

#: Stands for the dispatcher's own choice among the backends.
AUTO = "auto"
_FINITE = "ATTNSWITCH_CHECK_FINITE"


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
class Outcome:
    """The verdict on one case and backend. ``ratios`` holds the worst error / bound of each result."""

    case: Case
    backend: str
    device: str
    verdict: Verdict
    chosen: str | None = None
    reasons: tuple[str, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """The arrays of a case as the caller holds them."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    key_lengths: Any
    grad_out: Any
    grad_lse: Any


def check(case: Case, backend: str, device: str = "cpu") -> Outcome:
    """Run ``case`` with ``backend`` (or ``AUTO``) on ``device`` and judge what comes back."""
    return examine(case, (backend,), device)[0]


def examine(case: Case, backends: Sequence[str], device: str = "cpu") -> list[Outcome]:
    """``check`` with several backends, which share the reference.

    Every candidate runs first: a reference cannot have left the right answer in memory for one to find.
    """
    data = operands(case)
    ran = [_attempt(case, data, backend, device) for backend in backends]
    answer = None
    if not (case.dropout and case.dropout_seed is None) and any(isinstance(run, _Run) for run in ran):
        answer = oracle.answer(case, data, _kept(case, None))
        rows.cross_check(data, answer)
    outcomes = []
    limits: dict[Precision, dict[str, Any]] = {}
    for run in ran:
        if isinstance(run, Outcome):
            outcomes.append(run)
            continue
        failure = _first(_form(case, run.placed, run.results), _unchanged(case, data, run.placed))
        ratios: dict[str, float] = {}
        if failure is None:
            mine = answer
            if mine is None:  # the dropout mask is the backend's own, and read off its output
                mine = oracle.answer(case, data, _kept(case, run.results))
                rows.cross_check(data, mine)
                limits = {}
            precision = _precision(run.chosen, run.placed, case)
            if precision not in limits:
                limits[precision] = bounds.bounds(mine, precision)
            failure, ratios = _compare(mine, run.results, limits[precision])
            if failure is None and answer is None:
                failure = _plausible(mine)
        verdict: Verdict = "mismatch" if failure else "verified"
        outcomes.append(Outcome(case, run.backend, device, verdict, run.chosen, (), ratios, failure))
    return outcomes


@dataclass(frozen=True, slots=True)
class _Run:
    """What one backend returned."""

    backend: str
    chosen: str
    placed: _Placed
    results: dict[str, Any]


def _attempt(case: Case, data: dict[str, Any], backend: str, device: str) -> _Run | Outcome:
    placed = _place(case, data, device)
    forced = None if backend == AUTO else backend
    # Poison is only refused where it is looked for; on a GPU that is the user's decision, and here it is ours.
    before = os.environ.get(_FINITE)
    if case.poison:
        os.environ[_FINITE] = "always"
    try:
        results, chosen = _run(case, placed, forced)
    except Unsupported as refusal:
        return Outcome(case, backend, device, "refused", reasons=_reasons(refusal, forced))
    except BackendUnavailable as absence:
        return Outcome(case, backend, device, "unavailable", reasons=(str(absence),))
    except Exception as error:  # whatever a kernel raises is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        crash = Failure("crash", f"{type(error).__name__}: {error} ({last.name})")
        return Outcome(case, backend, device, "mismatch", forced, failure=crash)
    finally:
        os.environ.pop(_FINITE, None)
        if before is not None:
            os.environ[_FINITE] = before
    return _Run(backend, chosen, placed, results)


def _reasons(refusal: Unsupported, backend: str | None) -> tuple[str, ...]:
    plan = refusal.plan
    if plan is None:
        return (str(refusal),)
    return tuple(
        reason
        for candidate in plan.candidates
        if backend in (None, candidate.backend)
        for reason in plan.why_not(candidate)
    )


# -- running -----------------------------------------------------------------------------------------------------------


def _place(case: Case, data: dict[str, Any], device: str) -> _Placed:
    def place(role: str, dtype: str, placing: str) -> Any:
        placed = layouts.place(data[role], dtype, placing, case.library, device)
        return placed

    made = {
        role: place(role, case.dtype, getattr(case.placing, role)) for role in ("query", "key", "value", "grad_out")
    }
    if case.layout == "BLHD":
        made = {role: array.swapaxes(1, 2) for role, array in made.items()}
    mask = None
    if case.mask is not None:
        mask = place("attn_mask", case.mask.dtype, case.placing.attn_mask)
        mask = mask[(0,) * (4 - case.mask.rank)] if case.mask.rank < 4 else mask
    lengths = None
    if case.lengths is not None:
        lengths = np.array(case.lengths, dtype=np.int32)
        if case.library != "numpy":
            lengths = arrays.passage(arrays.passage(lengths, "numpy", "torch").to(device), "torch", case.library)
    grad_lse = layouts.place(
        data["grad_lse"], "float64" if case.dtype == "float64" else "float32", "contiguous", case.library, device
    )
    return _Placed(made["query"], made["key"], made["value"], mask, lengths, made["grad_out"], grad_lse)


def _options(case: Case, placed: _Placed) -> dict[str, Any]:
    return {
        "attn_mask": placed.attn_mask,
        "dropout_p": case.dropout,
        "is_causal": case.causal,
        "scale": case.scale,
        "causal_alignment": case.alignment,
        "window": case.window,
        "softcap": case.softcap,
        "key_lengths": placed.key_lengths,
        "layout": case.layout,
        "seed": case.dropout_seed,
    }


def _run(case: Case, placed: _Placed, backend: str | None) -> tuple[dict[str, Any], str]:
    """Results by name, as the caller's arrays in (B, H, L, D) order, and the backend that made them."""
    if case.library == "torch":
        return _run_autograd(case, placed, backend)
    options = _options(case, placed)
    operands = (placed.query, placed.key, placed.value)
    chosen = backend or str(attnswitch.plan(*operands, **options, return_lse=case.lse).backend)
    out = attnswitch.attention(*operands, **options, return_lse=case.lse, backend=backend)
    results: dict[str, Any] = {"out": out[0], "lse": out[1]} if case.lse else {"out": out}
    if case.grads:
        grads = attnswitch.attention_backward(
            placed.grad_out,
            *operands,
            **options,
            grad_lse=placed.grad_lse if case.lse else None,
            mask_grad="m" in case.grads,
            backend=backend,
        )
        results |= {f"grad {name}": grad for name, grad in grads._asdict().items() if grad is not None}
    return _heads_first(case, results), chosen


def _run_autograd(case: Case, placed: _Placed, backend: str | None) -> tuple[dict[str, Any], str]:
    torch: Any = importlib.import_module("torch")
    if case.dropout and case.dropout_seed is None:  # torch's own generator draws
        torch.manual_seed(case.data_seed)
    named = {"query": placed.query, "key": placed.key, "value": placed.value, "attn_mask": placed.attn_mask}
    wanted = [name for letter, name in zip("qkvm", named, strict=True) if letter in case.grads]
    leaves: dict[str, Any] = {name: tensor.detach() if tensor is not None else None for name, tensor in named.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    options = _options(case, placed) | {"attn_mask": leaves["attn_mask"]}
    operands = (leaves["query"], leaves["key"], leaves["value"])
    chosen = backend or str(attnswitch.plan(*operands, **options, return_lse=case.lse).backend)
    out = attnswitch.attention(*operands, **options, return_lse=case.lse, backend=backend)
    outputs = list(out) if case.lse else [out]
    results: dict[str, Any] = dict(zip(("out", "lse"), outputs, strict=False))
    if wanted:
        upstream = [placed.grad_out, placed.grad_lse][: len(outputs)]
        differentiable = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
        grads = torch.autograd.grad(
            [o for o, _ in differentiable], [leaves[name] for name in wanted], [g for _, g in differentiable]
        )
        results |= {f"grad {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    if device_of(placed.query) != "cpu":
        torch.cuda.synchronize()
    return _heads_first(case, {name: r.detach() for name, r in results.items()}), chosen


def device_of(array: Any) -> str:
    """``"cpu"`` or the kind of accelerator that an array is on."""
    return arrays.facts(array, "array").device[0]


def _heads_first(case: Case, results: dict[str, Any]) -> dict[str, Any]:
    if case.layout == "BHLD":
        return results
    swapped = ("out", "grad query", "grad key", "grad value")
    return {name: r.swapaxes(1, 2) if name in swapped else r for name, r in results.items()}


def _precision(chosen: str, placed: _Placed, case: Case) -> Precision:
    backend = registry.load(chosen)
    assert not isinstance(backend, str)
    return backend.precision(case.problem(), Device.of(*arrays.facts(placed.query, "query").device))


# -- judging -----------------------------------------------------------------------------------------------------------


def _first(*failures: Failure | None) -> Failure | None:
    return next((failure for failure in failures if failure is not None), None)


def _expected_form(case: Case, placed: _Placed) -> dict[str, tuple[tuple[int, ...], str]]:
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


def _form(case: Case, placed: _Placed, results: dict[str, Any]) -> Failure | None:
    """Library, device, shape and dtype of every result."""
    where = arrays.facts(placed.query, "query")
    expected = _expected_form(case, placed)
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


def _unchanged(case: Case, data: dict[str, Any], placed: _Placed) -> Failure | None:
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


def _kept(case: Case, results: dict[str, Any] | None) -> Any:
    """The dropout mask of the case: by the seed, or read off the output, which is the dropped softmax where V = I."""
    if not case.dropout:
        return None
    b, h, lq, lk = case.scores
    if case.dropout_seed is None:
        assert results is not None
        return _host(results["out"])[..., :lk] != 0.0
    batch, head, row = np.ogrid[:b, :h, :lq]
    return keep_mask(case.dropout_seed, case.dropout, batch, head, row, 0, lk)


def _plausible(answer: Answer) -> Failure | None:
    """The share of kept weights, among those too large to vanish by rounding, is what dropout_p says (6 sigma)."""
    case = answer.case
    heavy = answer.visible & (answer.p > 1e-4)
    n, p = int(heavy.sum()), case.dropout
    kept = int((heavy & (answer.z > 0)).sum())
    if abs(kept - n * (1 - p)) > 6 * (n * p * (1 - p)) ** 0.5 + 1:
        return Failure("dropout share", f"{kept} of {n} weights were kept with dropout_p={p}")
    return None


def _compare(
    answer: Answer, results: dict[str, Any], limits: dict[str, Any]
) -> tuple[Failure | None, dict[str, float]]:
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
