"""torch autograd over kernels that are not torch's own: forward and backward go to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnswitch import arrays
from attnswitch.call import sinks as of_sinks
from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Kernel, Offsets, Order
from attnswitch.problem import Problem

__all__ = ["differentiable", "differentiable_form", "prepared", "prepared_form", "with_sinks"]

#: As kernels have results.
_STRAIGHT = Order()
#: Of the fields of ``Inputs`` from ``offsets`` on.
_NO_MORE = (None,) * (len(Inputs._fields) - Inputs._fields.index("offsets"))
#: Whether saved tensors go through hooks of the caller's, as ``save_on_cpu`` sets them; a torch that cannot say may.
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def differentiable(
    problem: Problem, kernel: Kernel, inputs: Inputs, library: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse (None unless asked for) of torch tensors, with gradients computed by ``kernel.backward``.

    The kernel takes arrays of ``library``.
    """
    kernel = _of_torch(kernel, library)
    query, key, value, mask, key_lengths, seed, *_ = inputs
    work = _Work(problem, lambda *given: kernel.forward(Inputs(*given)), kernel.backward, key_lengths, seed)
    result = _Attention.apply(query, key, value, mask, work)
    return result if problem.lse else (result, None)


def differentiable_form(
    problem: Problem, kernel: Kernel, inputs: Inputs, library: str, order: Order
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same of a call of any form, in ``order``.

    It saves what ``prepared_form`` does: a checkpoint may make its forward again by the one or the other.
    """
    kernel = _of_torch(kernel, library)
    form = Kernel.prepared_form(kernel, inputs, order)
    attend = _formed(
        problem, form, lambda again: Kernel.prepared_form_backward(kernel, again, order), inputs, _Attention.apply
    )
    query, key, value, mask, lengths, seed, begin, begin_k, *beside = inputs.flat()
    operands = (order.of(operand) for operand in (query, key, value))
    return attend(*operands, mask, lengths, seed, begin, None if begin_k is begin else begin_k, *beside)


def _of_torch(kernel: Kernel, library: str) -> Kernel:
    return kernel if library == "torch" else _Elsewhere(kernel, library)


class _Elsewhere(Kernel):
    """A kernel of arrays of ``library``, given torch's."""

    def __init__(self, kernel: Kernel, library: str) -> None:
        self._kernel, self._library = kernel, library

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        out, lse = self._kernel.forward(inputs.map(self._there))
        return self._back(out), self._back(lse)

    def backward(self, inputs: Inputs, *results: Any) -> Gradients:
        given = (None if result is None else self._there(result) for result in results)
        return Gradients(*map(self._back, self._kernel.backward(inputs.map(self._there), *given)))

    def _there(self, array: Any) -> Any:
        return arrays.passage(array, "torch", self._library)

    def _back(self, array: Any) -> Any:
        return None if array is None else arrays.passage(array, self._library, "torch")


def _with(inputs: Inputs, beside: tuple[Any, ...]) -> Inputs:
    """``inputs`` with what else a kernel was given: offsets of queries and keys, sinks and alibi_slopes.

    The offsets of keys are None where they are those of queries.
    """
    begin, begin_k, sinks, slopes = beside
    where = None if begin is None else Offsets(begin, begin if begin_k is None else begin_k)
    return inputs._replace(offsets=where, sinks=sinks, alibi_slopes=slopes)


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, order: Order = _STRAIGHT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse in ``order``, which count ``sinks`` already, as functions of these too."""
    out, lse = _Sunk.apply(order.back(out), order.back(lse), sinks)
    return order.of(out), order.of(lse)


def prepared(problem: Problem, kernel: Kernel, forward: Forward) -> Forward:
    """``differentiable`` of calls to a kernel that takes torch's tensors.

    ``forward`` is the kernel's own, for tensors that lie alike. No function transform is active.
    """

    def on_first(inputs: Inputs, *results: Any) -> Gradients:  # many a forward never has a backward
        if work.backward is on_first:
            work.backward = kernel.prepared_backward(inputs)
        return work.backward(inputs, *results)

    work = _Work(problem, forward, on_first)
    # What torch has before it looks for function transforms, which takes as long as the rest.
    apply = super(torch.autograd.Function, _Attention).apply

    wants_lse = problem.lse

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, key_lengths: Any = None, seed: int | None = None
    ) -> tuple[Any, Any]:
        own = work if key_lengths is seed is None else work.of(key_lengths, seed)
        result = apply(query, key, value, attn_mask, own)
        return result if wants_lse else (result, None)

    return attend


def prepared_form(problem: Problem, kernel: Kernel, inputs: Inputs, order: Order) -> Forward:
    """``differentiable_form`` of calls that lie like ``inputs``, to a kernel that takes torch's tensors.

    They are given as to ``Kernel.prepared_form``. No function transform is active.
    """
    form = kernel.prepared_form(inputs, order)
    apply = super(torch.autograd.Function, _Attention).apply
    return _formed(problem, form, lambda again: kernel.prepared_form_backward(again, order), inputs, apply)


def _formed(
    problem: Problem, form: Forward, prepare: Callable[[Inputs], Backward], inputs: Inputs, apply: Callable[..., Any]
) -> Forward:
    """``form`` with the backward that ``prepare`` makes of inputs which lie like ``inputs``, when one is needed."""
    again, ready = inputs.again(), list[Backward]()

    def forward(*given: Any) -> tuple[Any, Any]:
        return form(*given, None, None, None, None)  # no pages, and no tree

    def backward(given: Inputs, *results: Any) -> Gradients:
        if not ready:
            ready.append(prepare(again(*given.flat())))
        return ready[0](given, *results)

    def attend(query: Any, key: Any, value: Any, mask: Any, lengths: Any, seed: Any, *beside: Any) -> tuple[Any, Any]:
        begin, begin_k, sinks, slopes = beside[:4]
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        if slopes is not None and slopes.dim() == 1:
            slopes = slopes[None]
        work = _Work(problem, forward, backward, lengths, seed, (begin, begin_k, sinks, slopes))
        result = apply(query, key, value, mask, work)
        return result if problem.lse else (result, None)

    return attend


@dataclass(slots=True, eq=False)
class _Work:
    """All of a call but query, key, value and mask, which the graph has as saved tensors alone."""

    problem: Problem
    forward: Forward
    backward: Backward
    key_lengths: Any = None
    seed: int | None = None
    #: As ``_with`` takes it.
    beside: tuple[Any, ...] = ()

    def of(self, key_lengths: Any, seed: int | None) -> _Work:
        """The same of a call with these."""
        return _Work(self.problem, self.forward, self.backward, key_lengths, seed)


class _Attention(torch.autograd.Function):
    """The output, and lse where the problem asks for it."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, attn_mask: Any, work: _Work) -> Any:
        ctx.work = work
        if work.beside:
            out, lse = work.forward(query, key, value, attn_mask, work.key_lengths, work.seed, *work.beside)
        elif work.key_lengths is work.seed is None:
            out, lse = work.forward(query, key, value, *(() if attn_mask is None else (attn_mask,)))
        else:
            out, lse = work.forward(query, key, value, attn_mask, work.key_lengths, work.seed)
        given = query, key, value, attn_mask, work.key_lengths, *work.beside
        ctx.steps = list(map(_steps, given)) if _hooks(True) else None
        # Saved through autograd, so that writing to an operand before backward is an error and not a wrong answer.
        ctx.save_for_backward(out, lse, *given)
        if work.problem.lse:  # else torch makes zeros for the only one, which saves a call
            ctx.set_materialize_grads(False)
            return out, lse
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        out, lse, *given = ctx.saved_tensors
        if ctx.steps is not None:  # kernels rest on how all of them lay
            given = list(map(_lying, given, ctx.steps))
        query, key, value, attn_mask, lengths, *beside = given
        graph = torch.is_grad_enabled()  # create_graph=True
        work: _Work = ctx.work
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        # Without a frame of Python's, as in arrays.
        inputs: Inputs = tuple.__new__(Inputs, (query, key, value, attn_mask, lengths, work.seed, *_NO_MORE))
        if beside:
            inputs = _with(inputs, tuple(beside))
        try:
            back = work.backward(inputs, out, lse, grad_out, grad_lse)
        except RuntimeError:
            if any(map(_is_batched, (grad_out, grad_lse))):
                raise Unsupported(
                    "is_grads_batched: this backend reads one gradient at a time; use torch.func.vmap, or"
                    " backend='sdpa-math' where it takes the call"
                ) from None
            raise
        if graph:
            operands = (query, key, value, attn_mask, grad_out, grad_lse)
            back = Gradients(*(None if grad is None else _OnceOnly.apply(grad, *operands) for grad in back))
        return *back, None


class _Sunk(torch.autograd.Function):
    """Output and lse as they are. Their gradients go on as they come, and one to the sinks, which follows from them."""

    @staticmethod
    def forward(ctx: Any, out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
        ctx.save_for_backward(out, lse, sinks)
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, Any, Any]:
        out, lse, sinks = ctx.saved_tensors
        graph = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            by_sinks = of_sinks.gradient(sinks, out, lse, grad_out, grad_lse)
        if graph:  # what the others come to depends on the sinks, too
            operands = out, lse, sinks, grad_out, grad_lse
            grad_out, grad_lse, by_sinks = (
                None if x is None else _OnceOnly.apply(x, *operands) for x in (grad_out, grad_lse, by_sinks)
            )
        return grad_out, grad_lse, by_sinks


def _is_batched(tensor: Any) -> bool:
    """Whether ``torch.autograd.grad`` stands for many gradients by it."""
    return tensor is not None and bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


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
            "double backward of attention: this backend computes first derivatives only; use backend='sdpa-math' of"
            " attnswitch.attention, or of install"
        )
