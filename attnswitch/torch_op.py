"""torch autograd over kernels that are not torch's own: forward and backward go to the kernel."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch import arrays
from attnswitch.backend import Gradients, Inputs, Kernel, Prepared
from attnswitch.call import Call
from attnswitch.errors import Unsupported
from attnswitch.problem import Problem

__all__ = ["differentiable", "prepared"]


def differentiable(call: Call, kernel: Kernel, library: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse (None unless asked for) of a torch call, with gradients computed by ``kernel.backward``."""
    out, lse = _Attention.apply(*call.inputs[:4], call, kernel, library, None)
    return out, lse if call.problem.lse else None


def prepared(problem: Problem, device: tuple[str, int], kernel: Kernel, forward: Prepared) -> Prepared:
    """``differentiable`` of calls without key lengths or a seed to a kernel that takes torch's tensors.

    ``forward`` is the kernel's own, for tensors that lie as theirs do.
    """
    call = Call(problem, "torch", "torch", device, Inputs(None, None, None), "BHLD", None)

    def found(query: Any, key: Any, value: Any, attn_mask: Any = None) -> tuple[Any, Any]:
        out, lse = _Attention.apply(query, key, value, attn_mask, call, kernel, "torch", forward)
        return out, lse if problem.lse else None

    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any,
        call: Call,
        kernel: Kernel,
        library: str,
        prepared: Prepared | None,
    ) -> Any:
        ctx.call, ctx.kernel, ctx.library = call, kernel, library
        if prepared is None:
            out, lse = kernel.forward(call.to_backend(library))
            out = arrays.passage(out, library, "torch")
            lse = None if lse is None else arrays.passage(lse, library, "torch")
        else:
            out, lse = prepared(query, key, value) if attn_mask is None else prepared(query, key, value, attn_mask)
        # Saved through autograd, so that writing to an operand before backward is an error and not a wrong answer.
        ctx.save_for_backward(query, key, value, attn_mask, call.inputs.key_lengths, out, lse)
        if not call.problem.lse and lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        query, key, value, attn_mask, lengths, out, lse = ctx.saved_tensors
        graph = torch.is_grad_enabled()  # create_graph=True
        call: Call = ctx.call
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        inputs = call.inputs._replace(query=query, key=key, value=value, attn_mask=attn_mask, key_lengths=lengths)

        def native(tensor: Any) -> Any:
            return None if tensor is None else arrays.passage(tensor, "torch", ctx.library)

        grads = ctx.kernel.backward(
            inputs.map(native),
            native(out),
            native(lse),
            native(grad_out),
            native(grad_lse if call.problem.lse else None),
        )
        back = Gradients(*(None if grad is None else arrays.passage(grad, ctx.library, "torch") for grad in grads))
        if graph:
            operands = (query, key, value, attn_mask, grad_out, grad_lse)
            back = Gradients(*(None if grad is None else _OnceOnly.apply(grad, *operands) for grad in back))
        return *back, None, None, None, None


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
