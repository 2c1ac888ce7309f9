"""What a problem will launch, listed before any of it runs: with stand-ins for its arrays, which have no memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.problem import DTYPES, Memory, Problem

from .run import Passed
from .tiles import Make

__all__ = ["Launched", "inputs_like", "inputs_of", "launches", "stand_in"]

#: Elements from row to row that take the offsets of a tile past 32 bits.
_FAR = 2**26


class Launched(NamedTuple):
    """One launch as the backend asks for it: a kernel, stand-ins for its arrays, and what goes along with them."""

    kernel: Any
    arrays: tuple[Any, ...]
    passed: Passed


def launches(kernel_of: Callable[[Make], Any], inputs: Inputs, grad_out: Any = None) -> list[Launched]:
    """What forward and backward of the kernel that ``kernel_of`` makes launch for inputs without memory."""
    listed: list[Launched] = []

    def lister(kernel: Any, programs: int, passed: Callable[..., Passed]) -> Callable[..., None]:
        def launch(*arrays: Any, seed: int | None = None) -> None:
            listed.append(Launched(kernel, arrays, passed(*arrays)))

        return launch

    kernel = kernel_of(lister)
    problem = kernel.problem
    out, lse = kernel.forward(inputs)
    if problem.grads:
        grad_out = torch.empty_like(out) if grad_out is None else grad_out
        kernel.backward(inputs, out, lse, grad_out, torch.empty_like(lse) if problem.lse else None)
    return listed


def inputs_like(inputs: Inputs) -> Inputs:
    """Stand-ins for these."""

    def like(array: Any) -> Any:
        return torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device="meta")

    return inputs.map(like)


def inputs_of(p: Problem, *, far: bool = False) -> Inputs:
    """Stand-ins for inputs that lie as ``p`` says; ``far``: rows so far apart that offsets take 64 bits."""
    batch, seq_q, seq_k = (1, p.batch * p.seq_q, p.batch * p.seq_k) if p.varlen else (p.batch, p.seq_q, p.seq_k)
    keys = (p.batch * (p.seq_k // p.page), p.heads_kv, p.page) if p.page else (batch, p.heads_kv, seq_k)
    edges = torch.empty(p.batch + 1, dtype=torch.int32, device="meta") if p.varlen else None
    made = functools.partial(stand_in, far=far, turned=p.varlen)
    cached = functools.partial(stand_in, far=far, turned=p.varlen or p.page > 0)
    table = (p.batch, p.seq_k // p.page) if p.page else ()
    bits = batch, seq_q, -(-p.seq_q // 8)
    return Inputs(
        made((batch, p.heads_q, seq_q, p.dim_qk), p.dtype, p.query),
        cached((*keys, p.dim_qk), p.cache or p.dtype, p.key),
        cached((*keys, p.dim_v), p.cache or p.dtype, p.value),
        stand_in(p.mask_shape, p.mask.dtype, p.attn_mask, far=far) if p.mask and p.mask_shape else None,
        torch.empty(p.batch, dtype=torch.int32, device="meta") if p.key_lengths else None,
        seed=1 if p.dropout else None,
        offsets=None if edges is None else Offsets(edges, edges),
        sinks=torch.empty(p.heads_q, device="meta") if p.sinks else None,
        alibi_slopes=torch.empty(1, p.heads_q, device="meta") if p.alibi else None,
        block_table=torch.empty(table, dtype=torch.int32, device="meta") if p.page else None,
        key_scale=torch.empty(keys[:2], device="meta") if p.cache else None,
        value_scale=torch.empty(keys[:2], device="meta") if p.cache else None,
        tree_mask=torch.empty(bits, dtype=torch.uint8, device="meta") if p.tree else None,
    )


def stand_in(shape: tuple[int, ...], dtype: str, memory: Memory, *, far: bool = False, turned: bool = False) -> Any:
    """A tensor without memory that lies as ``memory`` says; ``turned``: the heads of a position side by side."""
    row = shape[3]
    if memory.align < 16:  # an odd number of the least step
        row += -row % 16 + max(1, memory.align // DTYPES.get(dtype, 1))
    strides = [shape[1] * shape[2] * row, shape[2] * row, row, 1]
    if turned:
        strides[1:3] = row, shape[1] * row
    if far:  # the heads of all batches between one row and the next, as where the sequence is the first axis
        strides = [shape[1] * row, row, _FAR, 1]
    if memory.strided:
        strides = [2 * stride for stride in strides]
    if memory.expanded:
        strides[0] = strides[1] = 0
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
