"""Attention over a cache in pages: the public call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from attnswitch.arrays import Array
from attnswitch.call.per_head import PerHead
from attnswitch.planning.policy import Policy
from attnswitch.problem import Window

__all__ = ["attention_paged"]


def attention_paged(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_table: Array | Sequence[Sequence[int]],
    cache_lengths: Array | Sequence[int],
    *,
    cu_seqlens_q: Array | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    window: Window | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    num_splits: int | None = None,
    tree_mask: Array | None = None,
    key_scale: Array | Sequence[float] | float | None = None,
    value_scale: Array | Sequence[float] | float | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **unknown: Never,
) -> Any:
    """Attention of the newest tokens of B sequences, whose keys and values lie in the pages of a cache.

    Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``. Its queries are its newest tokens,
    whose keys are in the cache already: the last query stands at key ``cache_lengths[b] - 1``. One query is a decoding
    step, a few are speculative decoding, many a chunk of the prompt. A sequence may have fewer keys than queries; then
    its first queries see none.

    Args:
        query: (B, Lq, Hq, D), or (T, Hq, D) with cu_seqlens_q; the same dtypes and strides as for ``attention``.
        key_cache: (P, page, Hkv, D), P pages of any number of rows. Both caches have query's dtype, or both are of 8
            bits: float8_e4m3fn, float8_e5m2 or int8.
        value_cache: (P, page, Hkv, Dv); may be a view of key_cache, as where it is the first columns of the keys.
        block_table: (B, M) integers from 0 to P - 1. Two sequences may share a page. Entries past the length are not
            read, whatever they hold, nor are rows past the length in the last page.
        cache_lengths: (B,) integers from 0 to M * page. The table and the lengths are arrays beside query, or lists or
            arrays on the CPU, where they are checked. On a GPU they are not looked at: with other numbers there memory
            of others is read, and nobody tells.
        cu_seqlens_q: (B + 1,) integers: queries lie one after another as in ``attention_varlen``, those of sequence b
            being rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        max_seqlen_q: the most queries of any sequence, or more. Left out, it is computed, for which the host waits
            where cu_seqlens_q is on a GPU.
        scale: as for ``attention``, like all that says "see scale".
        is_causal: see scale; False lets every query see all keys of its sequence that window and tree_mask leave.
        window: see scale; (left, right) keys around the query's own.
        softcap: see scale.
        return_lse: see scale; the lse is (B, Hq, Lq), or (Hq, T).
        num_splits: into how many parts the keys of each sequence are divided, whatever the batch. With it a backend
            gives a sequence the same bits alone and in any batch, of calls with cu_seqlens_q, or of calls without and
            of as many queries; name the backend too, as the choice of one may depend on the batch. A backend that
            cannot refuses.
        tree_mask: of the keys of the queries themselves, the newest, those that each query sees, where these are the
            tokens of a tree (speculative decoding): (B, Lq, W) bytes (uint8), or (T, W) with cu_seqlens_q, as
            ``numpy.packbits(seen, axis=-1, bitorder="little")`` makes them. Bit t % 8 of byte t // 8 is about the key
            of query t of the sequence. Older keys are seen by all. A row has a bit for each query: W is Lq / 8 or more,
            packed max_seqlen_q / 8. An array beside query, and no list. is_causal, window and alibi_slopes go by the
            order in the cache, and apply as well: a parent comes before its children, or is_causal is False.
        key_scale: what an element of a cache of 8 bits stands for is itself times this, in float32 (float64 where query
            is that): a number, (Hkv,) of each head, or (P, 1) or (P, Hkv) of each page. 1 where it is left out. An
            array beside query, or a number or a list. Scales of pages that no sequence uses may hold anything.
        value_scale: the same of value_cache.
        sinks: see scale; without a gradient.
        alibi_slopes: see scale.
        deterministic: see scale.
        backend: see scale.
        policy: see scale.
        **unknown: see scale.

    Returns:
        The output (B, Lq, Hq, Dv), or (T, Hq, Dv), or (output, lse). Rows past the last sequence have output 0 and lse
        -inf. There are no gradients. torch.compile takes the call into its graph.

    Raises what ``attention`` raises, and ``InvalidProblem`` for tensors that require gradients.
    """
    if unknown:
        from attnswitch.call.paged import unsaid

        raise unsaid(next(iter(unknown)), attention_paged)
    from attnswitch.call.entry_paged import Beside, call  # which programs without such calls do not wait for

    heads = PerHead(sinks, alibi_slopes)
    sequences = block_table, cache_lengths, cu_seqlens_q, max_seqlen_q
    beside = Beside(*sequences, num_splits, tree_mask, key_scale, value_scale, heads)
    said = 0.0, is_causal, scale, None, "bottom_right", window, softcap, return_lse, "BHLD", deterministic
    return call((query, key_cache, value_cache), beside, backend, policy, *said)
