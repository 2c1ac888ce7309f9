"""Calls that torch.compile leaves out of its graphs, for the reasons it then gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnswitch.call import entry_varlen as of_sequences
from attnswitch.call import headwise as of_batches

__all__ = ["backward", "headwise", "varlen"]


def _call(function: Callable[..., Any], *given: Any, **said: Any) -> Any:
    """What ``function`` returns, which finds itself in no graph."""
    return function(*given, **said)


varlen = torch.compiler.disable(  # type: ignore[no-untyped-call]
    of_sequences.call,
    reason="attention_varlen with alibi_slopes is no operator of torch.compile's yet, as it is without them; compile"
    " without fullgraph, or pass padded tensors and -slope * distance as a float attn_mask to attnswitch.attention",
)
headwise = torch.compiler.disable(  # type: ignore[no-untyped-call]
    of_batches.attend,
    reason="attention with alibi_slopes is no operator of torch.compile's yet; compile without fullgraph, or pass"
    " -slope * distance as a float attn_mask",
)
backward = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _call,
    reason="gradients of a call with sinks or alibi_slopes are no operator of torch.compile's yet; compile without"
    " fullgraph, or call attention or attention_varlen with sinks, and let torch differentiate it",
)
