"""Peers: what a user would call without attnswitch. Each takes a workload or says why not.

Masks are made once, before the clock starts, as an application makes them once for many layers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.nn.attention import flex_attention as flex_module
from torch.nn.functional import scaled_dot_product_attention

from attnswitch.bench import varlen_peers
from attnswitch.bench.candidates import Attend, Refused
from attnswitch.bench.workload import Workload

__all__ = ["PEERS", "flash4", "flex", "torch_default"]


def torch_default(work: Workload) -> Attend:
    """``torch.nn.functional.scaled_dot_product_attention``, which chooses by itself.

    What it has no argument for (windows, lengths, bottom-right causal, causal beside a mask) is given as a mask of up
    to (B, Hq, Lq, Lk). Raises ``Refused`` for what a mask cannot say.
    """
    p = work.problem
    if p.page:
        raise Refused("scaled_dot_product_attention is not called here with a cache in pages")
    _plain_scores(work)
    if p.varlen:
        return varlen_peers.torch_default(work)
    _only_output(work, "scaled_dot_product_attention")
    if p.softcap:
        raise Refused(f"scaled_dot_product_attention has no softcap (softcap={p.softcap})")
    if p.seeded:
        raise Refused("scaled_dot_product_attention takes no seed for its dropout")
    plain = not p.needs_mask or (p.mask is not None and not p.positional and not p.key_lengths)
    mask = work.attn_mask if plain else _dense(work)
    return functools.partial(
        scaled_dot_product_attention,
        work.query,
        work.key,
        work.value,
        attn_mask=mask,
        dropout_p=p.dropout,
        is_causal=plain and p.causal and not p.sees_all,
        scale=p.scale,
        enable_gqa=p.group > 1,
    )


def flex(work: Workload, compiler: Callable[..., Any] = torch.compile) -> Attend:
    """``torch.nn.attention.flex_attention`` compiled for the workload's shape.

    Causal, windows, lengths and bool masks go into its block mask, softcap and float masks into its score function.
    Raises ``Refused`` for what neither can say.
    """
    p = work.problem
    _plain_scores(work)
    _only_output(work, "the output of flex_attention")
    if p.page:
        raise Refused("FlexAttention is not called here with a cache in pages")
    if p.varlen:
        raise Refused("FlexAttention takes sequences one after another as one, with a block mask that is left out here")
    if p.dropout:
        raise Refused(f"FlexAttention has no dropout (dropout_p={p.dropout})")
    if work.device == "cpu" and p.grads:
        raise Refused("FlexAttention has no backward on the CPU")
    if "m" in p.grads:
        raise Refused("a gradient of attn_mask is left out: FlexAttention computes it by atomic additions")
    # Every shape is compiled as one of its own, so what was compiled for others only counts towards Dynamo's limit.
    torch._dynamo.reset()
    # A graph whose gradients are taken again and again must keep what it saved: memory, and not time.
    functorch_config.donated_buffer = False
    hides = p.positional or p.key_lengths or (p.mask is not None and p.mask.is_bool)
    block_mask = None
    if hides:
        spans_heads = p.mask is not None and p.mask.is_bool and "h" in p.mask.axes
        spans_batch = p.key_lengths or (p.mask is not None and p.mask.is_bool and "b" in p.mask.axes)
        block_mask = flex_module.create_block_mask(
            _visible(work),
            p.batch if spans_batch else None,
            p.heads_q if spans_heads else None,
            p.seq_q,
            p.seq_k,
            device=work.device,
        )
    attend = compiler(flex_module.flex_attention, dynamic=False)
    return functools.partial(
        attend,
        work.query,
        work.key,
        work.value,
        score_mod=_score(work),
        block_mask=block_mask,
        scale=p.scale,
        enable_gqa=p.group > 1,
    )


def flash4(work: Workload) -> Attend:
    """``flash_attn.cute.flash_attn_func`` of the package flash-attn-4 (FlashAttention-4), which compiles for the shape.

    It takes (B, L, H, D); the workload's arrays are handed over as such views. Raises ``Refused`` for what it has no
    argument for.
    """
    p = work.problem
    if p.page:
        raise Refused("FlashAttention-4 is not called here with a cache in pages")
    _plain_scores(work)
    if p.varlen:
        return varlen_peers.flash4(work)
    _only_output(work, "the output of FlashAttention-4")
    for what, asked in (("attn_mask", p.mask is not None), ("dropout", p.dropout), ("key_lengths", p.key_lengths)):
        if asked:
            raise Refused(f"FlashAttention-4 has no {what} for a dense batch")
    if p.dtype not in ("float16", "bfloat16"):
        raise Refused(f"FlashAttention-4 takes 16-bit types ({p.dtype})")
    if p.positional and not p.bottom_right and p.seq_q != p.seq_k:
        raise Refused("FlashAttention-4 aligns positions to the bottom right")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Refused(f"flash-attn-4 cannot be imported ({error})", "unavailable") from None
    left, right = p.reach
    window = (None, None) if left is None else (left, right)
    operands = [x.transpose(1, 2) for x in (work.query, work.key, work.value)]

    def attend() -> torch.Tensor:
        found = flash_attn_func(
            *operands,
            softmax_scale=p.scale,
            causal=p.causal and left is None,
            window_size=window,
            softcap=p.softcap,
        )
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return attend


#: Every peer by name.
PEERS: dict[str, Callable[[Workload], Attend]] = {"torch": torch_default, "flex": flex, "fa4": flash4}


def _plain_scores(work: Workload) -> None:
    for name in ("sinks", "alibi"):
        if getattr(work.problem, name):
            raise Refused(f"{name}: left out of what peers are timed on")


def _only_output(work: Workload, what: str) -> None:
    if work.problem.lse:
        raise Refused(f"{what} comes without lse")


def _dense(work: Workload) -> torch.Tensor:
    """Everything that hides as one mask, bool, or float where there is a bias; what nothing spans has length 1."""
    p = work.problem
    b, h, i, j = (torch.arange(size, device=work.device) for size in (p.batch, p.heads_q, p.seq_q, p.seq_k))
    visible: torch.Tensor = _visible(work)(b[:, None, None, None], h[:, None, None], i[:, None], j)
    visible = visible[(None,) * (4 - visible.ndim)]
    if work.attn_mask is None or work.attn_mask.dtype == torch.bool:
        return visible
    return work.attn_mask.masked_fill(~visible, float("-inf"))


def _visible(work: Workload) -> Callable[[Any, Any, Any, Any], Any]:
    """Whether query i of (b, h) sees key j, from indices that broadcast; as FlexAttention wants its mask function.

    Only what the problem needs is computed: a condition that always holds would slow the kernel down.
    """
    p = work.problem
    lengths, mask = work.key_lengths, work.attn_mask
    boolean = mask if mask is not None and mask.dtype == torch.bool else None
    left, right = p.window or (None, None)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        place = i
        if p.positional and p.bottom_right:
            place = i + ((p.seq_k if lengths is None else lengths[b]) - p.seq_q)
        conditions = []
        if p.causal:
            conditions.append(j <= place)
        if left is not None:
            conditions.append(j >= place - left)
        if right is not None and not p.causal:  # causal is the narrower
            conditions.append(j <= place + right)
        if lengths is not None:
            conditions.append(j < lengths[b])
        if boolean is not None:
            conditions.append(_at(boolean, b, h, i, j))
        return functools.reduce(operator.and_, conditions)

    return visible


def _score(work: Workload) -> Callable[..., Any] | None:
    """Softcap, then the float mask; None where there is neither."""
    p, mask = work.problem, work.attn_mask
    bias = mask if mask is not None and mask.dtype != torch.bool else None
    if not p.softcap and bias is None:
        return None
    cap = p.softcap

    def score(number: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap:
            number = cap * torch.tanh(number / cap)
        return number if bias is None else number + _at(bias, b, h, i, j)

    return score


def _at(mask: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The mask's element, where axes of length 1 broadcast."""
    return mask[tuple(index if size > 1 else 0 for index, size in zip((b, h, i, j), mask.shape, strict=True))]
