"""Attention in an autocast region: the operands keep their type, in the forward and in a composite's backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnswitch.machine.backend import Inputs

__all__ = ["available", "shielded"]

#: Output and lse of some inputs.
Compute = Callable[[Inputs], tuple[Any, Any]]


@functools.cache
def available(kind: str) -> str | None:
    """What torch calls this kind of device, if it has autocast regions for it."""
    kind = "cuda" if kind == "rocm" else kind
    return kind if torch.amp.is_autocast_available(kind) else None


def shielded(kind: str, compute: Compute, inputs: Inputs) -> tuple[Any, Any]:
    """``compute`` without autocast. Its backward is run without it too, wherever that is called from.

    A composite's backward is matrix products, which a region around ``backward()`` would cast to its lower type.
    """
    with torch.autocast(kind, enabled=False):
        if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:4])):
            return compute(inputs)
    result: tuple[Any, Any] = _Shielded.apply(kind, compute, inputs, *inputs[:4])
    return result


class _Shielded(torch.autograd.Function):
    """Keeps the graph of a computation to itself, so that both ways through it are taken without autocast."""

    @staticmethod
    def forward(ctx: Any, kind: str, compute: Compute, inputs: Inputs, *operands: Any) -> tuple[Any, Any]:
        """Compute on detached operands, and keep their graph."""
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in operands]
        query, key, value, mask = leaves
        with torch.enable_grad(), torch.autocast(kind, enabled=False):
            again = inputs._replace(query=query, key=key, value=value, attn_mask=mask)
            out, lse = compute(again)
        ctx.kind, ctx.results, ctx.leaves, ctx.compute, ctx.inputs = kind, (out, lse), leaves, compute, inputs
        ctx.save_for_backward(*operands)
        return out.detach(), None if lse is None else lse.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        """Gradients through the graph that was kept; to be differentiated again, through one of the operands."""
        twice = torch.is_grad_enabled()  # create_graph=True
        operands, results = ctx.leaves, ctx.results
        with torch.autocast(ctx.kind, enabled=False):
            if twice:
                operands = ctx.saved_tensors
                query, key, value, mask = operands
                results = ctx.compute(ctx.inputs._replace(query=query, key=key, value=value, attn_mask=mask))
            ends = [n for n, result in enumerate(results) if result is not None and result.requires_grad]
            wanted = [x for x in operands if x is not None and x.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [results[n] for n in ends],
                    wanted,
                    [upstream[n] for n in ends],
                    retain_graph=True,
                    create_graph=twice,
                    materialize_grads=True,
                )
            )
        grads = (next(found) if x is not None and x.requires_grad else None for x in operands)
        return None, None, None, *grads
