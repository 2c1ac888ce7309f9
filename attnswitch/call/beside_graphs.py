"""Calls that torch.compile leaves out of its graphs, for the reasons it then gives."""

from __future__ import annotations

import torch

from attnswitch.call import headwise as of_batches
from attnswitch.call import paged as of_pages
from attnswitch.call import varlen as of_sequences

__all__ = ["headwise", "paged", "varlen"]

varlen = torch.compiler.disable(  # type: ignore[no-untyped-call]
    of_sequences.attend,
    reason="attention_varlen is no operator of torch.compile's yet; compile without fullgraph, or pass padded tensors"
    " and key_lengths to attnswitch.attention",
)
paged = torch.compiler.disable(  # type: ignore[no-untyped-call]
    of_pages.attend,
    reason="attention_paged is no operator of torch.compile's yet; compile without fullgraph",
)
headwise = torch.compiler.disable(  # type: ignore[no-untyped-call]
    of_batches.attend,
    reason="attention with alibi_slopes is no operator of torch.compile's yet; compile without fullgraph, or pass"
    " -slope * distance as a float attn_mask",
)
