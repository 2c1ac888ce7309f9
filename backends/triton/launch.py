"""From arrays to launches: strides, tensor descriptors, grids, and the flags that a kernel is compiled for."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from attnswitch.backend import Inputs
from attnswitch.device import Device
from attnswitch.philox import BITS
from attnswitch.problem import Problem

from . import config, run
from .config import MOST_SPLITS, Tile, TritonConfig, block
from .descriptors import described, suits
from .kernels import backward as backward_kernels
from .kernels import forward as forward_kernels
from .kernels import mask_gradient as mask_kernels
from .tiles import Lists, listed, overlaps

__all__ = ["Saved", "forward", "key_gradients", "mask_gradient", "on", "prepare", "query_gradient"]

_LOG2E = 1.4426950408889634
#: A softcap from here on changes no score that float32 can hold next to it, and would overflow.
_NO_CAP = 1e30
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
    programs = p.batch * heads * _tiles(config.rows(p), tile.queries)
    dealt = p.dropout > 0.0
    tma = suits(p, device, inputs.key, inputs.value, dealt=dealt)
    overlap = (splits > 1 or lists is not None) and overlaps(device)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = out.new_empty((splits, p.batch, p.heads_q, p.seq_q, p.dim_v), dtype=torch.float32)
        part_lse = lse.new_empty((2, splits, p.batch, p.heads_q, p.seq_q))
    strides = part_out.stride()[-4:-1] if splits > 1 else out.stride()[:3]
    chunk = _tiles(p.seq_k, splits * tile.keys) * tile.keys
    run.start(
        forward_kernels.forward,
        programs * splits,
        inputs.query,
        described(inputs.key, tile.keys, dealt=dealt) if tma else inputs.key,
        described(inputs.value, tile.keys, dealt=dealt) if tma else inputs.value,
        part_out,
        part_lse,
        _bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        *inputs.query.stride(),
        *inputs.key.stride(),
        *inputs.value.stride(),
        *strides,
        *_mask_strides(inputs.attn_mask),
        *_list_strides(lists),
        p.batch,
        p.heads_q,
        p.group,
        p.seq_q,
        p.seq_k,
        p.dim_qk,
        p.dim_v,
        *_position(p),
        min(config.heads_a_section(p, queries=False), p.batch * heads),
        splits,
        chunk,
        *_numbers(p, inputs),
        PACKED=packed,
        SPLIT=splits > 1,
        EVEN_K=p.seq_k % tile.keys == 0,
        TMA=tma,
        WIDE=_wide(tile, inputs.key, inputs.value, inputs.attn_mask),
        LISTED=lists is not None,
        OVERLAP=overlap,
        **_flags(p, tile),
        **({"launch_pdl": True} if overlap and lists is not None else {}),
    )
    if splits > 1:
        count = p.batch * p.heads_q * p.seq_q
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
            MOST_SPLITS=MOST_SPLITS,
            BLOCK_S=16,
            BLOCK_DV=block(p.dim_v),
            OVERLAP=overlap,
            num_warps=4,
            **({"launch_pdl": True} if overlap else {}),
        )


def prepare(p: Problem, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
    """D of every row, and its lse as the other kernels want it."""
    padded, block_m = _tiles(p.seq_q, _PADDING) * _PADDING, 32
    rows = p.batch * p.heads_q * padded
    base, delta = lse.new_empty((2, p.batch, p.heads_q, padded))
    run.start(
        backward_kernels.prepare,
        _tiles(rows, block_m),
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
        _LOG2E if _folds(p) else 1.0,
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
        heads * _tiles(p.seq_q, tile.queries),
        inputs.query,
        described(inputs.key, tile.keys, dealt=dealt) if tma else inputs.key,
        described(inputs.value, tile.keys, dealt=dealt) if tma else inputs.value,
        saved.grad_out,
        saved.base,
        saved.delta,
        _bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        dq,
        *_operand_strides(inputs, saved),
        *_list_strides(lists),
        *_sizes(p, saved),
        min(config.heads_a_section(p, queries=False), heads),
        float(p.softmax_scale),
        *_numbers(p, inputs),
        EVEN_K=p.seq_k % tile.keys == 0,
        TMA=tma,
        WIDE=_wide(tile, inputs.key, inputs.value, inputs.attn_mask),
        LISTED=lists is not None,
        **_flags(p, tile),
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
        heads * _tiles(p.seq_k, tile.keys),
        described(inputs.query, tile.queries) if tma else inputs.query,
        inputs.key,
        inputs.value,
        described(saved.grad_out, tile.queries) if tma else saved.grad_out,
        saved.base,
        saved.delta,
        _bytes(inputs.attn_mask),
        inputs.key_lengths,
        *_list_arrays(lists),
        dk,
        dv,
        *_operand_strides(inputs, saved),
        *_list_strides(lists),
        *_sizes(p, saved),
        min(config.heads_a_section(p, queries=True), heads),
        float(p.softmax_scale),
        *_numbers(p, inputs),
        EVEN_Q=p.seq_q % tile.queries == 0,
        EVEN_K=p.seq_k % tile.keys == 0,
        TMA=tma,
        WIDE=_wide(tile, inputs.query, saved.grad_out, inputs.attn_mask),
        LISTED=lists is not None,
        **_flags(p, tile),
    )
    return dk, dv


def mask_gradient(p: Problem, chosen: TritonConfig, inputs: Inputs, saved: Saved) -> Any:
    """Gradient of a float mask, in its shape."""
    mask = inputs.attn_mask
    assert mask is not None
    tile = chosen.query_gradient
    b, h, q, k = mask.shape
    grad = mask.new_empty(mask.shape)
    programs = b * h * (_tiles(p.seq_q, tile.queries) if q > 1 else 1) * (_tiles(p.seq_k, tile.keys) if k > 1 else 1)
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
        *_numbers(p, inputs),
        OVER_B=b == 1,
        OVER_H=h == 1,
        OVER_Q=q == 1,
        OVER_K=k == 1,
        **_flags(p, tile),
    )
    return grad


# -- arguments that the launches share ---------------------------------------------------------------------------------


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _sizes(p: Problem, saved: Saved) -> tuple[int, ...]:
    padded = saved.base.shape[2]
    return (p.batch, p.heads_q, p.group, p.seq_q, padded, p.seq_k, p.dim_qk, p.dim_v, *_position(p))


def _position(p: Problem) -> tuple[int, int, int]:
    """Alignment of the diagonal, and how far to the left and right of it a query sees."""
    left, right = _reach(p)
    return int(p.bottom_right), left or 0, right or 0


def _reach(p: Problem) -> tuple[int | None, int | None]:
    left, right = p.window or (None, None)
    if p.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _numbers(p: Problem, inputs: Inputs) -> tuple[float | int, ...]:
    """What the products q . k are multiplied by first, the cap, the dropout's seed, threshold and factor."""
    factor, cap = p.softmax_scale, 0.0
    if _capped(p):
        factor, cap = p.softmax_scale / p.softcap, p.softcap
    elif _folds(p):
        factor *= _LOG2E
    seed = inputs.seed or 0
    keep = 1.0 if not p.dropout else 0.0 if p.dropout == 1.0 else 1.0 / (1.0 - p.dropout)
    return float(factor), float(cap), _signed(seed & 0xFFFFFFFF), _signed(seed >> 32), round(p.dropout * 2**BITS), keep


