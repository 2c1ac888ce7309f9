"""A case by parts of its keys: each is a call, ``merge`` makes one of them, and gradients are by the lse of that."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import attnswitch
from attnswitch import arrays
from attnswitch.errors import Unsupported
from attnswitch.machine import registry
from attnswitch.planning.planner import make_plan
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.parts import ranges
from attnswitch.verify.launch.layouts import passed

__all__ = ["called"]

_LETTERS = {"query": "q", "key": "k", "value": "v"}


def called(case: Case, placed: Any, options: dict[str, Any], backend: str | None) -> tuple[dict[str, Any], str]:
    """Results by name, in the layout of the case, and the backend of all calls; ``options`` are those of one call."""
    axis = 2 if case.layout == "BHLD" else 1
    query, every = placed.query, ranges(case)
    operands = [(query, _cut(placed.key, axis, keys), _cut(placed.value, axis, keys)) for keys in every]
    calls = [options | _of_part(case, placed, every, n) for n in range(len(every))]
    chosen = backend or _chosen(case, operands[0], calls[0])
    if case.grads and not getattr(registry.load(chosen), "restarts", True):  # in the court no kernel is asked
        raise Unsupported(f"gradients of parts: {chosen} starts its backward from an output and lse of its own")
    parts = [
        attnswitch.attention(*of, **call, return_lse=True, backend=chosen)
        for of, call in zip(operands, calls, strict=True)
    ]
    out, lse = attnswitch.merge(*zip(*parts, strict=True), layout=case.layout)
    results = {"out": out, "lse": lse}
    if case.grads:
        whole = {"out": out, "lse": lse, "grad_lse": placed.grad_lse, "backend": chosen}
        grads: list[Any] = [
            attnswitch.attention_backward(
                placed.grad_out, query, k, v, **call, **whole, sinks_grad=call["sinks"] is not None
            )
            for (_, k, v), call in zip(operands, calls, strict=True)
        ]
        found = {
            "query": _summed([of.query for of in grads]),
            "key": _joined([of.key for of in grads], axis),
            "value": _joined([of.value for of in grads], axis),
        }
        every_one = case.library != "torch"
        results |= {f"grad {name}": x for name, x in found.items() if every_one or _LETTERS[name] in case.grads}
        if case.sinks:
            results["grad sinks"] = grads[0].sinks
    return results, chosen


def _chosen(case: Case, operands: tuple[Any, ...], call: dict[str, Any]) -> str:
    """The dispatcher's choice for the first part, which all of them take."""
    plan = attnswitch.plan(*operands, **call, return_lse=True)
    stepping = make_plan(plan.problem.replace(grads=case.grads), plan.device)
    return str(stepping.backend or plan.backend)


def _of_part(case: Case, placed: Any, every: Sequence[slice], n: int) -> dict[str, Any]:
    """How the call of part ``n`` differs from that of all keys. The sinks are in the first."""
    keys = every[n]
    count = keys.stop - keys.start
    mask = placed.attn_mask
    if case.mask is not None and "k" in case.mask.axes:
        mask = mask[..., keys]
    found: dict[str, Any] = {"attn_mask": mask}
    if n:
        found["sinks"] = None
    if case.lengths is not None:
        found["key_lengths"] = [min(max(length - keys.start, 0), count) for length in case.lengths]
    if not (case.causal or case.window is not None):
        return found
    if _in_chunks(case, every):
        return found | {"is_causal": n == len(every) - 1}
    kind, index = arrays.facts(placed.query, "query").device
    seen = passed(case.library, _seen(case)[..., keys], f"{kind}:{index}")
    plain = {"is_causal": False, "window": None, "causal_alignment": "top_left"}
    return found | plain | {"attn_mask": _both(seen, mask)}


def _in_chunks(case: Case, every: Sequence[slice]) -> bool:
    """Whether all queries see all keys but those of the last part: a chunk of a prompt after what came before."""
    aligned = case.alignment == "bottom_right" and case.lengths is None and case.window is None
    return aligned and every[-1].start <= case.seq_k - case.seq_q + 1


def _seen(case: Case) -> Any:
    """Which keys each query sees by its position, (B, 1, Lq, Lk)."""
    lengths = np.array(case.lengths or (case.seq_k,) * case.batch).reshape(-1, 1, 1, 1)
    at = np.arange(case.seq_q)[:, None] + (lengths - case.seq_q if case.alignment == "bottom_right" else 0 * lengths)
    left, right = case.window or (None, None)
    beyond, seen = np.arange(case.seq_k) - at, np.ones((case.batch, 1, case.seq_q, case.seq_k), bool)
    if case.causal:
        seen &= beyond <= 0
    if left is not None:
        seen &= beyond >= -left
    if right is not None:
        seen &= beyond <= right
    return seen


def _both(seen: Any, mask: Any) -> Any:
    """One mask of two."""
    if mask is None:
        return seen
    library = arrays.library_of(mask)
    xp: Any = importlib.import_module(library)
    if str(mask.dtype) in ("bool", "torch.bool"):
        return seen & mask
    if library == "torch":
        return xp.where(seen, mask, xp.full((), -math.inf, dtype=mask.dtype, device=mask.device))
    return xp.where(seen, mask, xp.asarray(-math.inf, dtype=mask.dtype))


def _cut(x: Any, axis: int, keys: slice) -> Any:
    return x[(slice(None),) * axis + (keys,)]


def _joined(parts: Sequence[Any], axis: int) -> Any:
    xp: Any = importlib.import_module(arrays.library_of(parts[0]))
    return xp.cat(parts, axis) if xp.__name__ == "torch" else xp.concatenate(parts, axis)


def _summed(parts: Sequence[Any]) -> Any:
    """In float32 at least, and rounded once."""
    dtype, library = parts[0].dtype, arrays.library_of(parts[0])
    xp: Any = importlib.import_module(library)
    wide = dtype if str(dtype).endswith("float64") else xp.float32
    if library == "torch":
        return sum(part.to(wide) for part in parts).to(dtype)
    return sum(part.astype(wide) for part in parts).astype(dtype)
