"""What the operators cost, as ``torch.utils.flop_counter`` counts: hidden scores as well."""

from __future__ import annotations

from typing import Any

__all__ = ["backward", "forward"]

Shape = tuple[int, ...]


def forward(query: Shape, key: Shape, value: Shape, *_: Any, layout: str = "BHLD", **__: Any) -> int:
    """Two products."""
    return 2 * _scores(query, key, layout) * (query[-1] + value[-1])


def backward(
    _: Shape, __: Any, query: Shape, key: Shape, value: Shape, *___: Any, layout: str = "BHLD", **____: Any
) -> int:
    """Scores again, gradients of weights and value of Dv each, of query and key of D each."""
    return 2 * _scores(query, key, layout) * (3 * query[-1] + 2 * value[-1])


def _scores(query: Shape, key: Shape, layout: str) -> int:
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    return query[0] * query[heads] * query[length] * key[length]
