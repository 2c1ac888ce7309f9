"""torch autograd over kernels that are not torch's own: forward and backward go to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnswitch import arrays
from attnswitch.call.call import Call
from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Forward, Gradients, Inputs, Kernel
from attnswitch.problem import Problem

__all__ = ["differentiable", "prepared"]

#: Whether saved tensors go through hooks of the caller's, as ``save_on_cpu`` sets them; a torch that cannot say may.
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def differentiable(call: Call, kernel: Kernel, library: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse (None unless asked for) of a torch call, with gradients computed by ``kernel.backward``."""
    *operands, key_lengths, seed = call.inputs
    found = _Attention.apply(*operands, _Work(call.problem, kernel, library, key_lengths, seed))
    return found if call.problem.lse else (found, None)


def prepared(problem: Problem, kernel: Kernel, forward: Forward) -> Forward:
    """``differentiable`` of calls without key lengths or a seed to a kernel that takes torch's tensors.

    ``forward`` is the kernel's own, for tensors that lie as theirs do. No function transform is active.
    """
    work = _Work(problem, kernel, "torch", prepared=forward)
    # What torch has before it looks for function transforms, which takes as long as the rest.
    apply = super(torch.autograd.Function, _Attention).apply

    def with_lse(query: Any, key: Any, value: Any, attn_mask: Any = None) -> tuple[Any, Any]:
        found: tuple[Any, Any] = apply(query, key, value, attn_mask, work)
        return found

    def without(query: Any, key: Any, value: Any, attn_mask: Any = None) -> tuple[Any, Any]:
        return apply(query, key, value, attn_mask, work), None

    return with_lse if problem.lse else without


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """All of a call but query, key, value and mask, which the graph keeps as saved tensors alone.

    ``prepared`` is its forward, if there is one.
    """

    problem: Problem
    kernel: Kernel
    library: str
    key_lengths: Any = None
    seed: int | None = None
    prepared: Forward | None = None

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any) -> tuple[Any, Any]:
        """Output and lse as torch's."""
        if self.prepared is not None:
            return self.prepared(query, key, value, *(() if attn_mask is None else (attn_mask,)))
        out, lse = self.kernel.forward(self.inputs(query, key, value, attn_mask, self.key_lengths))
        return self.to_torch(out), self.to_torch(lse)

    def inputs(self, query: Any, key: Any, value: Any, attn_mask: Any, key_lengths: Any) -> Inputs:
        """The backend's."""
        return Inputs(query, key, value, attn_mask, key_lengths, self.seed).map(self.to_backend)

    def to_torch(self, array: Any) -> Any:
        """An array of the backend's, over the same memory."""
        return None if array is None else arrays.passage(array, self.library, "torch")

    def to_backend(self, tensor: Any) -> Any:
        """The reverse."""
        return None if tensor is None else arrays.passage(tensor, "torch", self.library)


class _Attention(torch.autograd.Function):
    """The output, and lse where the problem asks for it."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, attn_mask: Any, work: _Work) -> Any:
        ctx.work = work
        out, lse = work.forward(query, key, value, attn_mask)
        ctx.steps = [_steps(operand) for operand in (query, key, value, attn_mask)] if _hooks(True) else None
        # Saved through autograd, so that writing to an operand before backward is an error and not a wrong answer.
        ctx.save_for_backward(query, key, value, attn_mask, work.key_lengths, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if work.problem.lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        query, key, value, attn_mask, lengths, out, lse = ctx.saved_tensors
        if ctx.steps is not None:  # kernels rest on how operands lay
            query, key, value, attn_mask = map(_lying, (query, key, value, attn_mask), ctx.steps)
        graph = torch.is_grad_enabled()  # create_graph=True
        work: _Work = ctx.work
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        inputs = work.inputs(query, key, value, attn_mask, lengths)
        results = (work.to_backend(tensor) for tensor in (out, lse, grad_out, grad_lse))
        back = Gradients(*map(work.to_torch, work.kernel.backward(inputs, *results)))
        if graph:
            operands = (query, key, value, attn_mask, grad_out, grad_lse)
            back = Gradients(*(None if grad is None else _OnceOnly.apply(grad, *operands) for grad in back))
        return *back, None


def _steps(tensor: Any) -> Any:
    return None if tensor is None else tensor.stride()


def _lying(tensor: Any, steps: Any) -> Any:
    """``tensor`` with the strides that it had, aligned at least as it was: hooks return it in any memory."""
    if tensor is None or (tensor.stride() == steps and tensor.data_ptr() % 16 == 0):
        return tensor
    once = [1 if step == 0 else size for size, step in zip(tensor.shape, steps, strict=True)]
    copy = tensor.new_empty_strided(once, steps)
    copy.copy_(tensor[tuple(slice(size) for size in once)])
    return copy.expand(tensor.shape)


class _OnceOnly(torch.autograd.Function):
    """A gradient that remembers what it depends on, to say that it cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Any, *operands: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "double backward of attention: this backend computes first derivatives only; use backend='sdpa-math'"
        )
