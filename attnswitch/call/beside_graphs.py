"""Calls that torch.compile leaves out of its graphs, for the reasons it then gives."""

from __future__ import annotations

import torch

from attnswitch.call.varlen import attend

__all__ = ["varlen"]

varlen = torch.compiler.disable(  # type: ignore[no-untyped-call]
    attend,
    reason="attention_varlen is no operator of torch.compile's yet; compile without fullgraph, or pass padded tensors"
    " and key_lengths to attnswitch.attention",
)
