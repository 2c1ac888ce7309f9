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
from attnswitch.verify import bounds, layouts, oracle, rows
from attnswitch.verify.case import Case
from attnswitch.verify.compare import Failure, Placed, compare, first_of, form, kept, plausible, unchanged
from attnswitch.verify.data import operands

__all__ = ["AUTO", "Failure", "Outcome", "Verdict", "check", "examine"]

Verdict = Literal["verified", "mismatch", "refused", "unavailable"]

#: Stands for the dispatcher's own choice among the backends.
AUTO = "auto"
_FINITE = "ATTNSWITCH_CHECK_FINITE"


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


def check(case: Case, backend: str, device: str = "cpu") -> Outcome:
    """Run ``case`` with ``backend`` (or ``AUTO``) on ``device`` and judge what comes back."""
    return examine(case, (backend,), device)[0]


def examine(case: Case, backends: Sequence[str], device: str = "cpu") -> list[Outcome]:
    """``check`` with several backends, which share the reference.

    Every candidate runs first: a reference cannot have left the right answer in memory for one to find.
    """
    for backend in backends:
        if backend != AUTO:
            registry.load(backend)  # an unknown name is the caller's mistake, not a finding
    data = operands(case)
    ran = [_attempt(case, data, backend, device) for backend in backends]
    answer = None
    if not (case.dropout and case.dropout_seed is None) and any(isinstance(run, _Run) for run in ran):
        answer = oracle.answer(case, data, kept(case, None))
        rows.cross_check(data, answer)
    outcomes = []
    limits: dict[Precision, dict[str, Any]] = {}
    for run in ran:
        if isinstance(run, Outcome):
            outcomes.append(run)
            continue
        failure = first_of(form(case, run.placed, run.results), unchanged(case, data, run.placed))
        ratios: dict[str, float] = {}
        if failure is None:
            mine = answer
            if mine is None:  # the dropout mask is the backend's own, and read off its output
                mine = oracle.answer(case, data, kept(case, run.results))
                rows.cross_check(data, mine)
                limits = {}
            precision = _precision(run.chosen, run.placed, case)
            if precision not in limits:
                limits[precision] = bounds.bounds(mine, precision)
            failure, ratios = compare(mine, run.results, limits[precision])
            if failure is None and answer is None:
                failure = plausible(mine)
        verdict: Verdict = "mismatch" if failure else "verified"
        outcomes.append(Outcome(case, run.backend, device, verdict, run.chosen, (), ratios, failure))
    return outcomes


@dataclass(frozen=True, slots=True)
class _Run:
    """What one backend returned."""

    backend: str
    chosen: str
    placed: Placed
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


def _place(case: Case, data: dict[str, Any], device: str) -> Placed:
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
    return Placed(made["query"], made["key"], made["value"], mask, lengths, made["grad_out"], grad_lse)


def _options(case: Case, placed: Placed) -> dict[str, Any]:
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


def _run(case: Case, placed: Placed, backend: str | None) -> tuple[dict[str, Any], str]:
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
    return _headsfirst_of(case, results), chosen


def _run_autograd(case: Case, placed: Placed, backend: str | None) -> tuple[dict[str, Any], str]:
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
    return _headsfirst_of(case, {name: r.detach() for name, r in results.items()}), chosen


def device_of(array: Any) -> str:
    """``"cpu"`` or the kind of accelerator that an array is on."""
    return arrays.facts(array, "array").device[0]


def _headsfirst_of(case: Case, results: dict[str, Any]) -> dict[str, Any]:
    if case.layout == "BHLD":
        return results
    swapped = ("out", "grad query", "grad key", "grad value")
    return {name: r.swapaxes(1, 2) if name in swapped else r for name, r in results.items()}


def _precision(chosen: str, placed: Placed, case: Case) -> Precision:
    backend = registry.load(chosen)
    assert not isinstance(backend, str)
    return backend.precision(case.problem(), Device.of(*arrays.facts(placed.query, "query").device))
