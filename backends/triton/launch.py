"""From arrays to launches: strides, tensor descriptors and grids of each kernel."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from attnswitch import arithmetic
from attnswitch.backend import Inputs
from attnswitch.device import Device
from attnswitch.problem import Problem

from . import config, run
from .arguments import as_bytes, mask_strides, numbers, options, position, tiles, unit, variant, wide
from .config import TritonConfig, block
from .descriptors import described, suits
from .kernels import backward as backward_kernels
from .kernels import forward as forward_kernels
from .kernels import mask_gradient as mask_kernels
from .tiles import Lists, listed, overlaps

__all__ = ["Saved", "forward", "key_gradients", "mask_gradient", "on", "prepare", "query_gradient"]

#: Rows of the largest tile: what the backward reads row by row is padded to it, and read without a test.
_PADDING = 128


class Saved(NamedTuple):
    """What the backward works on beside the inputs: dO, and for each row what ``prepare`` made of lse and dO.

    ``base`` and ``delta`` are (B, Hq, Lq padded to whole tiles).
    """

    grad_out: Any
    base: Any
    delta: Any


def on(tensor: Any) -> Any:
    """The device of ``tensor`` as the current one, which is where Triton launches."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


# -- launches ----------------------------------------------------------------------------------------------------------


def forward(p: Problem, device: Device, chosen: TritonConfig, inputs: Inputs, out: Any, lse: Any) -> None:
    """Write output and lse."""
    tile, splits = chosen.forward, chosen.splits
    packed = config.packs(p)
    lists = None if packed or splits > 1 else listed(p, device, inputs, tile.queries, tile.keys)
    heads = p.heads_q // (p.group if packed else 1)
    programs = p.batch * heads * tiles(config.rows(p), tile.queries)
    dealt = p.dropout > 0.0
    tma = suits(p, device, inputs.key, inputs.value, dealt=dealt)
    overlap = (splits > 1 or lists is not None) and overlaps(device)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = out.new_empty((splits, p.batch, p.heads_q, p.seq_q, p.dim_v), dtype=torch.float32)
        part_lse = lse.new_empty((2, splits, p.batch, p.heads_q, p.seq_q))
    strides = part_out.stride()[-4:-1] if splits > 1 else out.stride()[:3]
    chunk = tiles(p.seq_k, splits * tile.keys) * tile.keys
    run.start(
        forward_kernels.forward,
        programs * splits,
        inputs.query,
        described(inputs.key, tile.keys, dealt=dealt) if tma else inputs.key,
        described(inputs.value, tile.keys, dealt=dealt) if tma else inputs.value,
        part_out,
        part_lse,
        as_bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        *inputs.query.stride(),
        *inputs.key.stride(),
        *inputs.value.stride(),
        *strides,
        *mask_strides(inputs.attn_mask),
        *_list_strides(lists),
        p.batch,
        p.heads_q,
        p.group,
        p.seq_q,
        p.seq_k,
        p.dim_qk,
        p.dim_v,
        *position(p),
        min(arithmetic.heads_a_section(p, packed=packed), p.batch * heads),
        splits,
        chunk,
        *numbers(p, inputs),
        how=variant(
            p,
            tile,
            even_k=p.seq_k % tile.keys == 0,
            packed=packed,
            split=splits > 1,
            tma=tma,
            wide=wide(tile, inputs.key, inputs.value, inputs.attn_mask),
            listed=lists is not None,
            overlap=overlap,
        ),
        **options(tile, early=overlap and lists is not None),
    )
    if splits > 1:
        count = p.batch * p.heads_q * p.seq_q
        at_once = min(64, max(16, 1 << (splits - 1).bit_length()))
        run.start(
            forward_kernels.merge,
            count,
            part_out,
            part_lse,
            out,
            lse,
            *out.stride()[:3],
            p.heads_q,
            p.seq_q,
            count,
            splits,
            p.dim_v,
            BLOCK_S=at_once,
            BLOCK_DV=block(p.dim_v),
            OVERLAP=overlap,
            num_warps=at_once // 16,
            **({"launch_pdl": True} if overlap else {}),
        )


