"""Scales of a cache of 8 bits: what each page and key head is multiplied by. They are read and checked here."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call import per_head
from attnswitch.call.options import text_of
from attnswitch.errors import InvalidProblem
from attnswitch.problem import CACHES, DTYPES

__all__ = ["none", "read", "widened"]

_ROLES = ("key_scale", "value_scale")


def widened(query: Facts, key: Facts, value: Facts) -> tuple[Facts, Facts]:
    """Facts of both caches as if those of 8 bits were of query's dtype, which they stand for.

    Raises ``InvalidProblem`` where one is of no type that a cache has, or of 8 bits and the other not of the same type.
    """
    for role, cache in (("key_cache", key), ("value_cache", value)):
        if cache.dtype not in (*CACHES, *DTYPES):
            own = f"query's {query.dtype}" if query.dtype in DTYPES else f"query's, one of {', '.join(DTYPES)}"
            raise InvalidProblem(
                f"{role} has dtype {cache.dtype}: expected {own}, or one of {', '.join(CACHES)}, as"
                " which .view reads what is kept as bytes"
            )
    if key.dtype not in CACHES and value.dtype not in CACHES:
        return key, value
    if key.dtype != value.dtype:
        raise InvalidProblem(
            f"key_cache has dtype {key.dtype} and value_cache {value.dtype}: expected one of query's dtype, or one of"
            f" {', '.join(CACHES)}, for both"
        )
    return key._replace(dtype=query.dtype), value._replace(dtype=query.dtype)


def none(said: tuple[Any, Any], cache: Facts) -> dict[str, Array]:
    """No scales, of a cache of query's dtype. Raises ``InvalidProblem`` where there are some."""
    for role, given in zip(_ROLES, said, strict=True):
        if given is not None:
            raise InvalidProblem(f"{role} with caches of {cache.dtype}: only those of {', '.join(CACHES)} are scaled")
    return {}


def read(said: tuple[Any, Any], query: Facts, cache: Facts) -> dict[str, Array]:
    """key_scale and value_scale as kernels take them, (P, Hkv), beside a query and caches (P, Hkv, page, D).

    They may be views with strides of 0. Raises ``InvalidProblem``.
    """
    return {role: _read(given, role, query, cache) for role, given in zip(_ROLES, said, strict=True)}


def _read(given: Any, role: str, query: Facts, cache: Facts) -> Array:
    pages, heads = cache.shape[:2]
    expected = f"a number, or numbers of shape (1,), ({heads},), ({pages}, 1), (1, {heads}) or ({pages}, {heads})"
    given = 1.0 if given is None else given
    found, grad = per_head.taken(given, role, query, (numbers.Real, Sequence), expected)
    if grad:
        raise InvalidProblem(f"{role} requires a gradient, which a cache has none of: pass {role}.detach()")
    array: Array = per_head.as_floats(found, query)
    # Of an array those of pages in use are looked at elsewhere.
    if not arrays.library_of(given) and not all(abs(n) < float("inf") for n in array.reshape(-1).tolist()):
        raise InvalidProblem(f"{role}={text_of(given)}: expected finite numbers")
    if tuple(array.shape) not in ((), (1,), (heads,), (pages, 1), (1, heads), (pages, heads)):
        raise InvalidProblem(f"{role} has shape {tuple(array.shape)}: expected {expected}")
    if arrays.library_of(array) == "torch":
        return array.expand(pages, heads)
    return sys.modules[arrays.library_of(array)].broadcast_to(array, (pages, heads))
