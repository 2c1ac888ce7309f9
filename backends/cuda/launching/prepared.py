"""Calls of tensors that lie alike: all that launches pass is laid out once, and a call adds addresses."""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Order
from attnswitch.problem import Problem

from . import arguments, driver, memory, run, tensor_maps
from .arguments import Arguments
from .backward import BackwardLaunches, turned
from .forward import ForwardLaunches

__all__ = ["backward", "forward", "sizes_like", "types"]

#: Query, key, value and output, one after the other, an address and four strides each; and the output's gradient.
_FOUR, _FIVE = struct.Struct("=20q"), struct.Struct("=25q")
#: From ``lse`` to ``grad_mask``.
_REST = struct.Struct("=10q")
_AT_MASK, _AT_REST = Arguments.mask.offset, Arguments.lse.offset
_ADDRESS = struct.Struct("=q")
#: As kernels have results.
_STRAIGHT = Order()


def forward(problem: Problem, launch: ForwardLaunches, inputs: Inputs, general: Forward) -> Forward:
    """Output, and lse if ``problem`` asks for it or for gradients, of torch tensors on a GPU that lie like ``inputs``.

    ``general`` takes the calls that are made while another GPU is the current one. Raises ``CompileError``.
    """
    torch: Any = sys.modules["torch"]
    index = inputs.query.get_device()
    with memory.on(inputs.query):
        send = launch.bound(inputs, index)
    shape, steps = sizes_like(inputs.query, problem.dim_v)
    by_query, by_key, by_value = (operand.stride() for operand in inputs[:3])
    wanted = problem.lse or bool(problem.grads) or launch.needs_lse
    b, h, length, _ = shape
    rows = (b, h, length), (h * length, length, 1)
    dtype, real = types(inputs.query)
    empty = memory.allocator(inputs.query)
    current, stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    constants = arguments.lying(launch.constants, inputs.attn_mask, inputs.key_lengths)

    def attend(
        query: Any, key: Any, value: Any, mask: Any = None, lengths: Any = None, seed: int | None = None
    ) -> tuple[Any, Any]:
        if current() != index:
            return general(query, key, value, mask, lengths, seed)
        out = empty(shape, steps, dtype)
        lse = empty(*rows, real) if wanted else None
        at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        a = Arguments.from_buffer_copy(constants)
        _FOUR.pack_into(a, 0, at[0], *by_query, at[1], *by_key, at[2], *by_value, out.data_ptr(), *steps)
        if mask is not None:
            _ADDRESS.pack_into(a, _AT_MASK, mask.data_ptr())
        if lengths is not None:
            a.lengths = lengths.data_ptr()
        if seed is not None:
            arguments.seed(a, seed)
        if lse is not None:
            _ADDRESS.pack_into(a, _AT_REST, lse.data_ptr())
        send(a, at, out if lse is None else lse, stream(index))
        return out, lse

    return attend


