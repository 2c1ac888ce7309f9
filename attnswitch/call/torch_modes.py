"""What a call has to know of torch's state: its modes, its compiler, and guards that tell tensors apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attnswitch.call.launch import DUAL

__all__ = ["guards", "modes", "traced", "untraced"]

_grad_enabled = torch.is_grad_enabled
_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.peek_interpreter_stack


def modes() -> int:
    """Whether gradients are enabled and whether there is an autocast region, as a number."""
    if forward_ad._current_level >= 0 or _transforms() is not None:
        return DUAL
    return _grad_enabled() + 2 * _autocast()


def guards(operands: Sequence[Any]) -> Callable[..., bool] | None:
    """Whether others are like ``operands`` in all but their elements and addresses, by what guards compiled graphs.

    That is: their types, what dispatches on them here and now (autocast among it), dtypes, devices, shapes, strides
    and requires_grad. Whether gradients are enabled is not asked. None for subclasses, and where torch has no guards.
    """
    if any(type(operand) is not torch.Tensor and type(operand) is not torch.nn.Parameter for operand in operands):
        return None
    try:
        known = torch._C._dynamo.guards.TensorGuards(
            *operands,
            dynamic_dims_sizes=[list(operand.shape) for operand in operands],  # type: ignore[misc]
            dynamic_dims_strides=[list(operand.stride()) for operand in operands],  # type: ignore[misc]
        )
    except (AttributeError, TypeError):
        return None
    check: Callable[..., bool] = known.check
    return check


def traced() -> bool:
    """Whether torch.compile is looking at the code that runs."""
    return torch.compiler.is_dynamo_compiling()


def untraced(function: Callable[..., Any]) -> Any:
    """``function`` as torch.compile leaves it alone: one break in the graph, and what runs is what runs without."""
    if function not in _UNTRACED:
        _UNTRACED[function] = torch.compiler.disable(function, reason="attnswitch chooses a backend in Python")  # type: ignore[no-untyped-call]
    return _UNTRACED[function]


_UNTRACED: dict[Callable[..., Any], Any] = {}  # a cache decorator would be traced
