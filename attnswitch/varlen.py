"""Attention of sequences that lie one after another, without padding: the public calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

from attnswitch.arrays import Array
from attnswitch.call import options as read
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients
from attnswitch.planning.policy import Policy
from attnswitch.problem import Alignment, Window

__all__ = ["attention_varlen", "attention_varlen_backward"]

#: Keywords of ``attention`` that say something of a batch with padding.
_OF_BATCHES = ("attn_mask", "key_lengths", "layout", "mask_grad")


def attention_varlen(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array | Sequence[int],
    cu_seqlens_k: Array | Sequence[int] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    causal_alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    seed: int | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **unknown: Never,
) -> Any:
    """``attention`` of B sequences of unlike lengths, whose rows lie one after another (flash-attn's ``varlen``).

    Sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Each attends to itself alone, with positions of its
    own. One may have no queries, or no keys.

    Args:
        query: (Tq, Hq, D), like ``attention``'s query but for the axes.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1,) integers from 0 on, none less than the one before: an array beside query, or numbers on
            the CPU. An array on a GPU is not looked at: with other numbers there results are wrong, and nobody tells.
        cu_seqlens_k: the same of the keys; those of the queries if left out.
        max_seqlen_q: the most queries of any sequence, or more. Left out, it is computed, for which the host waits
            where cu_seqlens_q is on a GPU. One that is too small is noticed where cu_seqlens_q is on the CPU.
        max_seqlen_k: the same of the keys.
        dropout_p: as for ``attention``, like all that follows; b counts sequences for the dropout mask.
        is_causal: see dropout_p.
        scale: see dropout_p.
        enable_gqa: see dropout_p.
        causal_alignment: see dropout_p; "bottom_right" has the last query of each sequence at its last key.
        window: see dropout_p.
        softcap: see dropout_p.
        return_lse: see dropout_p; the lse is (Hq, Tq).
        deterministic: see dropout_p.
        seed: see dropout_p.
        sinks: see dropout_p.
        alibi_slopes: see dropout_p; (Hq,), or (B, Hq) for B sequences.
        backend: see dropout_p.
        policy: see dropout_p.
        **unknown: see dropout_p.

    Returns:
        The output (Tq, Hq, Dv), or (output, lse). Rows past the last sequence have output 0 and lse -inf, and get
        gradient 0. torch tensors that require gradients get them.

    Raises what ``attention`` raises.
    """
    if unknown:
        raise _unknown(next(iter(unknown)), attention_varlen)
    numbers = dropout_p, is_causal, scale, enable_gqa
    rest = causal_alignment, window, softcap, return_lse, "BHLD", deterministic
    cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    heads = PerHead(sinks, alibi_slopes)
    from attnswitch.call.entry_varlen import call  # which programs without such calls do not wait for

    return call((query, key, value), cu_seqlens, longest, seed, backend, policy, *numbers, *rest, heads=heads)


def attention_varlen_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array | Sequence[int],
    cu_seqlens_k: Array | Sequence[int] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    grad_lse: Array | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    sinks_grad: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of ``attention_varlen`` for libraries without autograd.

    Args:
        grad_out: upstream gradient of the output, (Tq, Hq, Dv).
        query: as given to ``attention_varlen``, like all up to max_seqlen_k, backend and policy.
        key: see query.
        value: see query.
        cu_seqlens_q: see query.
        cu_seqlens_k: see query.
        max_seqlen_q: see query.
        max_seqlen_k: see query.
        out: what ``attention_varlen(..., return_lse=True)`` or ``merge`` returned, the latter for a part's gradients as
            in ``attention_backward``; computed again where out or lse is left out.
        lse: see out.
        grad_lse: upstream gradient of lse, (Hq, Tq); None means zero.
        sinks: see query.
        alibi_slopes: see query.
        sinks_grad: also return the gradient of sinks.
        backend: see query.
        policy: see query.
        **options: the other keywords of ``attention_varlen``; dropout needs a seed.

    Returns:
        Gradients of query, key and value, like their operands; that of attn_mask is None. With ``sinks_grad`` there is
        an attribute ``sinks`` besides, (Hq,).

    Raises what ``attention`` raises.
    """
    if grad_out is None:
        raise InvalidProblem("grad_out is None: expected the upstream gradient of the output, (Tq, Hq, Dv)")
    seed = options.pop("seed", None)
    for name in options:
        if name in ("return_lse", *_OF_BATCHES):
            raise _unknown(name, attention_varlen_backward)
    asked = options | {"return_lse": grad_lse is not None}
    given = read.in_order(asked, "attention_varlen_backward: there is", attention_varlen_backward)
    cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    if read.flag("sinks_grad", sinks_grad) and sinks is None:
        raise InvalidProblem("a gradient of sinks was asked for, but there are none")
    from attnswitch.call.entry_varlen import gradients

    heads = PerHead(sinks, alibi_slopes)
    call = (query, key, value), cu_seqlens, longest, seed, backend, policy, *given
    return gradients((grad_out, grad_lse), (out, lse), *call, heads=heads, sinks_grad=sinks_grad)


def _unknown(name: str, function: Callable[..., Any]) -> InvalidProblem:
    """The error about a keyword that ``function`` does not have."""
    if name == "return_lse":
        return InvalidProblem(f"{function.__name__} returns gradients only: leave return_lse out")
    if name in _OF_BATCHES:
        return InvalidProblem(
            f"{function.__name__} has no {name}: sequences are (T, H, D), as long as their offsets say, without a mask"
        )
    return read.unknown(name, f"{function.__name__}: there is", function)
