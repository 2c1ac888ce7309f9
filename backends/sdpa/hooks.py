"""What torch's fused operators lack in autograd: an aligned upstream gradient, and words for a second derivative."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from attnswitch.errors import Unsupported

from .operands import aligned

__all__ = ["once_differentiable", "with_aligned_gradient"]


def with_aligned_gradient(out: Any) -> Any:
    """``once_differentiable(out)``, whose upstream gradient will be aligned too.

    The backward kernels of CUDA load it 16 bytes at a time and check nothing
    (fixtures/corpus/sdpa-*-grad-out-offset.json).
    """
    return _hooked(out, _ALIGNING)


def once_differentiable(out: Any) -> Any:
    """``out``, the first that its operator returns, whose gradients say so when they are differentiated again."""
    return _hooked(out, _NOTING)


def _hooked(out: Any, lender: Any) -> Any:
    node = out.grad_fn
    if node is not None:
        node._register_hook_dict(lender)
    return out


def _aligned(grad: Any) -> Any:
    """None where ``grad`` is aligned and nobody differentiates it, found out by as little as there is to run.

    It runs in the thread of torch's engine, on another core, whose caches have none of the interpreter's data: a frame
    and a few calls more were 17 us of a training step of 200.
    """
    lie = grad.dtype, grad.stride()
    if lie in _READ and not grad.data_ptr() & 15 and not _grad_enabled():
        return None
    kept = aligned(_noted(grad))
    if kept is grad:
        if len(_READ) >= _MOST:
            _READ.clear()
        _READ.add(lie)
    return kept


def _noted(grad: Any) -> Any:
    """``grad``, the upstream gradient; with ``create_graph=True`` those that are made of it will be ``_Last``."""
    if torch.is_grad_enabled():
        _mark(torch._C._current_autograd_node())
    return grad


def _mark(node: Any) -> None:
    """Let this run of ``node`` give gradients that cannot be differentiated."""

    def last(grads: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        handle.remove()
        return tuple(grad if grad is None or not grad.requires_grad else _Last.apply(grad) for grad in grads)

    handle = node.register_hook(last)


class _Last(torch.autograd.Function):
    """A gradient that has none. torch's own error names an operator that nobody called, and no way out."""

    @staticmethod
    def forward(ctx: Any, grad: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "double backward of attention: this kernel of torch's has first derivatives only; use"
            " backend='sdpa-math' of attnswitch.attention, or of install"
        )


def _lender(hook: Callable[[Any], Any]) -> Any:
    """A tensor that lends its hook: to make one for every output, as ``register_hook`` does, takes a microsecond."""
    lender = torch.empty(0, device="cpu")
    lender._backward_hooks = OrderedDict({0: hook})
    return lender


#: Dtypes and strides that are read where they lie, if their address is a multiple of 16; beyond so many, all are
#: forgotten.
_READ: set[tuple[torch.dtype, tuple[int, ...]]] = set()
_MOST = 1024
_grad_enabled = torch.is_grad_enabled
_ALIGNING, _NOTING = _lender(_aligned), _lender(_noted)
