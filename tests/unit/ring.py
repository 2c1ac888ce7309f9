"""Ring attention: each rank holds its queries, and the keys of all ranks come by. Causal work is dealt evenly.

A sequence is cut in twice as many chunks as there are ranks, and rank r holds chunks r and 2 n - 1 - r (zigzag): what
one of them sees less of, the other sees more of. Method: Liu, Zaharia and Abbeel, "Ring Attention" (2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attnswitch import attention, attention_backward, merge

__all__ = ["GRADIENTS", "Hiding", "Shard", "add", "attend", "backward", "causal", "chunks", "held", "merged", "shard"]

GRADIENTS = ("query", "key", "value")
#: Key and value of the chunks that a rank holds, by the number of the chunk.
Shard = Mapping[int, tuple[Any, Any]]
#: What hides between the queries of one chunk and the keys of another, as keywords; None where everything is hidden.
Hiding = Callable[[int, int], dict[str, Any] | None]


def chunks(length: int, ranks: int) -> list[slice]:
    """A sequence in 2 n parts, whose lengths differ by one at most."""
    edges = [length * n // (2 * ranks) for n in range(2 * ranks + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def held(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of a rank."""
    return rank, 2 * ranks - 1 - rank


def shard(key: Any, value: Any, cuts: Sequence[slice], rank: int, ranks: int) -> Shard:
    """What a rank holds of key and value."""
    return {j: (key[:, :, cuts[j]], value[:, :, cuts[j]]) for j in held(rank, ranks)}


def causal(mine: int, other: int) -> dict[str, Any] | None:
    """Later chunks are hidden, earlier ones are not, and a chunk is causal to itself."""
    return None if other > mine else {"is_causal": other == mine}


def attend(
    queries: Mapping[int, Any], shards: Iterable[Shard], hiding: Hiding = causal, **call: Any
) -> dict[int, tuple[Any, Any]]:
    """Output and lse of each chunk of queries that sees any of the shards."""
    parts: dict[int, list[tuple[Any, Any]]] = {}
    for keys in shards:
        for i, query in queries.items():
            for j, (key, value) in keys.items():
                if (hides := hiding(i, j)) is not None:
                    parts.setdefault(i, []).append(attention(query, key, value, return_lse=True, **hides, **call))
    return {i: merge(*zip(*found, strict=True)) for i, found in parts.items()}


def merged(one: Mapping[int, Any], other: Mapping[int, Any]) -> dict[int, tuple[Any, Any]]:
    """Results of what came by so far with those of the next shard."""
    both = {i: merge(*zip(one[i], other[i], strict=True)) for i in one.keys() & other.keys()}
    return {**one, **other, **both}


def backward(
    rows: Mapping[int, tuple[Any, ...]], keys: Shard, hiding: Hiding = causal, **call: Any
) -> tuple[dict[int, Any], ...]:
    """Gradients of a rank's queries from one shard, and of the shard's keys and of its values from these queries.

    ``rows`` holds query, out, lse, grad_out and grad_lse of each chunk: those of all keys.
    """
    sums: tuple[dict[int, Any], ...] = ({}, {}, {})
    for i, (query, out, lse, grad_out, grad_lse) in rows.items():
        for j, (key, value) in keys.items():
            if (hides := hiding(i, j)) is not None:
                results = {"out": out, "lse": lse, "grad_lse": grad_lse}
                grads = attention_backward(grad_out, query, key, value, **results, **hides, **call)
                add(sums, tuple({n: grad} for n, grad in zip((i, j, j), grads[:3], strict=True)))
    return sums


def add(sums: Sequence[dict[int, Any]], found: Sequence[Mapping[int, Any]]) -> None:
    """Add gradients by chunk to ``sums``, in float64."""
    for into, grads in zip(sums, found, strict=True):
        for n, grad in grads.items():
            wide = grad.double() if hasattr(grad, "double") else grad.astype("float64")
            into[n] = into[n] + wide if n in into else wide
