"""Peers of ``attention_varlen``: what a user would call for sequences without padding, without attnswitch."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnswitch.bench.candidates import Attend, Refused
from attnswitch.bench.workload import Workload

__all__ = ["flash4", "torch_default"]


def torch_default(work: Workload) -> Attend:
    """``torch.nn.attention.varlen.varlen_attn`` on a GPU; on the CPU, which has none, each sequence by itself.

    Raises ``Refused`` for what neither has an argument for.
    """
    p = work.problem
    for what, asked in (("softcap", p.softcap), ("dropout", p.dropout), ("lse", p.lse)):
        if asked:
            raise Refused(f"torch's own calls for sequences without padding have no {what}")
    if work.device == "cpu":
        return _one_by_one(work)
    if p.positional and not p.bottom_right and p.seq_q != p.seq_k:
        raise Refused("varlen_attn aligns positions to the bottom right")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Refused(f"torch {torch.__version__} has no varlen_attn ({error})", "unavailable") from None
    assert work.offsets is not None
    window = tuple(-1 if side is None else side for side in p.reach)
    options: dict[str, Any] = {"scale": p.scale, "enable_gqa": p.group > 1, "window_size": window}
    attend: Any = varlen_attn
    return functools.partial(
        attend, work.query, work.key, work.value, *work.offsets, p.seq_q, p.seq_k, **_said(options)
    )


def flash4(work: Workload) -> Attend:
    """``flash_attn.cute.flash_attn_varlen_func`` of the package flash-attn-4.

    Raises ``Refused`` for what it has no argument for.
    """
    p = work.problem
    if p.dropout or p.lse:
        raise Refused("FlashAttention-4 has no dropout, and its output comes without lse here")
    if p.dtype not in ("float16", "bfloat16"):
        raise Refused(f"FlashAttention-4 takes 16-bit types ({p.dtype})")
    if p.positional and not p.bottom_right and p.seq_q != p.seq_k:
        raise Refused("FlashAttention-4 aligns positions to the bottom right")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Refused(f"flash-attn-4 cannot be imported ({error})", "unavailable") from None
    assert work.offsets is not None
    left, right = p.reach
    options: dict[str, Any] = {
        "cu_seqlens_q": work.offsets[0],
        "cu_seqlens_k": work.offsets[1],
        "max_seqlen_q": p.seq_q,
        "max_seqlen_k": p.seq_k,
        "softmax_scale": p.scale,
        "causal": p.causal and left is None,
        "window_size": (None, None) if left is None else (left, right),
        "softcap": p.softcap,
    }

    def attend() -> torch.Tensor:
        found = flash_attn_varlen_func(work.query, work.key, work.value, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return attend


def _said(options: dict[str, Any]) -> dict[str, Any]:
    """Those that are not the default: versions of torch differ in the others."""
    return {name: value for name, value in options.items() if value not in (None, False, (-1, -1))}


def _one_by_one(work: Workload) -> Attend:
    p = work.problem
    assert work.offsets is not None
    queries, keys = ([end - begin for begin, end in itertools.pairwise(edges.tolist())] for edges in work.offsets)
    if p.window:
        raise Refused("scaled_dot_product_attention has no window but by a mask of each sequence")
    if p.causal and p.bottom_right and queries != keys:
        raise Refused("scaled_dot_product_attention aligns positions to the top left")
    attend = functools.partial(scaled_dot_product_attention, is_causal=p.causal, scale=p.scale, enable_gqa=p.group > 1)

    def each() -> torch.Tensor:
        operands = (torch.split(x, sizes) for x, sizes in ((work.query, queries), (work.key, keys), (work.value, keys)))
        parts = [attend(*(x.transpose(0, 1)[None] for x in part)) for part in zip(*operands, strict=True)]
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    return each
