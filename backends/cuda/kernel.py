"""One problem's kernels: what is launched, in which order, and the arrays between the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnswitch.backend import Gradients, Inputs
from attnswitch.problem import Problem

from . import launch, memory
from .config import CudaConfig

__all__ = ["CudaKernel"]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """Forward in one launch, or two where the keys are split; backward in three or four, and one for a float mask.

    Nothing is special about sizes of 0: a grid without blocks is not launched, and a row without keys is one that sees
    nothing.
    """

    problem: Problem
    config: CudaConfig

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        p = self.problem
        real = "float64" if p.dtype == "float64" else "float32"
        with memory.on(inputs.query):
            out = _like(inputs.query, p.dim_v)
            lse = memory.empty((p.batch, p.heads_q, p.seq_q), inputs.query, real)
            launch.forward(p, self.config, inputs, out, lse)
        return out, lse

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        p = self.problem
        query = key = value = mask = None
        with memory.on(inputs.query):
            saved = launch.prepare(p, inputs, out, lse, grad_out, grad_lse)
            if "q" in p.grads:
                query = launch.query_gradient(p, self.config, inputs, saved)
            if wanted := "".join(letter for letter in "kv" if letter in p.grads):
                key, value = launch.key_gradients(p, self.config, inputs, saved, wanted)
            if "m" in p.grads:
                mask = launch.mask_gradient(p, self.config, inputs, saved)
        return Gradients(query, key, value, mask)


def _like(query: Any, dim: int) -> Any:
    """An output (batch, heads, L, dim) that lies in memory in the order of ``query``, heads inside L or L inside."""
    b, h, length, _ = query.shape
    steps = memory.strides(query)
    if h > 1 and length > 1 and abs(steps[1]) < abs(steps[2]):
        return memory.empty((b, length, h, dim), query).swapaxes(1, 2)
    return memory.empty((b, h, length, dim), query)
