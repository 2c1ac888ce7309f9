"""One problem's kernels: what is launched, in which order, and the arrays between the launches."""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Forward, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import hopper, memory, portable, prepared
from .config import CudaConfig
from .tiles import HopperTile

__all__ = ["CudaKernel"]


class CudaKernel(Kernel):
    """Forward in one launch, or two for many splits or a mask on Hopper; backward in three or four, five with a mask.

    Nothing is special about sizes of 0: a grid without blocks is not launched, and a row without keys is one that sees
    nothing.
    """

    def __init__(self, problem: Problem, config: CudaConfig, device: Device) -> None:
        p = self.problem = problem
        self._rows = (p.batch, p.heads_q, p.seq_q)
        self._real = "float64" if p.dtype == "float64" else "float32"
        own = isinstance(config.forward, HopperTile)
        self._forward = hopper.Forward(p, config, device) if own else portable.Forward(p, config)
        self._prepare = portable.Prepare(p)
        self._query = portable.QueryGradient(p, config) if "q" in p.grads else None
        self._keys = portable.KeyGradients(p, config) if "k" in p.grads or "v" in p.grads else None
        self._mask = portable.MaskGradient(p, config) if "m" in p.grads else None

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        with memory.on(inputs.query):
            out = memory.like(inputs.query, self.problem.dim_v)
            lse = memory.empty(self._rows, inputs.query, self._real)
            self._forward(inputs, out, lse)
        return out, lse

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward`` for tensors that lie like these; of calls without a mask that are one launch on a GPU."""
        alone, general = self._forward.alone, super().prepared(inputs)
        if alone is None or inputs.attn_mask is not None or memory.on_cpu(inputs.query) or not alone.blocks:
            return general
        return prepared.forward(self.problem, alone, inputs, general)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        with memory.on(inputs.query):
            saved = self._prepare(inputs, out, lse, grad_out, grad_lse)
            query = self._query(inputs, saved) if self._query else None
            key, value = self._keys(inputs, saved) if self._keys else (None, None)
            mask = self._mask(inputs, saved) if self._mask else None
        return Gradients(query, key, value, mask)
