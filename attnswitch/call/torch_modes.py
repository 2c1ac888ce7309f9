"""What a call has to know of torch's state: its modes, and guards that tell tensors apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attnswitch.arrays import Intercepted
from attnswitch.call.launch import DUAL
from attnswitch.errors import Unsupported

__all__ = ["guards", "intercepted", "modes", "refuse_ring", "rings"]

_grad_enabled = torch.is_grad_enabled
_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def modes() -> int:
    """Whether gradients are enabled and whether there is an autocast region, as a number.

    Raises ``Intercepted`` where a mode or a function transform looks at what is called.
    """
    if _dispatch_modes() or _transforms() is not None:
        raise Intercepted
    if forward_ad._current_level >= 0:
        return DUAL
    return _grad_enabled() + 2 * _autocast()


def rings() -> bool:
    """Whether torch's ``context_parallel`` is on, whose ring is of torch's own operators."""
    distributed = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(distributed, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", ())
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def refuse_ring(remedy: str) -> None:
    """Raise ``Unsupported`` where it is on, of whose rows a call would see its own share alone."""
    if not torch.compiler.is_compiling() and rings():
        raise Unsupported(f"within torch's context_parallel, whose ring is of torch's own operators: {remedy}")


def guards(operands: Sequence[Any]) -> Callable[..., bool] | None:
    """Whether others are like ``operands`` in all but their elements and addresses, by what guards compiled graphs.

    That is: their types, what dispatches on them here and now (autocast among it), dtypes, devices, shapes, strides
    and requires_grad. Whether gradients are enabled is not asked. None for subclasses, and where torch has no guards.
    Where one tensor stands in several places, it does in others too.
    """
    firsts = {id(operand): n for n, operand in reversed(list(enumerate(operands)))}
    places = tuple([firsts[id(operand)] for operand in operands])
    if len(firsts) < len(operands):
        return _repeated(guards([operands[n] for n in sorted(firsts.values())]), places)
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


def _repeated(alike: Callable[..., bool] | None, places: Sequence[int]) -> Callable[..., bool] | None:
    """``alike`` of the tensors that stand first; each is that in the place which ``places`` has for it."""
    if alike is None:
        return None
    firsts = sorted(set(places))
    again = [(n, place) for n, place in enumerate(places) if n != place]

    def check(*operands: Any) -> bool:
        for n, place in again:
            if operands[n] is not operands[place]:
                return False
        return alike(*[operands[n] for n in firsts])

    return check


def intercepted() -> Any:
    """Of subclasses of tensors that look at what is done to them: raises ``Intercepted``."""
    raise Intercepted
