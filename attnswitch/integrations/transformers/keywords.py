"""The keywords that transformers hands down to attention, apart from those that each function names."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from attnswitch.errors import Unsupported

__all__ = ["UNKNOWN", "check_rest", "is_causal_of", "options_of", "window_of"]

#: Without a part in attention: what query, key and mask already carry, the model's outputs, what continuous batching
#: does with logits, and packing as state-space layers want it.
_NO_EFFECT = {
    "cache_position",
    "grid_thw",
    "logits_indices",
    "logits_processor_args",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "seq_idx",
    "use_cache",
}
_REASONS = {
    "cache": "keys and values in pages are for the attention that continuous batching switches to, which this"
    " transformers did not; generate without it"
}
UNKNOWN = "it may change the result in a way not known here; use attn_implementation='eager' for this model"
_log = logging.get_logger(__name__)


def check_rest(rest: dict[str, Any]) -> None:
    """See that what is left has no effect, or is None.

    Raises:
        Unsupported: something is passed that is not honoured.
    """
    for name, given in rest.items():
        if name == "output_attentions":
            if given:
                _log.warning_once(
                    "attnswitch gives no attention weights; use attn_implementation='eager' to look at them"
                )
        elif name not in _NO_EFFECT and given is not None:
            raise Unsupported(f"transformers passes {name} to attention: {_REASONS.get(name, UNKNOWN)}")


def options_of(softcap: float | None, deterministic: bool | None, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Those of attnswitch that are said, and no other: each keyword costs every call of every layer."""
    options: dict[str, Any] = {}
    if softcap:
        options["softcap"] = softcap
    if deterministic:
        options["deterministic"] = True
    if sinks is not None:
        options["sinks"] = sinks
    return options


def window_of(sliding_window: int) -> tuple[int, int]:
    """The ``window`` of as many keys, a query's own among them."""
    return sliding_window - 1, sliding_window - 1


def is_causal_of(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """What is said, or else what the layer is; True is sdpa's default too."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
