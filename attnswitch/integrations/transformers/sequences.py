"""Sequences that a padding-free collator laid one after another: transformers passes where each begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnswitch import attention_varlen
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers.keywords import window_of

__all__ = ["Lengths", "attend"]

#: What a mask is marked by: the offsets that it was held to, and what else it was held to.
_HELD = "_attnswitch_sequences"


class Lengths(NamedTuple):
    """What transformers passes of the sequences, under its own names."""

    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    max_length_q: Any = None
    max_length_k: Any = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    lengths: Lengths,
    *,
    causal: bool,
    sliding_window: int | None,
    **options: Any,
) -> torch.Tensor:
    """Output (1, Hq, T, Dv) for query (1, Hq, T, D).

    Raises:
        Unsupported: there are several rows of sequences, or the mask hides more than they and positions do.
    """
    if query.shape[0] != 1:
        raise Unsupported(
            f"transformers passes cu_seq_lens_q to attention with a batch of {query.shape[0]}: sequences lie one after"
            " another in a single row"
        )
    if causal:
        options |= {"is_causal": True, "causal_alignment": "bottom_right"}
    if sliding_window is not None:
        options["window"] = window_of(sliding_window)
    if mask is not None and mask.shape[-2:] != (query.shape[2], key.shape[2]):
        raise Unsupported(f"attention_mask has shape {tuple(mask.shape)}: cu_seq_lens_q goes with one over all rows")
    q, k, v = (operand[0].transpose(0, 1) for operand in (query, key, value))
    longest = {"max_seqlen_q": lengths.max_length_q, "max_seqlen_k": lengths.max_length_k}
    out: torch.Tensor = attention_varlen(q, k, v, lengths.cu_seq_lens_q, lengths.cu_seq_lens_k, **longest, **options)
    if mask is not None:
        _check(mask, lengths, causal, sliding_window)
    return out.transpose(0, 1)[None]


def _check(mask: torch.Tensor, lengths: Lengths, causal: bool, sliding_window: int | None) -> None:
    """See that a mask hides nothing more, once for all layers: the host waits for a GPU there.

    transformers makes it of the position_ids, which begin anew with each sequence, or of one sequence, where a model
    does not tell it of them. Raises ``Unsupported``.
    """
    given = lengths.cu_seq_lens_q, lengths.cu_seq_lens_k
    starts_q, starts_k = (torch.as_tensor(starts, device=mask.device) for starts in given)
    lasting = isinstance(given[0], torch.Tensor) and isinstance(given[1], torch.Tensor)
    lasting = lasting and not any(x.is_inference() for x in (mask, *given))  # else nothing tells that they are the same
    held = (*(x._version for x in (mask, *given)), causal, sliding_window) if lasting else ()
    for other_q, other_k, before in getattr(mask, _HELD, ()):
        if lasting and other_q is given[0] and other_k is given[1] and before == held:
            return
    i, j = (torch.arange(n, device=mask.device) for n in mask.shape[-2:])
    of_query, of_key = (torch.bucketize(at, starts, right=True) for at, starts in ((i, starts_q), (j, starts_k)))
    # Positions from the end of each sequence, where its last query meets its last key.
    i, j = i - starts_q[of_query.clamp(max=len(starts_q) - 1)], j - starts_k[of_key.clamp(max=len(starts_k) - 1)]
    sees = (of_query[:, None] == of_key) & (of_query < len(starts_q))[:, None]
    if causal:
        sees &= j <= i[:, None]
    if sliding_window is not None:
        sees &= (i[:, None] - j).abs() < sliding_window
    said = mask if mask.dtype == torch.bool else mask == 0
    if bool((sees & ~said).any()):
        raise Unsupported(
            "cu_seq_lens_q, or position_ids that begin anew, say that sequences lie in one row, and attention_mask"
            " hides keys within its sequences: leave one of them out"
        )
    if lasting:
        setattr(mask, _HELD, (*getattr(mask, _HELD, ()), (*given, held)))
