"""What a call is given of each head beside its operands: sinks, and slopes of ALiBi. It is read and checked here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call.describe import check_beside
from attnswitch.call.options import text_of
from attnswitch.errors import InvalidProblem
from attnswitch.problem import DTYPES

__all__ = [
    "NONE",
    "NO_SLOPES_GRADIENT",
    "PerHead",
    "Read",
    "as_floats",
    "check_scores",
    "check_sinks",
    "check_slopes",
    "read",
    "taken",
]

NO_SLOPES_GRADIENT = (
    "alibi_slopes requires_grad, and its gradient would be lost: pass -slope * distance as a float attn_mask, which"
    " gets one, or alibi_slopes.detach()"
)


class PerHead(NamedTuple):
    """As the caller has it."""

    sinks: Any = None
    alibi_slopes: Any = None


NONE = PerHead()


class Read(NamedTuple):
    """The same as arrays of the library that the operands are read in; of a DLPack library that is torch."""

    #: (Hq,), in the caller's dtype; of torch as autograd knows it.
    given: Array | None
    #: Whether torch is to give its gradient.
    grad: bool
    #: (Hq,) and (1 or B, Hq) as kernels take them: contiguous, in float32, or float64 where the operands are that.
    sinks: Array | None
    alibi_slopes: Array | None


def read(said: PerHead, query: Facts, heads: int, batch: int, *, autograd: bool) -> Read:
    """``said`` beside a query of so many heads and batch entries, or sequences.

    ``autograd`` says whether torch's is to know of it. Raises ``InvalidProblem``.
    """
    sinks, grad = taken(said.sinks, "sinks", query)
    slopes, slopes_grad = taken(said.alibi_slopes, "alibi_slopes", query)
    if sinks is not None and grad and not autograd:
        sinks, grad = sinks.detach(), False
    if slopes_grad and autograd:
        raise InvalidProblem(NO_SLOPES_GRADIENT)
    if sinks is not None:
        check_sinks(tuple(sinks.shape), heads)
    if slopes is not None:
        check_slopes(tuple(slopes.shape), heads, batch)
    wide, plain = as_floats(sinks, query), as_floats(slopes, query)
    if plain is not None and len(plain.shape) == 1:
        plain = plain[None]
    if query.device[0] == "cpu":  # elsewhere reading them would cost a synchronisation
        check_scores(wide)
        _check_numbers(plain, "alibi_slopes", "finite numbers", low=True)
    return Read(sinks, grad, wide, plain)


def taken(
    given: Any,
    role: str,
    query: Facts,
    kinds: tuple[type, ...] = (Sequence,),
    expected: str = "an array, or a list of numbers",
) -> tuple[Array | None, bool]:
    """``given`` as an array beside query, and whether its gradient is asked for.

    What is no array is of one of ``kinds``. Raises ``InvalidProblem``.
    """
    if given is None:
        return None, False
    if arrays.library_of(given):
        array, facts = arrays.take(given, role)
        check_beside(facts, role, query)
        if facts.dtype not in DTYPES:
            raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
        return array, facts.grad
    import numpy

    try:
        host = numpy.asarray(given) if isinstance(given, kinds) else numpy.asarray(None)
    except (RuntimeError, TypeError, ValueError):  # ragged, or of what is no number
        host = numpy.asarray(None)
    if host.dtype.kind not in "fiu":
        raise InvalidProblem(f"{role}={text_of(given)}: expected {expected}")
    return arrays.numbers_as_array(host, query.taken_as, query.device, "float64"), False


def check_sinks(shape: tuple[int, ...], heads: int) -> None:
    """Raises ``InvalidProblem`` where sinks are not one for each head."""
    if shape != (heads,):
        raise InvalidProblem(f"sinks has shape {shape}: expected ({heads},), one score for each query head")


def check_scores(sinks: Array | None) -> None:
    """Raises ``InvalidProblem`` where one of the sinks is no score: NaN or inf. They are read on the host."""
    _check_numbers(sinks, "sinks", "finite numbers, or -inf where a head has none", low=False)


def check_slopes(shape: tuple[int, ...], heads: int, batch: int) -> None:
    """Raises ``InvalidProblem`` where slopes of ALiBi are not one for each head, or each batch entry and head."""
    if shape not in ((heads,), (batch, heads)):
        raise InvalidProblem(
            f"alibi_slopes has shape {shape}: expected ({heads},) or ({batch}, {heads}), for each query head, or each"
            " batch entry and query head"
        )


def as_floats(array: Array | None, query: Facts) -> Array | None:
    """``array`` as kernels take it: contiguous, in float32, or float64 where query is that."""
    if array is None:
        return None
    kind, library = "float64" if query.dtype == "float64" else "float32", arrays.library_of(array)
    if library == "torch":
        return array.to(getattr(sys.modules["torch"], kind)).contiguous()
    with sys.modules["numpy"].errstate(over="ignore"):
        return sys.modules[library].ascontiguousarray(array, dtype=kind)


def _check_numbers(array: Array | None, role: str, expected: str, *, low: bool) -> None:
    """None is NaN or inf, nor -inf if ``low``."""
    for number in () if array is None else array.reshape(-1).tolist():
        if not (number < float("inf")) or (low and number == -float("inf")):
            raise InvalidProblem(f"{role} holds {number}: expected {expected}")