def _signed(word: int) -> int:
    """32 bits as the integer that Triton takes for an int32; the kernels read them as unsigned."""
    return word - 2**32 if word >= 2**31 else word


def _capped(p: Problem) -> bool:
    return 0.0 < p.softcap < _NO_CAP


def _folds(p: Problem) -> bool:
    """Whether a score is q . k times a positive factor, which then becomes a part of exp2."""
    plain_mask = p.mask is None or p.mask.is_bool
    return plain_mask and not _capped(p) and p.softmax_scale > 0.0


def _flags(p: Problem, tile: Tile) -> dict[str, Any]:
    """What every kernel is compiled for."""
    left, right = _reach(p)
    return {
        "EVEN_D": block(p.dim_qk) == p.dim_qk,
        "EVEN_DV": block(p.dim_v) == p.dim_v,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "BLOCK_D": block(p.dim_qk),
        "BLOCK_DV": block(p.dim_v),
        "FOLD": _folds(p),
        "SOFTCAP": _capped(p),
        "MASK_KIND": _mask_kind(p),
        "DROPOUT": p.dropout > 0.0,
        "HAS_LENGTHS": p.key_lengths,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers or None,
    }


def _mask_kind(p: Problem) -> int:
    return 0 if p.mask is None else 1 if p.mask.is_bool else 2


def _bytes(mask: Any) -> Any:
    """A bool mask as bytes: the same memory, in a type whose loads mean the same in every version of Triton."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def _mask_strides(mask: Any) -> tuple[int, ...]:
    """Strides of the mask, 0 along the axes that it is broadcast over."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _operand_strides(inputs: Inputs, saved: Saved) -> tuple[int, ...]:
    return (
        *inputs.query.stride(),
        *inputs.key.stride(),
        *inputs.value.stride(),
        *saved.grad_out.stride(),
        *_mask_strides(inputs.attn_mask),
    )


def _list_arrays(lists: Lists | None) -> tuple[Any, Any]:
    return (None, None) if lists is None else (lists.tiles, lists.counts)


def _list_strides(lists: Lists | None) -> tuple[int, int, int]:
    return (0, 0, 0) if lists is None else lists.strides


def _wide(tile: Tile, *arrays: Any) -> bool:
    """Whether an offset within one tile of any of the arrays may not fit 32 bits."""
    rows = max(tile.queries, tile.keys)
    return any(x is not None and rows * x.stride(2) + 256 * x.stride(3) >= 2**31 for x in arrays)
