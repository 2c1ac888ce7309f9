"""Attention with sinks and slopes written out in float64 torch: what the tests of both hold the calls against."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["written_out"]


def written_out(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any = None,
    slopes: Any = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    key_lengths: list[int] | None = None,
    softcap: float = 0.0,
    attn_mask: Any = None,
) -> tuple[Any, Any]:
    """Output and lse of (B, H, L, D)."""
    batch, heads, queries, dim = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT / dim**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lengths = torch.tensor([keys] * batch if key_lengths is None else key_lengths)[:, None, None, None]
    place = torch.arange(queries)[:, None] + (lengths - queries if causal_alignment == "bottom_right" else 0)
    j = torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes.expand(batch, heads)[:, :, None, None] * (place - j).abs()
    visible = (j < lengths).expand(batch, 1, queries, keys)
    if is_causal:
        visible = visible & (j <= place)
    if window is not None:
        visible = visible & (j >= place - window[0]) & (j <= place + window[1])
    if attn_mask is not None:
        visible = visible & attn_mask
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(batch, heads, queries, 1)], -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights[..., :keys] @ value, lse
