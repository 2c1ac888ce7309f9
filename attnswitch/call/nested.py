"""Nested tensors of torch's, sequence by sequence."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.errors import InvalidProblem

__all__ = ["by_sequence"]

_BREAKS = (
    "attention of nested tensors goes sequence by sequence, as long as its numbers say, which no graph knows; compile"
    " without fullgraph, or pass padded tensors and key_lengths to attnswitch.attention"
)


def _by_sequence(attention: Any, query: Any, key: Any, value: Any, attn_mask: Any, *rest: Any) -> Any:
    """Sequence by sequence, (..., L, D) each, as torch's: memory for what there is, and no padding."""
    if attn_mask is not None:
        raise InvalidProblem("attn_mask beside nested tensors, whose sequences have lengths of their own: leave it out")
    if not all(isinstance(x, torch.Tensor) and x.is_nested for x in (key, value)):
        raise InvalidProblem("query is nested, key or value is not: pass all of one kind")
    counts = query.size(0), key.size(0), value.size(0)
    if not counts[0] or counts[0] != counts[1] or counts[0] != counts[2]:
        raise InvalidProblem(f"query, key and value hold {counts} sequences: expected as many of each, at least one")
    parts = [
        attention(q[None], k[None], v[None], None, *rest)[0]
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    ]
    if query.layout != torch.jagged:
        return torch.nested.as_nested_tensor(parts)
    axis = query._ragged_idx - 1  # of a sequence, the one whose length is its own
    rows = torch.cat([part.transpose(0, axis) for part in parts])
    offsets = query.offsets()
    if query.lengths() is not None:  # the sequences have gaps between them, which the result has not
        offsets = torch.nn.functional.pad(query.lengths().cumsum(0), (1, 0))
    # What it knows of its lengths, by which it would be padded; None where it has not been asked yet.
    known = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(rows, offsets, **known).transpose(1, axis + 1)


#: Breaks a graph of torch.compile, which would fail at the lengths; with ``fullgraph`` that gives the reason.
by_sequence = torch.compiler.disable(_by_sequence, reason=_BREAKS)  # type: ignore[no-untyped-call]
