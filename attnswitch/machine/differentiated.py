"""Gradients by torch's autograd, for kernels whose output it differentiates: their forward runs again, on leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnswitch.arrays import Array
from attnswitch.machine.backend import Gradients, Inputs

__all__ = ["gradients", "leaf", "leaves"]


def leaf(operand: Array | None) -> Any:
    """``operand`` as autograd takes it: without a graph, and none of inference mode's, which it never takes."""
    if operand is None:
        return None
    return operand.clone() if operand.is_inference() else operand.detach()


def leaves(inputs: Inputs, wanted: str) -> Inputs:
    """``inputs`` with leaves for operands, of which those that ``wanted`` names by their letters require gradients."""
    operands = dict(zip("qkvm", map(leaf, inputs[:4]), strict=True))
    for letter in wanted:
        operands[letter].requires_grad_()
    query, key, value, mask = operands.values()
    return inputs._replace(query=query, key=key, value=value, attn_mask=mask)


def gradients(inputs: Inputs, wanted: str, ends: Sequence[Array], upstream: Sequence[Array]) -> Gradients:
    """Of the ``leaves`` in ``inputs``, through ``ends``; zeros for one of which they are no function."""
    import torch

    operands = dict(zip("qkvm", inputs[:4], strict=True))
    asked = [operands[letter] for letter in wanted]
    found = torch.autograd.grad(ends, asked, upstream, materialize_grads=True)
    named = dict(zip(wanted, found, strict=True))
    return Gradients(*(named.get(letter) for letter in "qkvm"))
