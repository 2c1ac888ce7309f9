"""How the operators are differentiated: the forward by the backward, which is no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnswitch.call.operators.schema import USUAL
from attnswitch.errors import Unsupported
from attnswitch.problem import GRAD_OPERANDS

__all__ = ["differentiated_by", "only_once", "save"]

_USUAL = {**USUAL, "backend": None, "policy": None}
#: How many of an operator's operands are tensors, or None: query, key, value, and three beside them. Numbers follow.
_TENSORS = 6


def save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    """Keep what a derivative needs."""
    ctx.returns_lse = keyword_only_inputs["return_lse"]
    ctx.said = {
        name: given for name, given in keyword_only_inputs.items() if name != "seed" and given != _USUAL.get(name, "")
    }
    ctx.numbers = inputs[_TENSORS:-1]  # the last is a seed that was drawn, which the state is then
    out, lse, state = output
    ctx.save_for_backward(*inputs[:_TENSORS], out, lse, state)
    ctx.mark_non_differentiable(*((state,) if ctx.returns_lse else (lse, state)))
    ctx.set_materialize_grads(False)


def differentiated_by(backward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The derivative of an operator whose gradients the operator ``backward`` gives: None for what has none."""

    def differentiate(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> tuple[Any, ...]:
        *operands, out, lse, state = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        found = backward(grad_out, grad_lse, *operands, *ctx.numbers, out, lse, state, **ctx.said)
        by_name = dict(zip(ctx.said["grads"], found, strict=True))
        gradients = [by_name.get(name) for name in GRAD_OPERANDS]
        return *gradients, *(None for _ in operands[len(gradients) :]), *(None for _ in ctx.numbers), None

    return differentiate


def only_once(ctx: Any, *_: Any) -> Any:
    """Refuse a derivative of a derivative."""
    raise Unsupported(
        "double backward of attention in a graph: the operators compute first derivatives only; use"
        " backend='sdpa-math' without torch.compile"
    )
