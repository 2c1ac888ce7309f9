"""attnswitch as an attention implementation of Hugging Face transformers.

After ``register()``, ``attn_implementation="attnswitch"`` works wherever transformers takes one. What a model asks of
attention is honoured, or refused with ``Unsupported``; nothing is dropped.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from attnswitch import api
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.machine import registry

__all__ = ["register"]

#: Handed down to every layer, without a part in attention: what query, key and mask already carry, the model's outputs,
#: and packing as state-space layers want it.
_NO_EFFECT = {
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "use_cache",
}
_PACKED = "packed sequences are taken as a mask, which transformers makes from position_ids; leave the lengths out"
_REASONS = {
    "cache": "keys and values in pages are not supported; generate without continuous batching",
    "output_attentions": "no backend forms the weights; use attn_implementation='eager' to look at them",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), _PACKED),
}
#: What a mask is marked by, with its version.
_DIAGONAL = "_attnswitch_diagonal"
_UNKNOWN = "it may change the result in a way not known here; use attn_implementation='eager' for this model"


def register(name: str = "attnswitch", backend: str | None = None) -> None:
    """Make ``attn_implementation=name`` mean attnswitch, for attention and for the mask that comes with it.

    Args:
        name: what models ask for; a name that is registered again changes its meaning.
        backend: as for ``attnswitch.attention``: this one or an error; the planner's choice if None.

    Raises:
        InvalidProblem: the backend is not known, or transformers would read something else into the name.
    """
    if re.search(r"flash|flex_attention|[/|:]|^eager$", name):
        raise InvalidProblem(
            f"name={name!r}: transformers takes 'eager' and names with 'flash', 'flex_attention', '/', ':' or '|' for"
            " its own kinds of attention, which come with other masks; choose another name"
        )
    if backend is not None:
        registry.load(backend)
    AttentionInterface.register(name, functools.partial(_attention, backend))
    # Without a function for the masks every layer is handed None, padded batches included.
    AttentionMaskInterface.register(name, _mask)


def _mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **rest: Any) -> torch.Tensor | None:
    """Make the mask, bool (B, 1, Lq, Lk), True = attend; None where the layer's own causal flag says it all.

    transformers also leaves it out for an empty static cache, longer than the queries, and means a diagonal from the
    top left. Models that then keep the last queries only (gemma4) mean the bottom right, and a layer cannot tell: it
    is given a mask, marked as such a diagonal, which layers that keep every query do not look into.
    """
    make: Any = functools.partial(sdpa_mask, q_length=q_length, kv_length=kv_length, **rest)
    mask: torch.Tensor | None = make(allow_is_causal_skip=allow_is_causal_skip)
    if mask is not None or not allow_is_causal_skip or q_length in (1, kv_length):
        return mask
    # generate makes it contiguous, which must not be another tensor: that would have no mark.
    diagonal: torch.Tensor = make(allow_is_causal_skip=False).contiguous()
    if not diagonal.is_inference():
        setattr(diagonal, _DIAGONAL, diagonal._version)
    return diagonal


def _is_diagonal(mask: torch.Tensor, queries: int) -> bool:
    """Whether ``_mask`` made it as the diagonal from the top left of so many queries, and nobody wrote to it since."""
    version = getattr(mask, _DIAGONAL, None)
    return version is not None and mask.shape[2] == queries and bool(mask._version == version)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def _check_model(layer: type) -> None:
    """Refuse layers of a model made for eager attention only: its causal flag, or what it does to a mask, may be wrong.

    transformers looks at such marks for its own implementations, and at none of them for a registered one.
    """
    models: list[Any] = [
        kind
        for kind in vars(sys.modules[layer.__module__]).values()
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == layer.__module__
    ]
    # Models with softcap or sinks support flash-attn and not sdpa; both features are honoured here.
    fit = (kind._supports_sdpa or (kind._supports_flash_attn and kind._supports_attention_backend) for kind in models)
    if models and not any(fit):
        raise Unsupported(
            f"{layer.__name__} is part of a model that supports neither sdpa nor other attention backends, as its"
            " _supports_* marks say; use attn_implementation='eager' for this model"
        )


def _attention(
    backend: str | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Output (B, Lq, Hq, Dv) for query (B, Hq, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv); no weights."""
    layer: type = type(module)
    _check_model(layer)
    for name, given in rest.items():
        if name not in _NO_EFFECT and given is not None and (name, given) != ("output_attentions", False):
            raise Unsupported(f"transformers passes {name} to attention: {_REASONS.get(name, _UNKNOWN)}")
    length_q = query.shape[2]
    if query.shape[0] != key.shape[0] and query.shape[0] == 1:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    # Only what is said is passed on: each keyword costs every call of every layer.
    options: dict[str, Any] = {}
    if attention_mask is None:  # else the mask holds the diagonal and the window as well
        options = _positions(module, length_q, key.shape[2], is_causal, sliding_window)
    elif length_q > 1 and position_bias is None and _is_diagonal(attention_mask, length_q):
        key, value, attention_mask = key[:, :, :length_q], value[:, :, :length_q], None
        options["is_causal"] = True
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else _biased(attention_mask, position_bias)
    if attention_mask is not None:
        options["attn_mask"] = attention_mask
    if dropout:
        options["dropout_p"] = dropout
    if softcap:
        options["softcap"] = softcap
    if deterministic:
        options["deterministic"] = True
    if s_aux is None:
        out = api.attention(query, key, value, scale=scaling, backend=backend, **options)
    else:
        # A sink is one more key, of score s_aux and value 0: it takes 1 - sigmoid(lse - s_aux) of every row.
        out, lse = api.attention(query, key, value, scale=scaling, backend=backend, return_lse=True, **options)
        out = (out * torch.sigmoid(lse - s_aux.view(-1, 1))[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _positions(
    module: torch.nn.Module, length_q: int, length_k: int, is_causal: bool | None, sliding_window: int | None
) -> dict[str, Any]:
    """The keywords that say who sees what where there is no mask."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # True is sdpa's default too
    causal = bool(causal) and length_q > 1
    # Masks are left out while the window reaches every key; a model that makes none means what flash-attn does.
    windowed = sliding_window is not None and sliding_window < length_k
    if not causal and not windowed:
        return {}
    if length_q > length_k:
        raise Unsupported(
            f"causal or windowed, {length_q} queries, {length_k} keys and no mask: pass one to say who sees what"
        )
    options: dict[str, Any] = {"is_causal": causal}
    if sliding_window is not None and windowed:
        options["window"] = (sliding_window - 1, sliding_window - 1)
    if length_q < length_k:
        options["causal_alignment"] = "bottom_right"  # the queries are the newest tokens
    return options


def _biased(mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add what ``mask`` adds or hides to ``bias``: a float mask."""
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
