"""Calls of any form whose tensors lie alike, as ``prepared`` has those of operands: a call adds addresses."""

from __future__ import annotations

import struct
import sys
from typing import Any

from attnswitch.machine.backend import Forward, Inputs, Order
from attnswitch.problem import Problem

from . import arguments, memory
from .arguments import Arguments
from .forward import ForwardLaunches
from .prepared import sizes_like, types

__all__ = ["form"]

#: Addresses of query, key, value and output, whose strides are the same in every call.
_AT = [getattr(Arguments, name).offset for name in ("query", "key", "value", "out")]
_ADDRESS, _STEPS = struct.Struct("=q"), struct.Struct("=4q")


def form(problem: Problem, launch: ForwardLaunches, inputs: Inputs, order: Order) -> Forward:
    """Output, and lse if ``problem`` asks for it, in ``order``, of torch tensors on a GPU that lie like ``inputs``.

    They are given as ``Inputs.flat`` has them. Raises ``CompileError``.
    """
    torch: Any = sys.modules["torch"]
    index = inputs.query.get_device()
    with memory.on(inputs.query):
        send = launch.bound(inputs, index)
    constants = arguments.of_call(launch.constants, inputs)
    shape, steps = sizes_like(inputs.query, problem.dim_v)
    at_query, at_key, at_value, at_out = _AT
    _STEPS.pack_into(constants, at_out + _ADDRESS.size, *steps)
    b, h, length, _ = shape
    wanted = problem.lse or bool(problem.grads) or launch.needs_lse
    of_out = order.sizes(shape), order.sizes(steps)
    of_lse = order.sizes((b, h, length)), order.sizes((h * length, length, 1))
    dtype, real = types(inputs.query)
    empty, put = memory.allocator(inputs.query), _ADDRESS.pack_into
    at_mask, at_lse = Arguments.mask.offset, Arguments.lse.offset
    current, stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def attend(
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        lengths: Any,
        seed: None,
        begin: Any,
        begin_k: Any,
        sinks: Any,
        slopes: Any,
        table: Any,
        key_scale: Any,
        value_scale: Any,
        tree: Any,
    ) -> tuple[Any, Any]:
        if current() != index:
            beside = mask, lengths, seed, begin, begin_k, sinks, slopes, table, key_scale, value_scale, tree
            with memory.on(query):
                return attend(query, key, value, *beside)
        out = empty(*of_out, dtype)
        lse = empty(*of_lse, real) if wanted else None
        at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        a = Arguments.from_buffer_copy(constants)
        put(a, at_query, at[0])
        put(a, at_key, at[1])
        put(a, at_value, at[2])
        put(a, at_out, out.data_ptr())
        if lse is not None:
            put(a, at_lse, lse.data_ptr())
        if mask is not None:
            put(a, at_mask, mask.data_ptr())
        if lengths is not None:
            a.lengths = lengths.data_ptr()
        if begin is not None:
            a.query_offsets = begin.data_ptr()
            a.key_offsets = a.query_offsets if begin_k is None else begin_k.data_ptr()
        if sinks is not None:
            a.sinks = sinks.data_ptr()
        if slopes is not None:
            a.slopes = slopes.data_ptr()
        if table is not None:
            a.table = table.data_ptr()
        if key_scale is not None:
            a.key_scales, a.value_scales = key_scale.data_ptr(), value_scale.data_ptr()
        if tree is not None:
            a.tree = tree.data_ptr()
        send(a, at, out if lse is None else lse, stream(index))
        return out, lse

    return attend
