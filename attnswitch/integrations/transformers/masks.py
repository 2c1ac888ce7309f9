"""The mask that comes with attention of transformers, and the mark of one that is a plain diagonal."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from attnswitch.integrations.transformers.fit import check_config

__all__ = ["biased", "is_diagonal", "is_made", "mask", "only"]

#: What a diagonal is marked by, with its version, and what every mask made here is.
_DIAGONAL, _MADE = "_attnswitch_diagonal", "_attnswitch_made"


def mask(
    *, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, config: Any = None, **rest: Any
) -> torch.Tensor | None:
    """Make the mask, bool (B, 1, Lq, Lk), True = attend; None where the layer's own causal flag says it all.

    transformers also leaves it out for an empty static cache, longer than the queries, and means a diagonal from the
    top left. Models that then keep the last queries only (gemma4) mean the bottom right, and a layer cannot tell: it
    is given a mask, marked as such a diagonal, which layers that keep every query do not look into.

    Raises:
        Unsupported: the model of this config would take the mask and never call the attention that goes with it.
    """
    if config is not None:
        check_config(type(config))
    make: Any = functools.partial(sdpa_mask, q_length=q_length, kv_length=kv_length, **rest)
    made: torch.Tensor | None = make(allow_is_causal_skip=allow_is_causal_skip)
    if made is not None and not torch.compiler.is_compiling():
        setattr(made, _MADE, True)
    if made is not None or not allow_is_causal_skip or q_length in (1, kv_length):
        return made
    # generate makes it contiguous, which must not be another tensor: that would have no mark.
    diagonal: torch.Tensor = make(allow_is_causal_skip=False).contiguous()
    if not diagonal.is_inference():
        setattr(diagonal, _DIAGONAL, diagonal._version)
    return diagonal


def is_diagonal(mask: torch.Tensor, queries: int) -> bool:
    """Whether ``mask()`` made it as the diagonal from the top left of so many queries, and nobody wrote to it since."""
    version = getattr(mask, _DIAGONAL, None)
    return version is not None and mask.shape[2] == queries and bool(mask._version == version)


def is_made(mask: torch.Tensor) -> bool:
    """Whether ``mask()`` made it, bool, of lengths, windows and padding: nobody said who sees what."""
    return hasattr(mask, _MADE)


def biased(mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add what ``mask`` adds or hides to ``bias``: a float mask."""
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def only(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Hide from ``mask`` what the bool mask ``chosen`` leaves out."""
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)
