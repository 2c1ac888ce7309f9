"""The way of a call over ranks, round the ring or by trading rows for heads, and back to the caller's form."""

from __future__ import annotations

from typing import Any

from attnswitch.api import attention
from attnswitch.call import autograd
from attnswitch.errors import Unsupported
from attnswitch.machine import registry
from attnswitch.parallel import Method, far, ring
from attnswitch.parallel.all_to_all import AllToAll
from attnswitch.parallel.asking import Asked
from attnswitch.parallel.call import Call
from attnswitch.parallel.pieces import Band
from attnswitch.planning.policy import Policy
from attnswitch.varlen import attention_varlen

__all__ = ["attend"]


def attend(asked: Asked, method: Method, group: Any, backend: str | None, policy: Policy | str | None) -> Any:
    """The output of this rank's rows as the caller has it, or (output, lse). Raises ``Unsupported``."""
    if backend is not None:
        registry.load(backend)
    way = _round if method == "ring" else _traded
    out, lse = way(asked, group, {"backend": backend, "policy": policy})
    options = asked.options
    if asked.cu_seqlens:
        out, lse = out[0].swapaxes(0, 1).contiguous(), None if lse is None else lse[0]
    elif options.layout == "BLHD":
        out = out.swapaxes(1, 2).contiguous()
    return (out, lse) if options.return_lse else out


def _round(asked: Asked, group: Any, chosen: dict[str, Any]) -> tuple[Any, Any]:
    said = asked.options
    if asked.heads.alibi_slopes is not None:
        raise Unsupported(
            "alibi_slopes in a ring: parts count distances from their own corner; method='all-to-all' takes them"
        )
    hides = said.is_causal or said.window is not None
    if hides and said.causal_alignment == "bottom_right" and asked.key_lengths is not None:
        raise Unsupported(
            "bottom_right with key_lengths in a ring: every batch entry would be cut at other rows;"
            " method='all-to-all' takes them"
        )
    offset = asked.keys.length - asked.queries.length if said.causal_alignment == "bottom_right" else 0
    band = Band.of(said.is_causal, said.window, offset)
    if far.hides(asked, band):
        raise Unsupported(
            f"attn_mask in a ring: the largest number that a row sees is beyond {far.MOST:g}, of which an lse keeps too"
            " few digits to merge parts by; pass a bool mask where it hides, or method='all-to-all'"
        )
    beside = {"attn_mask": asked.attn_mask, "key_lengths": asked.key_lengths}
    call = Call(
        asked.rank,
        asked.queries,
        asked.keys,
        band,
        {"scale": said.scale, "softcap": said.softcap, "deterministic": said.deterministic, **chosen},
        asked.cu_seqlens,
        {name: array for name, array in beside.items() if array is not None},
    )
    heads = asked.heads
    out, lse = ring.attend(ring.Ring(call, group, heads.sinks), *asked.operands)
    if heads.grad and heads.given is not None:
        out, lse = autograd.with_sinks(out, lse, heads.given)
    return out, lse


def _traded(asked: Asked, group: Any, chosen: dict[str, Any]) -> tuple[Any, Any]:
    query, key, _ = asked.operands
    ranks = asked.queries.ranks
    if query.shape[1] % ranks:
        raise Unsupported(
            f"{query.shape[1]} query heads over {ranks} ranks: all-to-all deals heads evenly; method='ring' takes any"
        )
    trade = AllToAll(asked.queries, asked.keys, asked.rank, (query.shape[1], key.shape[1]), group)
    said = asked.options.keywords() | chosen
    said.pop("layout", None)
    heads, some = asked.heads, trade.heads(asked.rank)
    mine = slice(some.start, some.stop)
    if heads.given is not None:
        said["sinks"] = heads.given[mine]
    if heads.alibi_slopes is not None:
        slopes = heads.alibi_slopes[:, mine]
        said["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes
    if asked.attn_mask is not None:
        said["attn_mask"] = asked.attn_mask[:, mine] if asked.attn_mask.shape[1] > 1 else asked.attn_mask
    if asked.key_lengths is not None:
        said["key_lengths"] = asked.key_lengths

    def compute(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if not asked.cu_seqlens:
            found = attention(q, k, v, **said)
        else:
            q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
            found = attention_varlen(q, k, v, asked.cu_seqlens, **said)
        out, lse = found if asked.options.return_lse else (found, None)
        if asked.cu_seqlens:
            out, lse = out.swapaxes(0, 1)[None], None if lse is None else lse[None]
        return out, lse

    return trade.attend(*asked.operands, compute, asked.options.return_lse)
