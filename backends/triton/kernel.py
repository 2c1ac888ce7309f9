"""One problem's kernels: what is launched, in which order, and the arrays between the launches."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.machine.backend import Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import launch
from .arguments import dense
from .config import TritonConfig
from .operands import copied, in_steps, mask_in_steps, uneven

__all__ = ["TritonKernel"]


class TritonKernel(Kernel):
    """Forward in one launch, or two where the keys are split; backward in three, and one for a mask's gradient."""

    def __init__(self, problem: Problem, device: Device, config: TritonConfig) -> None:
        p = self.problem = problem
        self._rows, self._by_heads = dense(p.batch, p.heads_q, p.seq_q), dense(p.batch, p.heads_q, p.seq_q, p.dim_v)
        _, (by_b, by_l, by_h, by_d) = dense(p.batch, p.seq_q, p.heads_q, p.dim_v)
        self._by_rows = self._by_heads[0], (by_b, by_h, by_l, by_d)
        self._several = p.heads_q > 1 and p.seq_q > 1
        self._sees_nothing = p.is_empty or p.seq_k == 0
        self._uneven = uneven(p)
        self._forward = launch.Forward(p, device, config)
        self._prepare = launch.Prepare(p)
        self._query = launch.QueryGradient(p, device, config) if "q" in p.grads else None
        self._keys = launch.KeyGradients(p, device, config) if "k" in p.grads or "v" in p.grads else None
        self._mask = launch.MaskGradient(p, config) if "m" in p.grads else None

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse. The output lies in memory in the order of query, heads inside L or L inside."""
        query = inputs.query
        turned = self._several and query.stride(1) < query.stride(2)
        out = query.new_empty_strided(*(self._by_rows if turned else self._by_heads))
        lse = query.new_empty_strided(*self._rows, dtype=torch.float32)
        if self._sees_nothing:
            return out.zero_(), lse.fill_(-torch.inf)
        with launch.on(query):
            self._forward(self._read(inputs), out, lse)
        return out, lse

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        p = self.problem
        if self._sees_nothing:
            return Gradients(
                *(
                    torch.zeros_like(x) if letter in p.grads and x is not None else None
                    for letter, x in zip("qkvm", inputs[:4], strict=True)
                )
            )
        with launch.on(inputs.query):
            inputs = self._read(inputs)
            saved = self._prepare(out, lse, in_steps(grad_out), grad_lse)
            query = self._query(inputs, saved) if self._query else None
            key, value = self._keys(inputs, saved) if self._keys else (None, None)
            mask = self._mask(inputs, saved) if self._mask else None
        return Gradients(query, key if "k" in p.grads else None, value if "v" in p.grads else None, mask)

    def _read(self, inputs: Inputs) -> Inputs:
        """Inputs as the kernels read them."""
        if self._uneven:
            inputs = inputs._replace(**{role: copied(getattr(inputs, role)) for role in self._uneven})
        if inputs.attn_mask is not None:
            inputs = inputs._replace(attn_mask=mask_in_steps(inputs.attn_mask))
        if inputs.key_lengths is None or inputs.key_lengths.is_contiguous():
            return inputs
        return inputs._replace(key_lengths=inputs.key_lengths.contiguous())
