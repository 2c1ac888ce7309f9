"""The ways to call a row: torch's own call, held to a kernel or not, each backend, the choice of ``auto``, a plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnswitch
from attnswitch.bench.overhead.operands import Feed, Operands
from attnswitch.bench.overhead.rows import Row
from attnswitch.machine import registry
from attnswitch.planning.plan import Plan
from attnswitch.problem import Problem

__all__ = ["AUTO", "PLAN", "TORCH", "Way", "ways"]

#: torch left to choose, the dispatcher left to choose, and a plan that was made before.
TORCH, AUTO, PLAN = "torch", "auto", "plan"
#: How torch calls the kernels that backends have of it.
_KERNELS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to call: of what a ``Source`` gives it makes a call that is ready to run, ``within`` a context.

    ``beside`` names the way that it is set against: torch's own call of the same kernel, else of torch's own choice;
    of a first call itself as it comes again.
    """

    of: Callable[[Any], Callable[[], Any]]
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    beside: str | None = None


def ways(row: Row, feed: Feed, backends: Sequence[str] = ()) -> dict[str, Way]:
    """The ways to call ``row`` by name, of every backend that takes torch's tensors, or of ``backends``.

    torch's own call is left out where the kernel that it is held to does not take the row.
    """
    p = row.problem
    keywords, more = _keywords(p), _ours(p)
    query, key, value, mask = feed.first
    plan = attnswitch.plan(query, key, value, attn_mask=mask, **keywords, **more)
    own = _caller(scaled_dot_product_attention, **keywords, **({"enable_gqa": True} if p.group > 1 else {}))
    made = {TORCH: Way(own)}
    for name in backends or _taking(plan):
        beside = f"{TORCH}, {name}"
        if name in _KERNELS:
            held = Way(own, functools.partial(sdpa_kernel, _KERNELS[name]))
            if _runs(held, feed.first):
                made[beside] = held
        made[name] = Way(
            _caller(attnswitch.attention, backend=name, **keywords, **more), beside=beside if beside in made else TORCH
        )
    chosen = made.get(plan.backend or "")
    beside = TORCH if chosen is None or chosen.beside is None else chosen.beside
    made[AUTO] = Way(_caller(attnswitch.attention, **keywords, **more), beside=beside)
    if row.new != "length":  # a plan is for one number of keys
        made[PLAN] = Way(_caller(plan), beside=beside)
    if row.step:
        made = {name: Way(_stepping(way.of, feed), way.within, way.beside) for name, way in made.items()}
    return made


def _caller(call: Callable[..., Any], **keywords: Any) -> Callable[[Operands], Callable[[], Any]]:
    """What makes a call of operands, as a user writes it: a mask is named where there is one."""

    def of(operands: Operands) -> Callable[[], Any]:
        mask = {} if operands.attn_mask is None else {"attn_mask": operands.attn_mask}
        return functools.partial(call, *operands[:3], **mask, **keywords)

    return of


def _stepping(of: Callable[[Operands], Callable[[], Any]], feed: Feed) -> Callable[[Operands], Callable[[], Any]]:
    """The same with the gradients of the row."""

    def step(call: Callable[[], Any]) -> Any:
        return torch.autograd.grad(call(), feed.leaves, feed.grad_out)

    return lambda operands: functools.partial(step, of(operands))


def _keywords(p: Problem) -> dict[str, Any]:
    """The keywords that say something, in torch's own call and in ours alike."""
    causal = p.causal and not p.sees_all  # torch's own is aligned to the top left
    return _saying(is_causal=causal, dropout_p=p.dropout, scale=p.scale)


def _ours(p: Problem) -> dict[str, Any]:
    """The keywords beside, which torch's own call does not have or has no need of."""
    return _saying(
        is_causal=p.sees_all,
        causal_alignment=None if p.alignment == "top_left" else p.alignment,
        deterministic=p.deterministic,
    )


def _saying(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value not in (False, None)}


def _taking(plan: Plan) -> list[str]:
    """The backends that take the problem, as torch's tensors."""
    names = [candidate.backend for candidate in plan.candidates if candidate.to_try(())]
    return [name for name in names if registry.loaded(name).native("torch") == "torch"]


def _runs(way: Way, operands: Operands) -> bool:
    try:
        with way.within():
            way.of(operands)()
    except RuntimeError:  # no kernel of this kind takes it: backends may do more than torch's own call
        return False
    return True
