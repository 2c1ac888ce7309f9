"""What a class of problems has in common, worked out once: its problems differ in nothing but batch and lengths.

Lengths change at every token of a decoding, so that only what depends on them may cost anything at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from attnswitch.problem import Problem

__all__ = ["MANY", "per_class"]

#: Queries from which on their number makes no difference but in the grid: fewer share tiles, or have smaller ones.
MANY = 65
#: Classes that are kept; beyond, all are forgotten.
_MOST = 512

_P = ParamSpec("_P")
_R = TypeVar("_R")

_kept: dict[tuple[Any, ...], dict[Any, Any]] = {}
#: The last problem that was asked about, since one is asked about several times in a row.
_latest: tuple[Problem, dict[Any, Any]] | None = None


def per_class(work: Callable[Concatenate[Problem, _P], _R]) -> Callable[Concatenate[Problem, _P], _R]:
    """``work``, done once for a class of problems and its other arguments, which are hashable and given by position.

    It must not look at batch, keys, or queries from ``MANY`` on.
    """

    @functools.wraps(work)
    def known(problem: Problem, /, *more: Any) -> Any:
        results = _results(problem)
        key = work, *more
        try:
            return results[key]
        except KeyError:
            result = results[key] = work(problem, *more)  # type: ignore[call-arg]
            return result

    return known  # type: ignore[return-value]


def _results(p: Problem) -> dict[Any, Any]:
    """What is known of the class of ``p``."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is p:
        return latest[1]
    q, k, v, m, mask = p.query, p.key, p.value, p.attn_mask, p.mask
    key = (
        *(p.heads_q, p.heads_kv, min(p.seq_q, MANY), p.dim_qk, p.dim_v, p.dtype),
        *(p.causal, p.window is None, p.alignment, p.key_lengths, p.scale, p.softcap, p.dropout, p.lse, p.grads),
        *(p.deterministic, p.varlen, p.sinks, p.alibi, p.page, p.splits > 0, p.tree, p.cache),
        *(q.align, q.strided, q.expanded, q.negative, k.align, k.strided, k.expanded, k.negative),
        *(v.align, v.strided, v.expanded, v.negative),
        None if mask is None else (mask.dtype, mask.axes, m.align, m.strided, m.expanded, m.negative),
    )
    results = _kept.get(key)
    if results is None:
        if len(_kept) >= _MOST:
            _kept.clear()
        results = _kept[key] = {}
    _latest = p, results
    return results
