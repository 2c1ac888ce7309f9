"""Gradients where output and lse are given, which may be of more keys than the operands have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .masks import SATURATED, Hiding

__all__ = ["Given", "composite", "log_sum", "no_state", "of_group", "relative"]


class Given(NamedTuple):
    """What a backward is computed from: operands that fit the operator, what hides, results, the upstream gradient.

    ``launch`` is the operator's forward.
    """

    query: Any
    key: Any
    value: Any
    hiding: Hiding
    out: Any
    lse: Any
    grad_out: Any
    launch: Callable[[Hiding], Callable[..., tuple[Any, Any]]]


def relative(given: Given, *, renewed: bool) -> Any:
    """The lse that an operator is given beside the mask of ``hiding``: without its lift, inf where a row has no weight.

    A row that sees none of the keys here has none, nor has one that sees nothing at all: exp(s - inf) is 0. Where a
    float mask is far from 0, the digits that lse lacks are ``renewed`` by the operator's forward, unless the row counts
    keys that are not here: then its lse differs by more than its rounding, and is taken as it is.
    """
    wide = torch.float64 if given.query.dtype == torch.float64 else torch.float32
    lse, lift = given.lse.to(wide), given.hiding.lift
    if lift is None:  # no mask, so that every row sees a key
        return lse.contiguous()
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    rest = lse - lift
    if renewed:
        own = given.launch(given.hiding)(given.query, given.key, given.value)[1]
        rest = torch.where((lift.abs() > SATURATED) & _as_far(own, rest, lse), own, rest)
    return rest.contiguous()


@functools.cache
def no_state(device: torch.device) -> tuple[Any, ...]:
    """Seed and offset of a generator, for operators that are told of no dropout."""
    with torch.inference_mode(mode=False):
        return tuple(torch.empty(2, 0, dtype=torch.int64, device=device).unbind())


def composite(problem: Problem, mask: Any, given: Given) -> tuple[Any, ...]:
    """The formula, by matrix products of whole heads; ``mask`` is added to the scores, or None."""
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    q, k, v, out, do, lse = (
        x.to(kind) for x in (given.query, given.key, given.value, given.out, given.grad_out, given.lse)
    )
    if problem.group > 1:
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    s = (q @ k.mT).mul_(problem.softmax_scale)
    if mask is not None:
        s += mask
    p = s.sub_(_base(s, lse, relative(given, renewed=False).to(kind))).exp_()
    ds = do @ v.mT
    ds.sub_((do * out).sum(-1, keepdim=True)).mul_(p)
    dmask = None
    if "m" in problem.grads:
        spans = problem.mask_shape or ()
        dmask = ds.sum_to_size(*spans).to(getattr(torch, problem.mask.dtype))  # type: ignore[union-attr]
    dq, dk, dv = ds @ k * problem.softmax_scale, ds.mT @ q * problem.softmax_scale, p.mT @ do
    dk, dv = (of_group(problem, x) for x in (dk, dv))
    return *(x.to(given.query.dtype) for x in (dq, dk, dv)), dmask


def log_sum(problem: Problem, hiding: Hiding, inputs: Inputs) -> Any:
    """The lse of every row, by a matrix product of whole heads."""
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    q, k = inputs.query.to(kind), inputs.key.to(kind)
    if problem.group > 1:
        k = k.repeat_interleave(problem.group, 1)
    s = (q @ k.mT).mul_(problem.softmax_scale)
    if hiding.mask is not None:
        s += hiding.mask
    lse = s.logsumexp(-1)
    return lse if hiding.lift is None else lse + hiding.lift


def of_group(problem: Problem, grad: Any) -> Any:
    """Gradients of query heads summed over those that share a key head, (B, Hkv, Lk, D)."""
    return grad if problem.group == 1 else grad.unflatten(1, (problem.heads_kv, problem.group)).sum(2)


def _base(s: Any, lse: Any, rest: Any) -> Any:
    """What to take from scores so that exp gives the weights: ``rest``, which is lse for a mask without its lift.

    Where lse is far from 0, the maximum is taken from ``s``, and what is left to take is the log of the sum.
    """
    base = rest[..., None]
    if s.device.type == "cpu" and not bool((lse.abs() > SATURATED).any()):  # elsewhere asking would wait
        return base
    lse = lse[..., None]
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (s - top).exp_().sum(-1, keepdim=True).log_()
    own = (lse.abs() > SATURATED) & _as_far(total, base - top, lse)
    s.sub_(torch.where(own, top, 0.0))  # in two steps, since their sum has no digits left for the second
    return torch.where(own, total, base)


def _as_far(own: Any, other: Any, lse: Any) -> Any:
    """Whether two statistics are one but for the rounding of ``lse``."""
    return ((own - other).abs() <= 4 * torch.finfo(lse.dtype).eps * lse.abs()) & lse.isfinite()
