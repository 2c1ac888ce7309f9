"""Calls that torch.compile leaves out of its graphs, for the reasons it then gives."""

from __future__ import annotations

import torch

from attnswitch.call import paged as _paged
from attnswitch.call import varlen as _varlen

__all__ = ["paged", "varlen"]

varlen = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _varlen.attend,
    reason="attention_varlen is no operator of torch.compile's yet; compile without fullgraph, or pass padded tensors"
    " and key_lengths to attnswitch.attention",
)

paged = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _paged.attend,
    reason="attention_paged is no operator of torch.compile's yet; compile without fullgraph",
)
