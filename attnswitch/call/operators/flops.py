"""What the operators cost, as ``torch.utils.flop_counter`` counts: hidden scores as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["backward", "backward_varlen", "forward", "forward_paged", "forward_varlen", "register"]

Shape = tuple[int, ...]


def register(operators: Any) -> None:
    """Have the operators of this namespace counted, by counters that count already among others."""
    known = set(flop_registry)
    dense, varlen, paged = operators.attention, operators.attention_varlen, operators.attention_paged
    register_flop_formula([dense, operators.attention_forward])(forward)
    register_flop_formula(operators.attention_backward)(backward)
    register_flop_formula([varlen, operators.attention_varlen_forward], get_raw=True)(forward_varlen)
    register_flop_formula(operators.attention_varlen_backward, get_raw=True)(backward_varlen)
    register_flop_formula([paged, operators.attention_paged_forward], get_raw=True)(forward_paged)
    added = {operator: flop_registry[operator] for operator in flop_registry.keys() - known}
    for mode in _get_current_dispatch_mode_stack():  # each has copied what was known when it was made
        getattr(getattr(mode, "counter", None), "flop_registry", {}).update(added)


def forward(query: Shape, key: Shape, value: Shape, *_: Any, layout: str = "BHLD", **__: Any) -> int:
    """Two products."""
    return 2 * _scores(query, key, layout) * (query[-1] + value[-1])


def backward(
    _: Shape, __: Any, query: Shape, key: Shape, value: Shape, *___: Any, layout: str = "BHLD", **____: Any
) -> int:
    """Scores again, gradients of weights and value of Dv each, of query and key of D each."""
    return 2 * _scores(query, key, layout) * (3 * query[-1] + 2 * value[-1])


def _scores(query: Shape, key: Shape, layout: str) -> int:
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    return query[0] * query[heads] * query[length] * key[length]


# -- sequences one after another, of which the tensors are given, since shapes do not tell how long each is ------------


def forward_varlen(query: Any, key: Any, value: Any, *where: Any, **_: Any) -> int:
    """The same of each sequence."""
    dims: int = query.shape[2] + value.shape[2]
    return 2 * _pairs(query, key, *where) * dims


def backward_varlen(_: Any, __: Any, query: Any, key: Any, value: Any, *where: Any, **___: Any) -> int:
    """The same of each sequence."""
    dims: int = 3 * query.shape[2] + 2 * value.shape[2]
    return 2 * _pairs(query, key, *where[:5]) * dims


def _pairs(
    query: Any, key: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, _: Any, most_q: int | None, most_k: int | None
) -> int:
    """Scores of all heads; where offsets are without numbers, as in a graph in the making, the most there can be."""
    queries: int = query.shape[0]
    heads: int = query.shape[1]
    keys: int = key.shape[0]
    if cu_seqlens_k is None:
        cu_seqlens_k, most_k = cu_seqlens_q, most_q if most_k is None else most_k
    if _have_numbers(cu_seqlens_q, cu_seqlens_k):
        lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        return heads * int(sum(q * k for q, k in zip(*lengths, strict=True)))
    by_queries, by_keys = queries * (keys if most_k is None else most_k), keys * (queries if most_q is None else most_q)
    return heads * min(by_queries, by_keys)


# -- a cache in pages --------------------------------------------------------------------------------------------------


def forward_paged(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cache_lengths: Any,
    cu_seqlens_q: Any,
    *_: Any,
    **__: Any,
) -> int:
    """The same of each sequence; where lengths are without numbers, as if every page of the table were full."""
    *rows, heads, dim = query.shape  # (B, Lq, Hq, D), or (T, Hq, D)
    most = block_table.shape[1] * key_cache.shape[1]
    if len(rows) == 2:
        keys = sum(cache_lengths.tolist()) if _have_numbers(cache_lengths) else rows[0] * most
        pairs = rows[1] * keys
    elif _have_numbers(cu_seqlens_q, cache_lengths):
        pairs = sum(q * k for q, k in zip(cu_seqlens_q.diff().tolist(), cache_lengths.tolist(), strict=True))
    else:
        pairs = rows[0] * most
    return 2 * int(pairs) * int(heads) * int(dim + value_cache.shape[3])


def _have_numbers(*tensors: Any) -> bool:
    """Whether elements can be read, unlike those of a graph in the making."""
    return all(type(tensor) is torch.Tensor and not tensor.is_meta for tensor in tensors)
