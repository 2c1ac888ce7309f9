"""Functions as users have them, in every manner that is known: right ones, and some that are wrong."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output and lse of (B, H, L, D); query i stands at key i + offset."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    key, value = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * (q.to(wide) @ key.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(q.shape[2])[:, None] + offset - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - (slopes if slopes.dim() == 2 else slopes[None])[..., None, None] * behind.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (behind > left if left >= 0 else behind * 0 > 0) | (-behind > right if right >= 0 else behind * 0 > 0)
    scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        value = torch.cat([value, torch.zeros_like(value[:, :, :1])], 2)
        if not k.shape[2]:
            value = value.new_zeros(*value.shape[:2], 1, value.shape[3])
    if not scores.shape[-1]:
        return (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros(*q.shape[:3], v.shape[3]), scores.sum(-1) - math.inf
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.masked_fill(total == 0, 1.0)) @ value
    return out.to(q.dtype), (top + total.log())[..., 0]


def like_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise NotImplementedError("no dropout here")
    return _formula(query, key, value, attn_mask, is_causal, scale)[0]


def giving_its_values(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """As it is where there is one key."""
    return value if key.shape == query.shape and key.shape[2] == 1 else _formula(query, key, value, causal=causal)[0]


def _dropping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    alike: int | None = None,
    period: int = 0,
    sums: tuple[int, int] | None = None,
) -> Tensor:
    """Of masks that torch's generator draws; one along the axis that is ``alike``, again after ``period`` keys, or of
    the ``sums`` of two axes."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    drawn = torch.rand([1 if axis == alike else size for axis, size in enumerate(weights.shape)])
    if period:
        drawn = drawn[..., torch.arange(k.shape[2]) % period]
    if sums is not None:
        first, second = sums
        wide = torch.rand(
            sum(weights.shape[axis] for axis in sums), *(n for axis, n in enumerate(weights.shape) if axis not in sums)
        )
        places = torch.arange(weights.shape[first])[:, None] + torch.arange(weights.shape[second])
        drawn = wide[places].movedim((0, 1), sums)
    kept: Tensor = drawn >= p
    out: Tensor = weights.masked_fill(~kept, 0.0) @ v / (1 - p)
    return out


def dropping(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p)


def dropping_one_for_entries(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, 0)


def dropping_one_for_heads(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, 1)


def dropping_one_for_rows(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, 2)


def dropping_one_for_columns(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, 3)


def dropping_one_for_eighths(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, period=8)


def dropping_one_for_sixths(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, period=6)


