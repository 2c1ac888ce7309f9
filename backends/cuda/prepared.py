"""The forward of tensors that lie alike: all that a launch passes is laid out once, and a call adds addresses."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from attnswitch.machine.backend import Forward, Inputs
from attnswitch.problem import Problem

from . import memory, run
from .arguments import Arguments
from .tensor_maps import TensorMap
from .variant import Variant

__all__ = ["Alone", "forward"]

#: Query, key, value and output, one after the other: an address and four strides each.
_OPERANDS = struct.Struct("=20q")
#: Sets of operands whose maps are known; beyond, all are forgotten.
_MOST = 256


class Alone(NamedTuple):
    """A forward that is one launch, with what it passes beside arrays."""

    variant: Variant
    blocks: int
    constants: Arguments
    #: What makes tensor maps of query, key and value, where it has any.
    maps: tuple[Callable[[tuple[int, ...]], TensorMap], ...] = ()


def forward(problem: Problem, launch: Alone, inputs: Inputs, general: Forward) -> Forward:
    """Output, and lse if ``problem`` asks for it or for gradients, of torch tensors on a GPU that lie like ``inputs``.

    ``general`` takes the calls that are made while another GPU is the current one. Raises ``CompileError``.
    """
    torch: Any = sys.modules["torch"]
    variant, blocks, constants, maps = launch
    index = inputs.query.get_device()
    with memory.on(inputs.query):
        function = run.loaded(variant, index)
        model = memory.like(inputs.query, problem.dim_v)
    shape, steps = model.shape, model.stride()
    by_query, by_key, by_value = (operand.stride() for operand in inputs[:3])
    rows = (shape[:3], (shape[1] * shape[2], shape[2], 1)) if problem.lse or problem.grads else None
    real = torch.float64 if problem.dtype == "float64" else torch.float32
    current, stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    pointers = _Maps(maps, (by_query, by_key, by_value))

    def found(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        if current() != index:
            return general(query, key, value)
        out = query.new_empty_strided(shape, steps)
        lse = None if rows is None else query.new_empty_strided(*rows, dtype=real)
        at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        a = Arguments.from_buffer_copy(constants)
        _OPERANDS.pack_into(a, 0, at[0], *by_query, at[1], *by_key, at[2], *by_value, out.data_ptr(), *steps)
        if lse is not None:
            a.lse = lse.data_ptr()
        run.send(function, variant, blocks, stream(index), *pointers.of(at), ctypes.addressof(a))
        return out, lse

    return found


class _Maps:
    """The tensor maps of operands by their addresses."""

    def __init__(self, makers: tuple[Callable[[tuple[int, ...]], TensorMap], ...], steps: tuple[Any, ...]) -> None:
        self._makers, self._steps = makers, steps
        self._known: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[TensorMap, ...]]] = {}

    def of(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where they are, for operands at these addresses. Raises ``RuntimeError`` if one is refused."""
        if not self._makers:
            return ()
        known = self._known.get(at)
        if known is None:
            places = ((address, *steps) for address, steps in zip(at, self._steps, strict=True))
            made = tuple(maker(place) for maker, place in zip(self._makers, places, strict=True))
            known = tuple(found.pointer for found in made), made  # which the pointers live in
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[at] = known
        return known[0]
