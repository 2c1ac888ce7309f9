"""The launch of torch's operators that take whatever is hidden as an additive mask: cuDNN's, and the efficient one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnswitch.machine.backend import Forward, Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import compose, masks
from .arguments import Operator, told
from .backward import Given, no_state, relative
from .base import Compose, Launch
from .hooks import with_aligned_gradient
from .masks import Hiding
from .operands import bias

__all__ = ["composer", "direct", "gradients", "launcher"]


def launcher(problem: Problem, operator: Operator, *, always_lse: bool = False) -> Launch:
    """``operator`` on ``problem``. Its lse is (B, Hq, Lq or more), or has a last axis of length 1.

    It computes one where the problem asks for it, where there are gradients, since the backward needs it even for that
    of the mask alone, and where ``always_lse`` says so.
    """
    scores, asked = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k), problem.lse
    with_lse = asked or bool(problem.grads) or always_lse

    def launch(hiding: Hiding) -> Forward:
        mask = hiding.mask
        call = told(operator, problem, hiding.causal)
        if mask is None and not with_lse:
            return lambda query, key, value: (call(query, key, value, None, False)[0], None)

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            added = None if mask is None else bias(mask, query, scores)
            results = call(query, key, value, added, with_lse)
            lse = results[1].flatten(2)[..., : scores[2]] if asked else None
            return with_aligned_gradient(results[0]), lse

        return launched

    return launch


def composer(problem: Problem, device: Device) -> Compose:
    """What makes the bias: one kernel, where there is Triton."""
    if device.kind == "cuda" and compose.available():
        return compose.Composer(problem, device)
    return functools.partial(masks.compose, problem)


def direct(problem: Problem, operator: Operator, composed: Compose, *, always_lse: bool = False) -> Forward | None:
    """Output, and no lse, of operands that fit, and a mask; None where there is an lse to be made."""
    if problem.lse:
        return None
    call, with_lse, grads = told(operator, problem, False), bool(problem.grads) or always_lse, bool(problem.grads)
    scores = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)

    def launched(query: Any, key: Any, value: Any, attn_mask: Any = None) -> tuple[Any, Any]:
        hiding = composed(Inputs(query, key, value, attn_mask))
        out = call(query, key, value, bias(hiding.mask, query, scores), with_lse)[0]
        if grads:
            return with_aligned_gradient(out).masked_fill(hiding.dead, 0.0), None
        return out.masked_fill_(hiding.dead, 0.0), None

    return launched


def gradients(
    problem: Problem, given: Given, operator: Operator, backward: Callable[..., tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Gradients by the ``backward`` of ``operator``, of problem, ``given``, bias, lse and the state of no generator."""
    mask = given.hiding.mask
    scores = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)
    added = None if mask is None else bias(mask, given.query, scores)
    if problem.adds_mask:
        given = given._replace(launch=launcher(problem.replace(lse=True), operator))
    grads = backward(problem, given, added, relative(given, renewed=problem.adds_mask), no_state(given.query.device))
    if "m" not in problem.grads:
        return grads
    dmask = grads[3][..., : problem.seq_k].sum_to_size(*problem.mask_shape or ())
    return *grads[:3], dmask.to(getattr(torch, problem.mask.dtype))  # type: ignore[union-attr]