def backward(
    problem: Problem, launch: BackwardLaunches, inputs: Inputs, general: Backward, order: Order = _STRAIGHT
) -> Backward:
    """Gradients of torch tensors on a GPU that lie like ``inputs``; those that are given may lie in any way.

    With ``order`` they are as ``Kernel.prepared_form_backward`` has them.
    ``general`` takes the calls that are made while another GPU is the current one, or whose lengths lie otherwise.
    """
    torch: Any = sys.modules["torch"]
    index = inputs.query.get_device()
    by_query, by_key, by_value = (operand.stride() for operand in inputs[:3])
    current, stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    constants = arguments.of_call(launch.constants, inputs)
    lengths_lie = _lie(inputs.key_lengths)
    constants.turned = turned(inputs)
    lying = zip(inputs[:3], launch.dims, strict=True)
    of_query, of_key, of_value = (None if dim is None else sizes_like(operand, dim, order) for operand, dim in lying)
    clears = launch.clears
    of_mask, masked, has_lengths = launch.mask_shape, inputs.attn_mask is not None, inputs.key_lengths is not None
    size, (_, to_delta, to_sums, to_parts) = launch.space, launch.begins
    dtype, real = types(inputs.query)
    empty = memory.allocator(inputs.query)
    mapped = any(step.mapped for step in launch.steps)
    lie = by_query, by_key, by_value
    by_mask = (inputs.attn_mask.stride(),) if launch.maps_mask and inputs.attn_mask is not None else ()
    maps_at = tensor_maps.Remembered(
        lambda at, by_grad: launch.maps(*((to, *by) for to, by in zip(at, (*lie, by_grad, *by_mask), strict=True)))
    )
    launches = [
        (
            run.sender(step.variant, step.blocks, index, beside=step.beside),
            (step.section, step.splits, step.awaited),
            step.mapped,
        )
        for step in launch.steps
        if step.blocks
    ]
    look = None if launch.look is None else launch.look.bound(inputs.attn_mask, index)
    #: Strides of outputs and their gradients that are read where they lie, as they are given and as kernels have them.
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    address, parameters = ctypes.addressof, driver.Parameters

    def readable(rows: Any) -> tuple[Any, int, tuple[int, ...]]:
        """The rows, or a copy, with their address and strides."""
        read = launch.readable(order.back(rows))
        at, steps = read.data_ptr(), read.stride()
        if not at & 15 and at == rows.data_ptr():
            known[rows.stride()] = steps
        return read, at, steps

    # It calls as little as it can, since it runs in the thread of torch's engine: see ``driver.Launcher``.
    def differentiate(inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        given: Any = inputs
        query, key, value, mask, lengths, seed, offsets, sinks, slopes = given[:9]
        if current() != index or (has_lengths and _lie(lengths) != lengths_lie):
            return general(inputs, out, lse, grad_out, grad_lse)
        at_out, by_out = out.data_ptr(), known.get(out.stride())
        if at_out & 15 or by_out is None:
            out, at_out, by_out = readable(out)
        at_grad, by_grad = grad_out.data_ptr(), known.get(grad_out.stride())
        if at_grad & 15 or by_grad is None:
            grad_out, at_grad, by_grad = readable(grad_out)
        lse = lse.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        space = empty((size,), (1,), real)
        grad_query = None if of_query is None else empty(*of_query, dtype)
        grad_key = None if of_key is None else empty(*of_key, dtype)
        grad_value = None if of_value is None else empty(*of_value, dtype)
        grad_mask = None if of_mask is None else mask.new_empty(of_mask)
        if clears:
            memory.clear(grad_key, grad_value)
        a = Arguments.from_buffer_copy(constants)
        operands = query.data_ptr(), *by_query, key.data_ptr(), *by_key, value.data_ptr(), *by_value
        _FIVE.pack_into(a, 0, *operands, at_out, *by_out, at_grad, *by_grad)
        if masked:
            _ADDRESS.pack_into(a, _AT_MASK, mask.data_ptr())
        if has_lengths:
            a.lengths = lengths.data_ptr()
        if seed is not None:
            arguments.seed(a, seed)
        if offsets is not None:
            a.query_offsets, a.key_offsets = offsets[0].data_ptr(), offsets[1].data_ptr()
        if sinks is not None:
            a.sinks = sinks.data_ptr()
        if slopes is not None:
            a.slopes = slopes.data_ptr()
        base = space.data_ptr()
        _REST.pack_into(
            a,
            _AT_REST,
            *(lse.data_ptr(), 0 if grad_lse is None else grad_lse.data_ptr()),
            *(base + to_parts, base + to_sums, base, base + to_delta),
            0 if grad_query is None else grad_query.data_ptr(),
            0 if grad_key is None else grad_key.data_ptr(),
            0 if grad_value is None else grad_value.data_ptr(),
            0 if grad_mask is None else grad_mask.data_ptr(),
        )
        at, where = address(a), stream(index)
        looked = None if look is None else look(a, where)
        mapped_at = operands[0], operands[5], operands[10], at_grad, *((a.mask.at,) if by_mask else ())
        alone = parameters(at)
        maps = maps_at[mapped_at, by_grad] if mapped else None  # by this name until all is launched
        with_maps = alone if maps is None else parameters(*maps.pointers, at)
        for send, counts, takes_maps in launches:
            a.section, a.splits, a.awaited = counts
            passed = with_maps if takes_maps else alone
            if result := send[where](address(passed), None):
                send.check(result, where, passed)
        del looked  # not before: what it points to is the next launch's from here on
        found: Gradients = tuple.__new__(Gradients, (grad_query, grad_key, grad_value, grad_mask))
        return found

    return differentiate


def types(query: Any) -> tuple[Any, Any]:
    """Those of results, and of lse and what is summed."""
    torch: Any = sys.modules["torch"]
    return query.dtype, torch.float64 if query.dtype == torch.float64 else torch.float32


def _lie(lengths: Any) -> tuple[Any, ...] | None:
    """What of lengths is the same in every call."""
    return None if lengths is None else (lengths.dtype, lengths.stride(), lengths.get_device())


def sizes_like(operand: Any, dim: int, order: Order = _STRAIGHT) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in ``order``, of (batch, heads, L, dim) as ``memory.like`` has it lie."""
    b, h, length, _ = operand.shape
    inner = (dim, h * dim) if memory.turned(operand) else (length * dim, dim)
    return order.sizes((b, h, length, dim)), order.sizes((h * length * dim, *inner, 1))
