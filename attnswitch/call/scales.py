"""Scales of a cache of 8 bits: what each page and key head is multiplied by. They are read and checked here."""

from __future__ import annotations

import numbers
import sys
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call.describe import check_beside
from attnswitch.call.options import text_of
from attnswitch.errors import InvalidProblem
from attnswitch.problem import CACHES, DTYPES

__all__ = ["none", "read", "widened"]

_ROLES = ("key_scale", "value_scale")


def widened(query: Facts, key: Facts, value: Facts) -> tuple[Facts, Facts]:
    """Facts of both caches as if those of 8 bits were of query's dtype, which they stand for.

    Raises ``InvalidProblem`` where one is of 8 bits and the other is not of the same type.
    """
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
    kind = "float64" if query.dtype == "float64" else "float32"
    expected = f"a number, or an array of shape ({heads},), ({pages}, 1) or ({pages}, {heads})"
    if given is None:
        given = 1.0
    if isinstance(given, numbers.Real) and not isinstance(given, bool) and not arrays.library_of(given):
        library = query.library if query.library in ("numpy", "cupy") else "torch"
        array = arrays.lengths_as_array(float(given), library, query.device, kind)
    else:
        array = _array(given, role, query, kind, expected)
    if tuple(array.shape) not in ((), (1,), (heads,), (pages, 1), (1, heads), (pages, heads)):
        raise InvalidProblem(f"{role} has shape {tuple(array.shape)}: expected {expected}")
    if query.device[0] == "cpu":  # elsewhere reading them would cost a synchronisation
        for number in array.reshape(-1).tolist():
            if not abs(number) < float("inf"):
                raise InvalidProblem(f"{role} holds {number}: expected finite numbers")
    if arrays.library_of(array) == "torch":
        return array.expand(pages, heads)
    return sys.modules[arrays.library_of(array)].broadcast_to(array, (pages, heads))


def _array(given: Any, role: str, query: Facts, kind: str, expected: str) -> Array:
    if not arrays.library_of(given):
        raise InvalidProblem(f"{role}={text_of(given)}: expected {expected}")
    array, facts = arrays.take(given, role)
    if facts.grad:
        raise InvalidProblem(f"{role} requires a gradient, which a cache has none of: pass {role}.detach()")
    check_beside(facts, role, query)
    if facts.dtype not in DTYPES:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
    if arrays.library_of(array) == "torch":
        return array.to(getattr(sys.modules["torch"], kind))
    return array.astype(kind)
