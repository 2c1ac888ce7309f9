"""``Like``: a manner in which attention is called, by how its operands lie and what its parameters are called.

What a library documents holds for whoever is like it. ``bhsd`` and ``bshd`` document nothing: where positions count
from is not known there, nor whether key heads may be shared, or there may be no queries or no keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attnswitch.errors import InvalidProblem
from attnswitch.problem import Alignment

__all__ = ["LIKES", "UNSAID", "Like", "Manner", "manner"]

#: How query, key, value and output lie: (B, H, L, D), (B, L, H, D), (T, H, D), or queries (B, L, H, D) beside caches
#: (P, page, H, D).
Layout = Literal["BHLD", "BLHD", "THD", "pages"]

#: A name that says dropout, as xformers has it, where its default is 0: elsewhere it may say anything.
UNSAID = "p"
#: What a parameter may be called, by what it says; in any case. A window may be one parameter, or one for each side.
_WORDS = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "mask": ("attn_mask", "attention_mask", "mask"),
    "bias": ("attn_bias", "bias"),
    "dropout": ("dropout_p", "dropout", UNSAID),
    "causal": ("is_causal", "causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "grouped": ("enable_gqa",),
    "window": ("window_size", "window"),
    "left": ("left_window_size",),
    "right": ("right_window_size",),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap"),
    "slopes": ("alibi_slopes",),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "deterministic": ("deterministic",),
    "lse": ("return_lse", "return_softmax_lse", "return_attn_probs"),
}
_EDGES = {
    "edges_q": ("cu_seqlens_q",),
    "edges_k": ("cu_seqlens_k",),
    "longest_q": ("max_seqlen_q",),
    "longest_k": ("max_seqlen_k",),
}
_PAGES = {
    "key": ("k_cache", "key_cache"),
    "value": ("v_cache", "value_cache"),
    "table": ("block_table", "block_tables", "page_table"),
    "lengths": ("cache_seqlens", "cache_lengths", "context_lens"),
    "splits": ("num_splits",),
    "tree": ("tree_mask",),
    "edges_q": ("cu_seqlens_q",),
    "longest_q": ("max_seqlen_q",),
}
_OWN = {
    "lengths": ("key_lengths",),
    "alignment": ("causal_alignment",),
    "seed": ("seed",),
}


@dataclass(frozen=True, slots=True)
class Like:
    """One manner. ``words`` are names of parameters by what they say, of which the first is used in messages."""

    name: str
    layout: Layout
    words: Mapping[str, tuple[str, ...]]
    #: Where positions count from; None where it is not known.
    alignment: Alignment | None = None
    #: Whether key heads may be shared, without a parameter for it; and whether there may be nothing to attend to.
    grouped: bool = False
    empty: bool = True
    #: Whether the lse has a gradient.
    lse_grads: bool = True
    #: What stands for a side of the window that has no limit.
    unlimited: int | None = -1


LIKES = {
    like.name: like
    for like in (
        Like("torch", "BHLD", _WORDS, "top_left"),
        Like("flash-attn", "BLHD", _WORDS, "bottom_right", grouped=True, lse_grads=False),
        Like("flash-attn-varlen", "THD", _WORDS | _EDGES, "bottom_right", grouped=True, lse_grads=False),
        Like("paged", "pages", _WORDS | _PAGES, "bottom_right", grouped=True, lse_grads=False),
        Like("bhsd", "BHLD", _WORDS, empty=False),
        Like("bshd", "BLHD", _WORDS, empty=False),
        Like("attnswitch", "BHLD", _WORDS | _OWN, "top_left", grouped=True, unlimited=None),
    )
}
_LIBRARIES = ("torch", "numpy", "cupy")
#: What a signature does not say, and its author may.
_PROMISES = ("gqa", "deterministic", "empty", "asserts")


@dataclass(frozen=True, slots=True)
class Manner:
    """What follows ``@`` in a target: ``LIKE+WORD+WORD``. A like of "" and a library of "" are to be deduced."""

    like: str = ""
    library: str = ""
    promises: frozenset[str] = frozenset()


def manner(text: str) -> Manner:
    """Read ``text``. Raises ``InvalidProblem`` for a like, or a word behind it, that is not known."""
    like, *words = text.split("+")
    if like and like not in LIKES:
        raise InvalidProblem(f"like {like!r} is not known; expected one of {', '.join(LIKES)}")
    for word in words:
        if word not in (*_LIBRARIES, *_PROMISES):
            raise InvalidProblem(f"{word!r} in like {text!r}: expected one of {', '.join((*_LIBRARIES, *_PROMISES))}")
    libraries = [word for word in words if word in _LIBRARIES]
    if len(libraries) > 1:
        raise InvalidProblem(f"like {text!r} names {' and '.join(libraries)}: expected one library")
    return Manner(like, "".join(libraries), frozenset(words).intersection(_PROMISES))
