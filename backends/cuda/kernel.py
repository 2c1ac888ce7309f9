"""One problem's kernels: what is launched, in which order, and the arrays between the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Kernel, Order
from attnswitch.machine.builds import Build, side_by_side
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .compiling.variant import Variant
from .config import CudaConfig
from .fused import backward as fused_backward
from .fused.tiles import FusedTile
from .hopper import backward as hopper_backward
from .hopper import forward as hopper_forward
from .hopper import latent
from .hopper.tiles import HopperGradients, HopperTile, LatentTile, copies_mask
from .launching import form, memory, prepared, run
from .launching.backward import BackwardLaunches
from .launching.forward import ForwardLaunches
from .portable import backward as portable_backward
from .portable import forward as portable_forward
from .portable import sequences

__all__ = ["CudaKernel"]

#: Training steps whose kernels were compiled, or are known not to compile.
_met: set[tuple[Variant, CudaConfig, str]] = set()


class CudaKernel(Kernel):
    """Forward in one launch, or two for many splits, or a bool mask on Hopper; backward in three to five.

    Nothing is special about sizes of 0: a grid without blocks is not launched, and a row without keys is one that sees
    nothing.
    """

    def __init__(self, problem: Problem, config: CudaConfig, device: Device) -> None:
        p = self.problem = problem
        self._config, self._device = config, device
        self._launched = sequences.launched(p)
        self._forward = _forward(self._launched, config, device)
        self._by_rows = p.varlen and isinstance(config.forward, HopperTile)
        hopper = isinstance(config.forward, HopperTile) or isinstance(config.backward, HopperGradients)
        self._copies_mask = hopper and copies_mask(p)

    @functools.cached_property
    def _backward(self) -> BackwardLaunches:
        return _backward(self._launched, self._config, self._device)

    def variants(self) -> tuple[Variant, ...]:
        """The kernels that forward and backward launch, in that order."""
        backward = self._backward.variants() if self.problem.grads else ()
        return (*self._forward.variants(), *backward)

    def builds(self) -> Sequence[Build]:
        """Of each variant."""
        device = self._device
        if device.kind == "cuda" and device.capability is None:
            return ()
        return run.builds(self.variants(), device.capability)

    def _build(self) -> None:
        """Have the kernels of a training step compiled at once, before the first of them is needed."""
        if not self.problem.grads:
            return
        met = self._forward.variant, self._config, self.problem.grads
        if met not in _met:
            _met.add(met)
            side_by_side(self.builds())

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        self._build()
        with memory.on(inputs.query):
            inputs = self._read(inputs)
            out = memory.like(inputs.query, self.problem.dim_v)
            p = self.problem
            real = "float64" if p.dtype == "float64" else "float32"
            lse = memory.empty(tuple(inputs.query.shape[:3]), inputs.query, real)
            self._launches(inputs)(inputs, out, lse)
        return out, lse

    def _launches(self, inputs: Inputs) -> ForwardLaunches:
        if not self._by_rows:
            return self._forward
        return _forward(self._launched, self._config, self._device, _all_rows(inputs))

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward`` for tensors that lie like these, on a GPU."""
        general = super().prepared(inputs)
        p = self.problem
        empty = not (self._forward.blocks and p.seq_k)
        if memory.on_cpu(inputs.query) or empty or p.varlen or p.sinks or p.alibi or p.page:
            return general
        self._build()
        ready = prepared.forward(self.problem, self._forward, self._read(inputs), general)
        if not self._copies_mask:
            return ready
        return lambda query, key, value, mask, *more: ready(query, key, value, memory.in_steps(mask), *more)

    def prepared_form(self, inputs: Inputs, order: Order) -> Forward:
        """``forward`` of a problem of any form for tensors that lie like these, on a GPU."""
        launches = self._launches(inputs)
        if memory.on_cpu(inputs.query) or not launches.blocks or self._copies_mask:
            return super().prepared_form(inputs, order)
        return form.form(self.problem, launches, inputs, order)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        self._build()
        with memory.on(inputs.query):
            return self._backwards(inputs)(self._read(inputs), out, lse, grad_out, grad_lse)

    def _backwards(self, inputs: Inputs) -> BackwardLaunches:
        if not self.problem.varlen:
            return self._backward
        return _backward(self._launched, self._config, self._device, _all_rows(inputs))

    def _read(self, inputs: Inputs) -> Inputs:
        """Inputs as the kernels read them."""
        return inputs._replace(attn_mask=memory.in_steps(inputs.attn_mask)) if self._copies_mask else inputs

    def prepared_backward(self, inputs: Inputs) -> Backward:
        """``backward`` for tensors that lie like these, on a GPU."""
        p = self.problem
        if memory.on_cpu(inputs.query) or p.is_empty or not p.seq_k or p.varlen or p.sinks or p.alibi:
            return self.backward
        with memory.on(inputs.query):
            ready = prepared.backward(p, self._backward, self._read(inputs), self.backward)
        if not self._copies_mask:
            return ready
        return lambda inputs, *results: ready(self._read(inputs), *results)

    def prepared_form_backward(self, inputs: Inputs, order: Order) -> Backward:
        """The same of a problem of any form."""
        general, launches = super().prepared_form_backward(inputs, order), self._backwards(inputs)
        if memory.on_cpu(inputs.query) or not launches.steps or self._copies_mask:
            return general
        with memory.on(inputs.query):
            return prepared.backward(self.problem, launches, inputs, general, order)


def _all_rows(inputs: Inputs) -> tuple[int, int]:
    """Rows of queries and of keys, of all sequences of a call with varlen: launches are laid out for as many."""
    return int(inputs.query.shape[2]), int(inputs.key.shape[2])


def _forward(p: Problem, config: CudaConfig, device: Device, all_rows: tuple[int, int] = (1, 1)) -> ForwardLaunches:
    """That of the family whose tile is chosen; ``all_rows`` are those of a call with varlen, of queries and of keys."""
    tile = config.forward
    if isinstance(tile, HopperTile):
        return hopper_forward.Forward(p, tile, device, all_rows)
    if isinstance(tile, LatentTile):
        return latent.Forward(p, tile, config.splits, device)
    return portable_forward.Forward(p, tile, config.splits)


def _backward(p: Problem, config: CudaConfig, device: Device, all_rows: tuple[int, int] = (1, 1)) -> BackwardLaunches:
    """``all_rows`` are those of a call with varlen, of queries and of keys."""
    if isinstance(config.backward, FusedTile):
        return fused_backward.Backward(p, config.backward)
    if config.backward is not None:
        rows = portable_backward.rows_added(p, config.query_gradient) if p.adds_mask else None
        return hopper_backward.Backward(p, config.backward, device, rows, all_rows)
    tiles = config.key_gradients, config.query_gradient, config.mask_gradient
    return portable_backward.Backward(p, device, *tiles, together=config.key_and_value, all_rows=all_rows[0])
