"""One problem's kernels: what is launched, in which order, and the arrays between the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnswitch.backend import Gradients, Inputs
from attnswitch.device import Device
from attnswitch.problem import Problem

from . import launch as launches
from .config import TritonConfig

__all__ = ["TritonKernel"]


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """Forward in one launch, or two where the keys are split; backward in three, and one for a mask's gradient."""

    problem: Problem
    device: Device
    config: TritonConfig

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        p = self.problem
        out = _like(inputs.query, p.dim_v)
        lse = inputs.query.new_empty((p.batch, p.heads_q, p.seq_q), dtype=torch.float32)
        if p.is_empty or p.seq_k == 0:
            return out.zero_(), lse.fill_(-torch.inf)
        with launches.on(inputs.query):
            launches.forward(p, self.device, self.config, inputs, out, lse)
        return out, lse

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        p = self.problem
        if p.is_empty or p.seq_k == 0:
            return Gradients(
                *(
                    torch.zeros_like(x) if letter in p.grads and x is not None else None
                    for letter, x in zip("qkvm", inputs[:4], strict=True)
                )
            )
        with launches.on(inputs.query):
            saved = launches.prepare(p, inputs, out, lse, grad_out, grad_lse)
            dq = dk = dv = dmask = None
            if "q" in p.grads:
                dq = launches.query_gradient(p, self.device, self.config, inputs, saved)
            if "k" in p.grads or "v" in p.grads:
                dk, dv = launches.key_gradients(p, self.device, self.config, inputs, saved)
            if "m" in p.grads:
                dmask = launches.mask_gradient(p, self.config, inputs, saved)
        return Gradients(dq, dk if "k" in p.grads else None, dv if "v" in p.grads else None, dmask)


def _like(query: Any, dim: int) -> Any:
    """An output (batch, heads, L, dim) that lies in memory in the order of ``query``, heads inside L or L inside."""
    b, h, length, _ = query.shape
    if h > 1 and length > 1 and query.stride(1) < query.stride(2):
        return query.new_empty((b, length, h, dim)).transpose(1, 2)
    return query.new_empty((b, h, length, dim))
