"""16-bit operands raised to float32 around torch's kernel of the CPU, where that is faster.

Where the processor has no fast products of their type, the kernel multiplies element by element: training steps in 16
bits take two to nine times as long so, and forwards in float16 up to six times. Where it has, a single query still
takes two to five times as long, since one row is no product of matrices; and a training step does up to four times
where the last tile of keys is mostly padding (``attnswitch bench choice --device cpu``). The copies are O(L D).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnswitch.machine.backend import Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from .reshaped import ReshapedKernel

__all__ = ["KEYS", "RaisedKernel", "extra_bytes", "is_raised"]

#: Keys of a tile of torch's CPU kernel.
KEYS = 512
#: Bytes of a copy up to which one query gains by it: of 20 MB it took 0.57 to 0.78 of the time, of 32 MB, whose pages
#: the system maps anew at each call, 2.8 times as long.
_MAPPED = 20 * 2**20


def is_raised(problem: Problem, device: Device) -> bool:
    """Whether operands of ``problem`` are raised. A forward of several queries in bfloat16 is as fast as it is."""
    p = problem
    if device.kind != "cpu" or DTYPES[p.dtype] != 2:
        return False
    if p.seq_q == 1:
        return p.batch * p.heads_kv * p.seq_k * max(p.dim_qk, p.dim_v) * DTYPES["float32"] <= _MAPPED
    if _multiplies(p.dtype):
        return bool(p.grads) and 2 * (-(-p.seq_k // KEYS) * KEYS) >= 3 * p.seq_k
    return p.dtype == "float16" or bool(p.grads)


@functools.cache
def _multiplies(dtype: str) -> bool:
    """Whether oneDNN has products of this type on this processor; so too where this torch cannot be asked."""
    asked = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, asked)())
    except (AttributeError, RuntimeError):
        return True


def extra_bytes(problem: Problem) -> int:
    """Of the copies: operands and output in float32, and their gradients."""
    rows = problem.batch * (problem.heads_q * problem.seq_q + problem.heads_kv * problem.seq_k)
    return rows * (problem.dim_qk + problem.dim_v) * DTYPES["float32"] * (2 if problem.grads else 1)


class RaisedKernel(ReshapedKernel):
    """The kernel of the same problem in float32, between two casts."""

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        super().__init__(kernel)
        self.dtype = getattr(torch, problem.dtype)

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Copies in float32."""
        return query.float(), key.float(), value.float()

    def given_back(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """Output in the operands' type, lse in float32."""
        return out.to(self.dtype), lse

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients in the types of their operands."""
        out = None if out is None else out.float()
        grads = self.kernel.backward(self.inputs(inputs), out, lse, grad_out.float(), grad_lse)
        query, key, value = (None if x is None else x.to(self.dtype) for x in grads[:3])
        return Gradients(query, key, value, grads.attn_mask)
