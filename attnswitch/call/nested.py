"""Nested tensors of torch's: the rows of all sequences at once where they lie one after another, else each alone."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.call import entry_varlen
from attnswitch.errors import InvalidProblem, Unsupported

__all__ = ["attention"]

_BREAKS = (
    "attention of nested tensors asks how long each sequence is, which no graph knows; compile without fullgraph, or"
    " pass their values and offsets to attnswitch.attention_varlen"
)


def _attention(function: Any, query: Any, key: Any, value: Any, attn_mask: Any, *rest: Any) -> Any:
    """What ``scaled_dot_product_attention``, which ``function`` is, returns of nested tensors; ``rest`` is as there."""
    operands = query, key, value
    _check(operands, attn_mask)
    packed = _at_once(operands, *rest) if _lie_packed(*operands) else None
    if packed is not None:
        packed = packed.contiguous()  # which torch's is, for programs that view it otherwise
        return _jagged(packed if query.dim() == 4 else packed.squeeze(1), query.offsets(), query).transpose(1, -2)
    parts = [
        function(q[None], k[None], v[None], None, *rest)[0]
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    ]
    if query.layout != torch.jagged:
        return torch.nested.as_nested_tensor(parts)
    axis = query._ragged_idx - 1  # of a sequence, the one whose length is its own
    rows = torch.cat([part.transpose(0, axis) for part in parts])
    offsets = query.offsets()
    if query.lengths() is not None:  # the sequences have gaps between them, which the result has not
        offsets = torch.nn.functional.pad(query.lengths().cumsum(0), (1, 0))
    return _jagged(rows, offsets, query).transpose(1, axis + 1)


#: Breaks a graph of torch.compile, which would fail at the lengths; with ``fullgraph`` that gives the reason.
attention = torch.compiler.disable(_attention, reason=_BREAKS)  # type: ignore[no-untyped-call]


def _check(operands: tuple[Any, Any, Any], attn_mask: Any) -> None:
    """Raises ``InvalidProblem`` for what torch refuses as well, but for what a sequence alone is refused for."""
    query, key, value = operands
    if attn_mask is not None:
        raise InvalidProblem("attn_mask beside nested tensors, whose sequences have lengths of their own: leave it out")
    if not all(isinstance(x, torch.Tensor) and x.is_nested for x in (key, value)):
        raise InvalidProblem("query is nested, key or value is not: pass all of one kind")
    if not query.layout == key.layout == value.layout:
        raise InvalidProblem(
            f"query, key and value are nested as {query.layout}, {key.layout}, {value.layout}: pass all of one layout"
        )
    counts = query.size(0), key.size(0), value.size(0)
    if not counts[0] or counts[0] != counts[1] or counts[0] != counts[2]:
        raise InvalidProblem(f"query, key and value hold {counts} sequences: expected as many of each, at least one")
    if query.layout == torch.jagged:
        axes = query._ragged_idx, key._ragged_idx, value._ragged_idx
        if len(set(axes)) > 1:
            raise InvalidProblem(
                f"query, key and value have lengths of their own on the axes {axes}: expected one axis"
            )


def _lie_packed(query: Any, key: Any, value: Any) -> bool:
    """Whether all are (B, H, L, D) or (B, L, D), where L is a sequence's own, and its rows follow those of another."""
    return query.layout == torch.jagged and all(
        x.dim() == query.dim() and x.dim() in (3, 4) and x._ragged_idx == x.dim() - 2 and x.lengths() is None
        for x in (query, key, value)
    )


def _at_once(
    operands: tuple[Any, Any, Any],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None,
    policy: Any,
) -> Any:
    """The output's rows, (T, H, Dv), by ``attention_varlen``; None where that does not take them."""
    query, key, value = (x.transpose(1, 2).values() if x.dim() == 4 else x.values().unsqueeze(1) for x in operands)
    heads, of_key, of_value = query.shape[1], key.shape[1], value.shape[1]
    if of_key != of_value or not (heads == of_key or of_key == 1 or enable_gqa):
        return None
    if 0 in (heads, of_key, query.shape[2], key.shape[2], value.shape[2]):
        return None
    by_query, by_key, by_value = operands
    if not (by_key.offsets() is by_value.offsets() or torch.equal(by_key.offsets(), by_value.offsets())):
        raise InvalidProblem("the sequences of key and value differ in length: expected value (B, Hkv, Lk, Dv)")
    offsets = by_query.offsets(), by_key.offsets()
    longest = by_query._get_max_seqlen(), by_key._get_max_seqlen()  # kept there once they were asked for
    said = dropout_p, is_causal, scale, None, "top_left", None, 0.0, False, "BHLD", False
    try:
        return entry_varlen.call((query, key, value), offsets, longest, None, backend, policy, *said)
    except Unsupported:
        return None


def _jagged(rows: Any, offsets: Any, query: Any) -> Any:
    """A nested tensor of sequences as long as those of ``query``."""
    # What it knows of its lengths, by which it would be padded; None where it has not been asked yet.
    known = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(rows, offsets, **known)