def prepare(p: Problem, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
    """D of every row, and its lse as the other kernels want it."""
    padded, block_m = tiles(p.seq_q, _PADDING) * _PADDING, 32
    rows = p.batch * p.heads_q * padded
    base, delta = lse.new_empty((2, p.batch, p.heads_q, padded))
    run.start(
        backward_kernels.prepare,
        tiles(rows, block_m),
        out,
        grad_out,
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        delta,
        base,
        *out.stride(),
        *grad_out.stride(),
        p.heads_q,
        p.seq_q,
        padded,
        rows,
        p.dim_v,
        unit(p),
        WITH_DLSE=grad_lse is not None,
        EVEN_DV=block(p.dim_v) == p.dim_v,
        BLOCK_M=block_m,
        BLOCK_DV=block(p.dim_v),
        num_warps=4,
    )
    return Saved(grad_out, base, delta)


def query_gradient(p: Problem, device: Device, chosen: TritonConfig, inputs: Inputs, saved: Saved) -> Any:
    """Gradient of query, (B, Hq, Lq, D)."""
    tile = chosen.query_gradient
    lists = listed(p, device, inputs, tile.queries, tile.keys)
    dealt = p.dropout > 0.0
    tma = suits(p, device, inputs.key, inputs.value, dealt=dealt)
    dq = inputs.query.new_empty((p.batch, p.heads_q, p.seq_q, p.dim_qk))
    heads = p.batch * p.heads_q
    run.start(
        backward_kernels.query_gradient,
        heads * tiles(p.seq_q, tile.queries),
        inputs.query,
        described(inputs.key, tile.keys, dealt=dealt) if tma else inputs.key,
        described(inputs.value, tile.keys, dealt=dealt) if tma else inputs.value,
        saved.grad_out,
        saved.base,
        saved.delta,
        as_bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        dq,
        *_operand_strides(inputs, saved),
        *_list_strides(lists),
        *_sizes(p, saved),
        min(arithmetic.heads_a_section(p), heads),
        float(p.softmax_scale),
        *numbers(p, inputs),
        how=variant(
            p,
            tile,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            wide=wide(tile, inputs.key, inputs.value, inputs.attn_mask),
            listed=lists is not None,
        ),
        **options(tile),
    )
    return dq


def key_gradients(p: Problem, device: Device, chosen: TritonConfig, inputs: Inputs, saved: Saved) -> tuple[Any, Any]:
    """Gradients of key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv)."""
    tile = chosen.key_gradients
    lists = listed(p, device, inputs, tile.queries, tile.keys, by_keys=True)
    tma = suits(p, device, inputs.query, saved.grad_out)
    dk = inputs.key.new_empty((p.batch, p.heads_kv, p.seq_k, p.dim_qk))
    dv = inputs.key.new_empty((p.batch, p.heads_kv, p.seq_k, p.dim_v))
    heads = p.batch * p.heads_kv
    run.start(
        backward_kernels.key_gradients,
        heads * tiles(p.seq_k, tile.keys),
        described(inputs.query, tile.queries) if tma else inputs.query,
        inputs.key,
        inputs.value,
        described(saved.grad_out, tile.queries) if tma else saved.grad_out,
        saved.base,
        saved.delta,
        as_bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        dk,
        dv,
        *_operand_strides(inputs, saved),
        *_list_strides(lists),
        *_sizes(p, saved),
        min(arithmetic.heads_a_section(p, queries=True), heads),
        float(p.softmax_scale),
        *numbers(p, inputs),
        how=variant(
            p,
            tile,
            even_q=p.seq_q % tile.queries == 0,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            wide=wide(tile, inputs.query, saved.grad_out, inputs.attn_mask),
            listed=lists is not None,
        ),
        **options(tile),
    )
    return dk, dv


def mask_gradient(p: Problem, chosen: TritonConfig, inputs: Inputs, saved: Saved) -> Any:
    """Gradient of a float mask, in its shape."""
    mask = inputs.attn_mask
    assert mask is not None
    tile = chosen.query_gradient
    b, h, q, k = mask.shape
    grad = mask.new_empty(mask.shape)
    programs = b * h * (tiles(p.seq_q, tile.queries) if q > 1 else 1) * (tiles(p.seq_k, tile.keys) if k > 1 else 1)
    run.start(
        mask_kernels.mask_gradient,
        programs,
        inputs.query,
        inputs.key,
        inputs.value,
        saved.grad_out,
        saved.base,
        saved.delta,
        mask,
        inputs.key_lengths,
        grad,
        *_operand_strides(inputs, saved),
        *_sizes(p, saved),
        h,
        *numbers(p, inputs),
        OVER_B=b == 1,
        OVER_H=h == 1,
        OVER_Q=q == 1,
        OVER_K=k == 1,
        how=variant(p, tile),
        **options(tile),
    )
    return grad


# -- arguments that the launches share ---------------------------------------------------------------------------------


def _sizes(p: Problem, saved: Saved) -> tuple[int, ...]:
    padded = saved.base.shape[2]
    return (p.batch, p.heads_q, p.group, p.seq_q, padded, p.seq_k, p.dim_qk, p.dim_v, *position(p))


def _operand_strides(inputs: Inputs, saved: Saved) -> tuple[int, ...]:
    return (
        *inputs.query.stride(),
        *inputs.key.stride(),
        *inputs.value.stride(),
        *saved.grad_out.stride(),
        *mask_strides(inputs.attn_mask),
    )


def _list_arrays(lists: Lists | None) -> tuple[Any, Any]:
    return (None, None) if lists is None else (lists.tiles, lists.counts)


def _list_strides(lists: Lists | None) -> tuple[int, int, int]:
    return (0, 0, 0) if lists is None else lists.strides
