"""Operators on a cache in pages: what they do when a graph runs, and what they return without elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Never

from attnswitch import arrays
from attnswitch.call import paged
from attnswitch.call.operators.memory import lse_of
from attnswitch.call.operators.run import as_without_graph
from attnswitch.call.operators.schema import read_said
from attnswitch.call.options import Options
from attnswitch.call.paged import Beside
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem

__all__ = ["fake_forward", "fake_plain", "forward", "no_gradient", "plain"]


@as_without_graph
def plain(query: Any, key_cache: Any, value_cache: Any, *beside: Any, **said: Any) -> Any:
    """Output."""
    backend, policy, options = _read(said)
    return paged.attend((query, key_cache, value_cache), _named(beside), options, backend, policy).contiguous()


@as_without_graph
def forward(query: Any, key_cache: Any, value_cache: Any, *beside: Any, **said: Any) -> tuple[Any, Any]:
    """Output and lse."""
    backend, policy, options = _read(said)
    options = replace(options, return_lse=True)
    out, lse = paged.attend((query, key_cache, value_cache), _named(beside), options, backend, policy)
    return out.contiguous(), lse.contiguous()


def no_gradient(*_: Any) -> Never:
    """In place of a derivative: raises ``InvalidProblem``."""
    raise InvalidProblem(paged.NO_GRADIENT)


def _read(said: dict[str, Any]) -> tuple[str | None, str | None, Options]:
    return read_said(said | {"causal_alignment": "bottom_right"})


def _named(beside: tuple[Any, ...]) -> Beside:
    *rest, sinks, slopes = beside
    return Beside._make((*rest, PerHead(sinks, slopes)))


# -- without elements --------------------------------------------------------------------------------------------------


def fake_plain(query: Any, key_cache: Any, value_cache: Any, *beside: Any, **said: Any) -> Any:
    """The output."""
    *_, options = _read(said)
    facts = [arrays.outline(x)._replace(grad=False) for x in (query, key_cache, value_cache)]
    paged.fitting(facts, options, packed=_named(beside).cu_seqlens_q is not None)
    return query.new_empty((*query.shape[:-1], value_cache.shape[3]))


def fake_forward(query: Any, key_cache: Any, value_cache: Any, *beside: Any, **said: Any) -> tuple[Any, Any]:
    """Output and lse."""
    out = fake_plain(query, key_cache, value_cache, *beside, **said)
    *rows, heads, _ = query.shape  # (B, Lq) or (T,)
    shape = (rows[0], heads, rows[1]) if len(rows) == 2 else (heads, *rows)
    return out, lse_of(query, shape)
