"""16-bit operands raised to float32 around torch's kernel of the CPU, where that is faster.

Where the processor has no fast products of their type, the kernel multiplies element by element: training steps in 16
bits take two to nine times as long so, and forwards in float16 up to six times. The copies are O(L D).

Where it has, it depends on which (``fixtures/measure_raised.py``):

- One row is no product of matrices. Without instructions for scalar products of its type (AVX512-BF16, AVX512-FP16) a
  single query takes two to five times as long as its copies; with them it takes a tenth to seven tenths.
- A training step with tiles of matrices (AMX) is faster as it is, but for short heads. In float16, of which few
  processors have tiles, it takes up to 2.3 times as long. Else it is faster where little of the last tile is padding.
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
#: Numbers of a head of keys up to which a backward with tiles gains by copies.
_SHORT = 20_000
#: Bytes of a copy up to which one query gains by it: of 20 MB it took 0.57 to 0.78 of the time, of 32 MB, whose pages
#: the system maps anew at each call, 2.8 times as long.
_MAPPED = 20 * 2**20


def is_raised(problem: Problem, device: Device) -> bool:
    """Whether operands of ``problem`` are raised. A forward of several queries in bfloat16 is fast already."""
    p = problem
    if device.kind != "cpu" or DTYPES[p.dtype] != 2:
        return False
    head = p.seq_k * max(p.dim_qk, p.dim_v)
    if p.seq_q == 1:
        return not _sums(p.dtype) and p.batch * p.heads_kv * head * DTYPES["float32"] <= _MAPPED
    if not p.grads:
        return p.dtype == "float16" and not _multiplies(p.dtype)
    if _tiles(p.dtype):
        return head <= _SHORT
    if p.dtype == "float16" or not _multiplies(p.dtype):
        return True
    return 2 * (-(-p.seq_k // KEYS) * KEYS) >= 3 * p.seq_k


@functools.cache
def _sums(dtype: str) -> bool:
    """Whether the processor has instructions for scalar products of this type."""
    return _multiplies(dtype) if dtype == "float16" else _has("_is_avx512_bf16_supported")


@functools.cache
def _tiles(dtype: str) -> bool:
    """Whether it has products of tiles of matrices of this type."""
    return _has("_is_amx_fp16_supported" if dtype == "float16" else "_is_amx_tile_supported")


def _has(asked: str) -> bool:
    """What torch says of the processor; no where it cannot be asked."""
    return bool(getattr(torch.cpu, asked, bool)())


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
