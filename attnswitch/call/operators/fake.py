"""What the operators return, without elements: for graphs in the making."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch import arrays
from attnswitch.call import per_head
from attnswitch.call.describe import check_beside, fitting
from attnswitch.call.operators.memory import like, lse_of
from attnswitch.call.operators.schema import read_said
from attnswitch.call.options import Options

__all__ = ["absent", "backward", "drawn", "forward", "plain"]


def plain(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    drawn: Any = None,
    *,
    seed: int | None = None,
    **said: Any,
) -> Any:
    """The output."""
    options = _checked(query, key, value, attn_mask, key_lengths, alibi_slopes, said)
    return like(query, value.shape[-1], options.layout)


def forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    drawn: Any = None,
    *,
    grads: str = "",
    seed: int | None = None,
    **said: Any,
) -> tuple[Any, Any, Any]:
    """Output, lse, and a seed on the CPU where one is kept."""
    options = _checked(query, key, value, attn_mask, key_lengths, alibi_slopes, said)
    b, h, length, _ = (query if options.layout == "BHLD" else query.swapaxes(1, 2)).shape
    draws = bool(grads) and options.dropout_p > 0.0
    state = torch.empty(1, dtype=torch.int64, device="cpu") if draws else query.new_empty(0, dtype=torch.float32)
    return like(query, value.shape[-1], options.layout), lse_of(query, (b, h, length)), state


def backward(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    *_: Any,
    grads: str,
    layout: str = "BHLD",
    **__: Any,
) -> list[Any]:
    """The gradients."""
    made = [like(x, x.shape[-1], layout) for name, x in zip("qkv", (query, key, value), strict=True) if name in grads]
    return made + ([attn_mask.new_empty(attn_mask.shape)] if "m" in grads else [])


def drawn(fresh: Any) -> Any:
    """A seed."""
    return torch.empty_like(fresh)


def absent(sinks: Any) -> Any:
    """Where there is no sink."""
    return sinks.new_empty(sinks.shape, dtype=torch.bool)


def _checked(
    query: Any, key: Any, value: Any, attn_mask: Any, key_lengths: Any, alibi_slopes: Any, said: dict[str, Any]
) -> Options:
    *_, options = read_said(said)
    q, k, v = arrays.outline(query), arrays.outline(key), arrays.outline(value)
    fitting(q, k, v, None if attn_mask is None else arrays.outline(attn_mask), options)
    if key_lengths is not None:
        check_beside(arrays.outline(key_lengths), "key_lengths", q)
    if alibi_slopes is not None:
        check_beside(arrays.outline(alibi_slopes), "alibi_slopes", q)
        heads = query.shape[1 if options.layout == "BHLD" else 2]
        per_head.check_slopes(tuple(alibi_slopes.shape), heads, query.shape[0])
    return options