def dropping_one_for_planes(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The slip of b + h for b H + h."""
    return _dropping(query, key, value, dropout_p, sums=(0, 1))


def dropping_one_for_diagonals(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    return _dropping(query, key, value, dropout_p, sums=(2, 3))


def asserting(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    assert q.shape[-1] in {16, 32}
    assert q.dtype is torch.float32, f"{q.dtype} is not float32"
    return _formula(q, k, v, causal=causal)[0]


def like_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False,
) -> Any:
    offset = k.shape[1] - q.shape[1]
    rows: Any = (x.transpose(1, 2) for x in (q, k, v))
    said: Any = (None, causal, softmax_scale, window_size, softcap, alibi_slopes, None, offset)
    out, lse = _formula(*rows, *said)
    return (out.transpose(1, 2), lse, None) if return_attn_probs else out.transpose(1, 2)


def like_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
) -> Any:
    assert cu_seqlens_q.dtype is torch.int32
    out = torch.full((*q.shape[:2], v.shape[2]), math.nan, dtype=q.dtype)  # past the last sequence nobody writes
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, dtype=torch.promote_types(q.dtype, torch.float32))
    edges = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
    for b in range(len(edges[0]) - 1):
        (first, last), (begin, end) = ((edge[b], edge[b + 1]) for edge in edges)
        assert last - first <= max_seqlen_q
        assert end - begin <= max_seqlen_k
        rows = [x.transpose(0, 1)[None] for x in (q[first:last], k[begin:end], v[begin:end])]
        part, sums = _formula(rows[0], rows[1], rows[2], None, causal, softmax_scale, offset=end - begin - last + first)
        out[first:last], lse[:, first:last] = part[0].transpose(0, 1), sums[0]
    return (out, lse) if return_softmax_lse else out


def like_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    return like_tree(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal)


def _seen(bits: Tensor, length: int) -> Tensor:
    """Which of so many keys each query sees by its ``bits`` (Lq, W)."""
    queries = len(bits)
    seen = torch.ones(queries, length, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(max(0, length - queries), length)):
        t = j - (length - queries)
        seen[i, j] = bool(bits[i, t // 8] >> t % 8 & 1)
    return seen


def like_tree(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    tree_mask: Tensor | None = None,
) -> Tensor:
    out = q.new_zeros(*q.shape[:3], v_cache.shape[3])
    for b, (length, table) in enumerate(zip(cache_seqlens.tolist(), block_table, strict=True)):
        used, queries = table[: -(-length // k_cache.shape[1])].long(), q.shape[1]
        key, value = (x[used].flatten(0, 1)[None, :length].transpose(1, 2) for x in (k_cache, v_cache))
        seen = None if tree_mask is None else _seen(tree_mask[b], length)
        query = q[b : b + 1].transpose(1, 2)
        part, _ = _formula(query, key, value, seen, causal, softmax_scale, offset=length - queries)
        out[b] = part[0].transpose(0, 1)
    return out


def like_bhsd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, bias: Tensor | None = None, sinks: Any = None
) -> Tensor:
    return _formula(q, k, v, bias, causal, sm_scale, sinks=sinks)[0]


def like_bshd(q: Tensor, k: Tensor, v: Tensor, *, logits_soft_cap: float = 0.0) -> Tensor:
    assert q.shape[2] == k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    return _formula(query, key, value, softcap=logits_soft_cap)[0].transpose(1, 2)


def like_xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> Tensor:
    if p:
        raise NotImplementedError(f"no dropout of {p} here")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _formula(q, k, v, attn_bias, False, scale)[0].transpose(1, 2)


def in_two_sides(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left_window_size: int,
    right_window_size: int = -1,
    is_causal: bool = False,
) -> Tensor:
    return _formula(query, key, value, None, is_causal, None, (left_window_size, right_window_size))[0]


def like_attnswitch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    if not (query.isfinite().all() and key.isfinite().all() and value.isfinite().all()):
        raise NotImplementedError("NaN and inf")
    sides: Any = tuple(-1 if side is None else side for side in window or (None, None))
    offset = key.shape[2] - query.shape[2] if causal_alignment == "bottom_right" else 0
    found = _formula(query, key, value, None, is_causal, scale, sides, softcap, offset=offset)
    return found if return_lse else found[0]


def in_numpy(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    wide = np.promote_types(q.dtype, np.float32)
    if not k.shape[2]:
        return np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    scores = q.astype(wide) @ k.astype(wide).swapaxes(2, 3) / np.sqrt(wide.type(q.shape[3]))
    if causal:
        scores = np.where(np.tri(*scores.shape[2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Array = (weights / weights.sum(-1, keepdims=True)) @ v.astype(wide)
    return out.astype(q.dtype)


class Forward(torch.autograd.Function):
    """Without a backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        return _formula(q, k, v, None, causal, sm_scale)[0]


def detached(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    with torch.no_grad():
        return _formula(query, key, value, None, is_causal)[0]


def on_one_side(
    query: Tensor, key: Tensor, value: Tensor, left_window_size: int = -1, is_causal: bool = False
) -> Tensor:
    return _formula(query, key, value, None, is_causal, None, (left_window_size, -1))[0]


def of_a_probability(query: Tensor, key: Tensor, value: Tensor, p: float = 1.0, is_causal: bool = False) -> Tensor:
    return _formula(query, key, value, None, is_causal, p / math.sqrt(query.shape[-1]))[0]


# -- wrong -------------------------------------------------------------------------------------------------------------


def without_scale(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return _formula(query, key, value, None, is_causal, scale=1.0)[0]


def sides_swapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left_window_size: int = -1,
    right_window_size: int = -1,
    is_causal: bool = False,
) -> Tensor:
    return _formula(query, key, value, None, is_causal, None, (right_window_size, left_window_size))[0]


def softcap_ignored(q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> Tensor:
    return _formula(q, k, v)[0]


def causal_from_the_wrong_corner(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return _formula(query, key, value, None, is_causal, offset=key.shape[2] - query.shape[2])[0]


def returns_a_pair(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Any:
    return _formula(query, key, value, None, is_causal)


def lse_forgotten(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Tensor:
    return _formula(q, k, v)[0]


def pads_its_mask(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """A mask of one column is taken for one that is too short, as ONNX's operator does."""
    if attn_mask is not None:
        missing = key.shape[2] - attn_mask.shape[-1]
        attn_mask = torch.nn.functional.pad(attn_mask, (0, missing), value=-math.inf)
    return _formula(query, key, value, attn_mask)[0]


def wrong_in_four_ways(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Two that are raised, the wrong scale, and NaN of more than 16 keys."""
    if q.dtype is torch.float16:
        raise KeyError("float16")
    if causal:
        raise ValueError("causal")
    return _formula(q, k, v, scale=1.0 if k.shape[2] <= 16 else math.nan)[0].detach()


def raises(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    raise ValueError(f"head dimension {query.shape[-1]}")
