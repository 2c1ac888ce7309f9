"""Outputs with heads after rows lie as the query does, whoever computes them: programs join heads by a view."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnswitch

BACKENDS = (None, "tiled", "reference", "sdpa-math", "sdpa-flash")
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def dense(query: Any, **said: Any) -> Any:
    return attnswitch.attention(query, query, query, layout="BLHD", **said)


def sinks(query: Any, **said: Any) -> Any:
    return dense(query, sinks=[0.0] * query.shape[2], **said)


def softcap(query: Any, **said: Any) -> Any:
    return dense(query, softcap=2.0, **said)


def merged(query: Any, **said: Any) -> Any:
    out, lse = dense(query, return_lse=True, **said)
    return attnswitch.merge([out, out], [lse, lse], layout="BLHD")[0]


def varlen(query: Any, **said: Any) -> Any:
    return attnswitch.attention_varlen(query[0], query[0], query[0], OFFSETS, OFFSETS, **said)


def paged(query: Any, **said: Any) -> Any:
    pages = torch.randn(2, 16, query.shape[2], query.shape[3])
    table, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 16], dtype=torch.int32)
    return attnswitch.attention_paged(query, pages, pages, table, lengths, **said)


CALLS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (dense, sinks, softcap, merged, varlen, paged)}


#: Calls without gradients and with them, and backends that do not take them.
REFUSED: dict[tuple[str, bool], set[str | None]] = {
    ("sinks", False): {"sdpa-math", "sdpa-flash"},
    ("sinks", True): {"sdpa-math", "sdpa-flash"},
    ("softcap", False): {"sdpa-math", "sdpa-flash"},
    ("softcap", True): {"sdpa-math", "sdpa-flash"},
    ("merged", False): {"sdpa-math"},
    ("merged", True): {"sdpa-math", "sdpa-flash"},
    ("paged", True): set(BACKENDS),
}


taken = pytest.mark.parametrize(
    ("name", "backend", "grads"),
    [
        (name, backend, grads)
        for name, backend, grads in itertools.product(CALLS, BACKENDS, (False, True))
        if backend not in REFUSED.get((name, grads), ())
    ],
)


@taken
def test_heads_are_joined_by_a_view(name: str, backend: str | None, grads: bool) -> None:
    query = torch.randn(2, 8, 3, 4, requires_grad=grads)
    for _ in range(2):  # the second is prepared
        out = CALLS[name](query, backend=backend)
        assert out.is_contiguous()
    if grads:
        out.sum().backward()
        assert query.grad is not None


@taken
def test_heads_stay_outside_where_the_query_has_them(name: str, backend: str | None, grads: bool) -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=grads).transpose(1, 2)
    for _ in range(2):
        assert CALLS[name](query, backend=backend).swapaxes(-3, -2).is_contiguous()


@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_rows_that_lie_apart_are_joined(name: str) -> None:
    query = torch.randn(2, 8, 3, 8)[..., ::2]
    for _ in range(2):
        assert CALLS[name](query).is_contiguous()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_a_graph_lays_an_output_as_a_call_without_one(turned: bool, heads: int, rows: int) -> None:
    """Of a query that is a part of a larger array as well."""
    shape = (2, heads, rows, 24) if turned else (2, rows, heads, 24)
    query, key, value = (torch.randn(shape)[..., :8] for _ in range(3))
    if turned:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))

    def attend(*operands: torch.Tensor) -> Any:
        return attnswitch.attention(*operands, layout="BLHD")

    alone, compiled = attend(query, key, value), torch.compile(attend, backend="aot_eager")(query, key, value)
    long = heads > 1 and rows > 1
    assert alone.transpose(1, 2).is_contiguous() if turned and long else alone.is_contiguous()
    if long:
        assert compiled.stride() == alone.stride()
