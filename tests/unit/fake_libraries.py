"""Stand-ins for libraries that are not installed here: their exact signatures over the formula, on the CPU.

Signatures are those of flash-attn 2.8, FlashAttention-3 (hopper/, 2025), flash-attn-4 4.0.0b36, xformers 0.0.35,
flashinfer-python 0.7.2, sageattention 1.0.6 and torch 2.15. What the backends here do not say must stay at its default.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

#: Every call that a stand-in got: its name, operands, and what was said beside them.
calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


class _Unset:
    """A default that nothing here may change."""


def formula(q, k, v, *, scale, left=None, right=None, bottom=True, softcap=0.0, slopes=None, sinks=None):
    """Output (L, H, Dv) and lse (H, L) of one sequence, (L, H, D), in float32; a row that sees nothing has lse +inf."""
    out_type = q.dtype
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    s = scale * (q @ k.mT)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1] if bottom else 0)
    j = torch.arange(k.shape[1])
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    hidden = torch.zeros(i.shape[0], j.shape[0], dtype=torch.bool)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.float()[:, None, None].expand(-1, s.shape[1], 1)], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
    dead = (s == -math.inf).all(-1, keepdim=True)
    p = torch.where(dead, 0.0, s.masked_fill(dead, 0.0).softmax(-1))
    lse = s.logsumexp(-1).masked_fill(dead[..., 0], math.inf)
    return (p @ v).transpose(0, 1).to(out_type), lse


def batched(q, k, v, **said):
    slopes = said.pop("slopes", None)
    each = []
    for b in range(q.shape[0]):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        each.append(formula(q[b], k[b], v[b], slopes=own, **said))
    outs, lses = zip(*each, strict=True)
    return torch.stack(outs), torch.stack(lses)


def packed(q, k, v, edges_q, edges_k, **said):
    """Rows past the last sequence are whatever memory held: NaN."""
    assert edges_q.dtype == edges_k.dtype == torch.int32
    out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), math.nan)
    outs, lses, slopes, at = [], [], said.pop("slopes", None), 0
    pairs = zip(itertools.pairwise(edges_q.tolist()), itertools.pairwise(edges_k.tolist()), strict=True)
    for b, ((begin, end), (first, last)) in enumerate(pairs):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        part, stat = formula(q[begin:end], k[first:last], v[first:last], slopes=own, **said)
        outs.append(part)
        lses.append(stat)
        at = end
    return torch.cat([*outs, out[at:]]), torch.cat([*lses, lse[:, at:]], 1)


def _window(window, causal, unlimited):
    left, right = (None if side == unlimited else side for side in window)
    return {"left": left, "right": 0 if causal else right}


# -- flash-attn 2 ------------------------------------------------------------------------------------------------------


def _flash_2(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes):
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert not dropout_p, "the formula draws nothing"
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    return {
        "scale": softmax_scale,
        "softcap": softcap,
        "slopes": alibi_slopes,
        **_window(window_size, causal, -1),
    }


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    calls.append(("flash_attn_func", (q, k, v), {"deterministic": deterministic}))
    said = _flash_2(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = batched(q, k, v, **said)
    return (out, lse.detach(), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=_Unset,
):
    calls.append(("flash_attn_varlen_func", (q, k, v), {"longest": (max_seqlen_q, max_seqlen_k)}))
    assert block_table is _Unset
    said = _flash_2(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **said)
    return (out, lse.detach(), None) if return_attn_probs else out


# -- FlashAttention-3 --------------------------------------------------------------------------------------------------


def flash_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=_Unset,
    q_descale=_Unset,
    k_descale=_Unset,
    v_descale=_Unset,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=_Unset,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    calls.append(("flash_3_func", (q, k, v), {"deterministic": deterministic}))
    assert qv is q_descale is k_descale is v_descale is pack_gqa is _Unset
    assert (attention_chunk, num_splits, sm_margin) == (0, 1, 0)
    out, lse = batched(q, k, v, scale=softmax_scale, softcap=softcap, **_window(window_size, causal, -1))
    return (out, lse.detach()) if return_attn_probs else out


def flash_3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=_Unset,
    seqused_k=_Unset,
    softmax_scale=None,
    causal=False,
    qv=_Unset,
    q_descale=_Unset,
    k_descale=_Unset,
    v_descale=_Unset,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=_Unset,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    assert seqused_q is seqused_k is qv is q_descale is k_descale is v_descale is pack_gqa is _Unset
    said = dict(scale=softmax_scale, softcap=softcap, **_window(window_size, causal, -1))
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **said)
    return (out, lse.detach()) if return_attn_probs else out


def flash_3_of_before(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
):
    """As builds of before autumn 2025 had it: the lse comes always."""
    out, lse = batched(q, k, v, scale=softmax_scale, softcap=softcap, **_window(window_size, causal, -1))
    return out, lse.detach()


# -- FlashAttention-4 --------------------------------------------------------------------------------------------------


def flash_4_func(
    q,
    k,
    v,
    qv=_Unset,
    gather_kv_indices=_Unset,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=_Unset,
    deterministic=False,
    score_mod=_Unset,
    score_mod_bwd=_Unset,
    mask_mod=_Unset,
    aux_tensors=_Unset,
    aux_scalars=_Unset,
    block_sparse_tensors=_Unset,
    block_sparse_tensors_bwd=_Unset,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    assert learnable_sink is None or learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
    said = dict(scale=softmax_scale, softcap=softcap, sinks=learnable_sink, **_window(window_size, causal, None))
    out, lse = batched(q, k, v, **said)
    return out, lse.detach() if return_lse else None


def flash_4_varlen_func(
    q,
    k,
    v,
    qv=_Unset,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=_Unset,
    seqused_q=_Unset,
    seqused_k=_Unset,
    gather_kv_indices=_Unset,
    page_table=_Unset,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=_Unset,
    deterministic=False,
    score_mod=_Unset,
    score_mod_bwd=_Unset,
    mask_mod=_Unset,
    block_sparse_tensors=_Unset,
    aux_tensors=_Unset,
    aux_scalars=_Unset,
    return_lse=False,
    scheduler_metadata=_Unset,
    seqlen_k_per_split=_Unset,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    said = dict(scale=softmax_scale, softcap=softcap, sinks=learnable_sink, **_window(window_size, causal, None))
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **said)
    return out, lse.detach() if return_lse else None


# -- torch -------------------------------------------------------------------------------------------------------------


class AuxRequest(NamedTuple):
    """As torch has it."""

    lse: bool = False


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=_Unset,
    block_table=_Unset,
    num_splits=_Unset,
):
    assert seqused_k is block_table is num_splits is _Unset
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert scale is None or scale > 0
    out, lse = packed(query, key, value, cu_seq_q, cu_seq_k, scale=scale, **_window(window_size, False, -1))
    return (out, lse.detach()) if return_aux is not None and return_aux.lse else out


# -- xformers ----------------------------------------------------------------------------------------------------------


class LowerTriangularMask:
    """Causal from the first query and key."""


class LowerTriangularFromBottomRightMask:
    """Causal from the last."""


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=_Unset, output_dtype=_Unset):
    assert op is output_dtype is _Unset
    assert not p, "the formula draws nothing"
    causal = {} if attn_bias is None else {"right": 0, "bottom": not isinstance(attn_bias, LowerTriangularMask)}
    shape = query.shape
    if query.ndim == 5:  # (B, L, G, H, D)
        assert key.shape[3] == query.shape[3]
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
    out, _ = batched(query, key, value, scale=scale, **causal)
    return out.reshape(*shape[:-1], value.shape[-1])


# -- FlashInfer --------------------------------------------------------------------------------------------------------


def single_prefill_with_kv_cache(
    q,
    k,
    v,
    scale_q=_Unset,
    scale_k=_Unset,
    scale_v=_Unset,
    o_dtype=_Unset,
    custom_mask=_Unset,
    packed_custom_mask=_Unset,
    causal=False,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False,
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    rope_scale=_Unset,
    rope_theta=_Unset,
    backend="auto",
    return_lse=False,
    kv_cache_sf=_Unset,
    k_scale=_Unset,
    v_scale=_Unset,
):
    assert (kv_layout, pos_encoding_mode, use_fp16_qk_reduction, backend) == ("NHD", "NONE", False, "auto")
    left = None if window_left < 0 else window_left
    cap = logits_soft_cap or 0.0
    out, lse = formula(q, k, v, scale=sm_scale, left=left, right=0 if causal else None, softcap=cap)
    return (out, lse.mT / math.log(2.0)) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper:
    """One token of each sequence; lse of base 2, (B, H)."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *_, **kwargs):
        assert not _
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        assert kwargs["q_data_type"] == kwargs["kv_data_type"]
        allowed = {"window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale"}
        assert kwargs.keys() <= allowed
        self.indptr, self.indices, self.last, self.page, self.said = indptr, indices, last_page_len, page_size, kwargs

    def run(self, q, paged_kv_cache, *args, return_lse=False):
        assert not args
        key, value = paged_kv_cache  # (P, H, page, D)
        outs, lses = [], []
        left = None if self.said["window_left"] < 0 else self.said["window_left"]
        for b, (begin, end) in enumerate(itertools.pairwise(self.indptr.tolist())):
            used = self.indices[begin:end].long()
            rows = max(0, (end - begin - 1) * self.page + int(self.last[b]))
            k, v = (x[used].transpose(0, 1).flatten(1, 2)[:, :rows].transpose(0, 1) for x in (key, value))
            said = {"scale": self.said["sm_scale"], "softcap": self.said["logits_soft_cap"] or 0.0, "left": left}
            out, lse = formula(q[b][None], k, v, **said)
            outs.append(out[0] if rows else torch.full_like(out[0], math.nan))
            lses.append(lse[:, 0] / math.log(2.0))
        out, lse = torch.stack(outs), torch.stack(lses)
        return (out, lse) if return_lse else out


# -- SageAttention -----------------------------------------------------------------------------------------------------


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    assert tensor_layout == "HND"
    assert smooth_k
    assert not kwargs
    k -= k.mean(dim=2, keepdim=True)  # as 1.0.6 does, in place
    out, _ = batched(
        *(x.transpose(1, 2) for x in (q, k, v)), scale=sm_scale, right=0 if is_causal else None, bottom=False
    )
    return out.transpose(1, 2)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all of them imported in place of what is, or is not, installed."""
    calls.clear()
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func},
        "flash_attn.cute": {"flash_attn_func": flash_4_func, "flash_attn_varlen_func": flash_4_varlen_func},
        "flash_attn_interface": {"flash_attn_func": flash_3_func, "flash_attn_varlen_func": flash_3_varlen_func},
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention": memory_efficient_attention},
        "xformers.ops.fmha": {},
        "xformers.ops.fmha.attn_bias": {
            "LowerTriangularMask": LowerTriangularMask,
            "LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask,
        },
        "flashinfer": {
            "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
        },
        "sageattention": {"sageattn": sageattn},
        "torch.nn.attention.varlen": {"varlen_attn": varlen_attn, "AuxRequest": AuxRequest},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
