"""The attention function that layers call in continuous batching, where keys and values lie in pages of a cache."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch import attention_paged
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers.fit import check_config, check_layer
from attnswitch.integrations.transformers.keywords import check_rest, is_causal_of, options_of, window_of
from attnswitch.integrations.transformers.sequences import Lengths, attend

__all__ = ["no_mask", "paged"]


def no_mask(*, config: Any = None, **_: Any) -> None:
    """No mask: lengths say who sees what.

    Raises:
        Unsupported: the model of this config would take a mask and never call the attention that goes with it.
    """
    if config is not None:
        check_config(type(config))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the cache is written to in place, by views of it
def paged(
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
    deterministic: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: dict[str, torch.Tensor] | None = None,
    max_length_q: int | None = None,
    max_length_k: dict[str, int] | None = None,
    read_index: list[torch.Tensor] | None = None,
    write_index: list[torch.Tensor] | None = None,
    block_table: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Output (1, T, Hq, Dv) for the newest tokens of all sequences: query (1, Hq, T, D), key and value (1, Hkv, T, D).

    What is said of keys is one entry for each kind of layer. The cache takes the new keys and values. With a
    ``block_table`` each sequence has one query, and its pages are read where they lie; else the cache gathers keys.

    Raises:
        Unsupported: there is no cache, a mask beside it, a CUDA graph is captured, or something is passed that is not
            honoured.
    """
    check_layer(type(module))
    check_rest(rest)
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise Unsupported(
            "this attention is for continuous batching (generate_batch), which passes a cache in pages; set the model's"
            " attention to the name without '-paged' for other calls"
        )
    if attention_mask is not None:
        raise Unsupported("attention_mask beside a cache in pages: lengths say who sees what; leave it out")
    if _in_cuda_graph(query):
        raise Unsupported(
            "continuous batching in a CUDA graph is not verified: give ContinuousBatchingConfig use_cuda_graph=False"
        )
    if dropout:
        raise Unsupported(f"dropout={dropout} with a cache in pages: call model.eval() first")
    options = options_of(softcap, deterministic, None if s_aux is None else s_aux.detach())
    options |= {"scale": scaling, "backend": backend}
    causal = is_causal_of(module, is_causal)
    of_keys: dict[str, Any] = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
    of_keys |= {"read_index": read_index, "write_index": write_index, "block_table": block_table}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=of_keys)
    if block_table is None:
        lengths = Lengths(cu_seq_lens_q, of_keys["cu_seq_lens_k"], max_length_q, of_keys["max_length_k"])
        out = attend(query, key, value, None, lengths, causal=causal, sliding_window=sliding_window, **options)
        return out.transpose(1, 2).contiguous(), None
    if sliding_window is not None:
        options["window"] = window_of(sliding_window)
    table, pages = of_keys["block_table"], (of_keys["k_cache"], of_keys["v_cache"])
    cached = of_keys["cu_seq_lens_k"].diff()
    new = _rows(table, cached, pages[0].shape[1], cache.layer_to_allocator[module.layer_idx].write_trash_index)
    for there, states in zip(pages, (key, value), strict=True):
        there.view(-1, *there.shape[2:]).index_copy_(0, new, states[0].transpose(0, 1))
    out = attention_paged(query[0].transpose(0, 1)[:, None], *pages, table, cached, is_causal=causal, **options)
    return out.transpose(0, 1), None


def _in_cuda_graph(query: torch.Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _rows(table: torch.Tensor, lengths: torch.Tensor, page: int, nowhere: int) -> torch.Tensor:
    """The row of the cache where the newest key of each sequence goes; ``nowhere`` for one of no length, padding."""
    newest = (lengths - 1).clamp(min=0).long()
    first = table.gather(1, (newest // page)[:, None])[:, 0].long() * page
    return torch.where(lengths > 0, first + newest % page, nowhere)
