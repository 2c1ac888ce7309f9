"""The attention function that transformers' layers call."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch import api
from attnswitch.call.like_torch import as_autocast
from attnswitch.call.torch_modes import refuse_ring
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers.fit import check_layer
from attnswitch.integrations.transformers.keywords import UNKNOWN, check_rest, is_causal_of, options_of, window_of
from attnswitch.integrations.transformers.masks import biased, is_diagonal, only
from attnswitch.integrations.transformers.positions import lengths_of
from attnswitch.integrations.transformers.sequences import Lengths, attend

__all__ = ["attention"]


def attention(
    backend: str | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    indices: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Output (B, Lq, Hq, Dv) for query (B, Hq, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv); no weights.

    Raises:
        Unsupported: the layer's model was made for eager attention, or something is passed that is not honoured.
    """
    refuse_ring("use attn_implementation='sdpa' there, or attnswitch.integrations.torch_distributed")
    check_layer(type(module))
    check_rest(rest)
    # Rotary layers leave operands of several dtypes.
    query, key, value, attention_mask, position_bias = as_autocast(query, key, value, attention_mask, position_bias)
    length_q = query.shape[2]
    if query.shape[0] != key.shape[0] and query.shape[0] == 1:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    options = options_of(softcap, deterministic, s_aux)
    if dropout:
        options["dropout_p"] = dropout
    lengths = None
    if cu_seq_lens_q is not None:
        starts_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        lengths = Lengths(cu_seq_lens_q, starts_k, max_length_q, max_length_k)
    elif not cu_seq_lens_k is max_length_q is max_length_k is None:
        beside = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_q": max_length_q, "max_length_k": max_length_k}
        name = next(name for name, given in beside.items() if given is not None)
        raise Unsupported(f"transformers passes {name} to attention without cu_seq_lens_q")
    elif position_ids is not None and query.shape[0] == 1:
        lengths = lengths_of(position_ids, attention_mask, length_q, key.shape[2])
    if lengths is not None:
        if position_bias is not None or indices is not None:
            raise Unsupported(f"transformers passes sequences in one row with a position bias or indices: {UNKNOWN}")
        options |= {"causal": is_causal_of(module, is_causal), "sliding_window": sliding_window}
        out = attend(query, key, value, attention_mask, lengths, scale=scaling, backend=backend, **options)
    else:
        if attention_mask is None:  # else the mask holds the diagonal and the window as well
            options |= _positions(module, length_q, key.shape[2], is_causal, sliding_window)
        elif length_q > 1 and position_bias is None and indices is None and is_diagonal(attention_mask, length_q):
            key, value, attention_mask = key[:, :, :length_q], value[:, :, :length_q], None
            options["is_causal"] = True
        if position_bias is not None:
            attention_mask = position_bias if attention_mask is None else biased(attention_mask, position_bias)
        if indices is not None:
            chosen = _chosen(indices, length_q, key.shape[2])
            attention_mask = chosen if attention_mask is None else only(attention_mask, chosen)
        if attention_mask is not None:
            options["attn_mask"] = attention_mask
        out = api.attention(query, key, value, scale=scaling, backend=backend, **options)
    return out.transpose(1, 2).contiguous(), None


def _chosen(indices: torch.Tensor, length_q: int, length_k: int) -> torch.Tensor:
    """The mask (B, 1, Lq, Lk) of the keys that an indexer chose for each query: ``indices`` (B, Lq, N), -1 for none."""
    if not isinstance(indices, torch.Tensor) or indices.ndim != 3 or indices.shape[1] != length_q:
        raise Unsupported(f"transformers passes indices to attention: not (B, {length_q}, N) of keys; {UNKNOWN}")
    spare = torch.where(indices < 0, length_k, indices).long()
    chosen = indices.new_zeros((*indices.shape[:2], length_k + 1), dtype=torch.bool).scatter(-1, spare, True)
    return chosen[:, None, :, :length_k]


def _positions(
    module: torch.nn.Module, length_q: int, length_k: int, is_causal: bool | None, sliding_window: int | None
) -> dict[str, Any]:
    """The keywords that say who sees what where there is no mask."""
    causal = is_causal_of(module, is_causal) and length_q > 1
    # Masks are left out while the window reaches every key; a model that makes none means what flash-attn does.
    windowed = sliding_window is not None and sliding_window < length_k
    if not causal and not windowed:
        return {}
    if length_q > length_k:
        raise Unsupported(
            f"causal or windowed, {length_q} queries, {length_k} keys and no mask: pass one to say who sees what"
        )
    options: dict[str, Any] = {"is_causal": causal}
    if sliding_window is not None and windowed:
        options["window"] = window_of(sliding_window)
    if length_q < length_k:
        options["causal_alignment"] = "bottom_right"  # the queries are the newest tokens
    return options
