"""Whether NaN and inf are looked for among the operands of a call, and looking for them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.errors import InvalidProblem

__all__ = ["checking", "finite", "looked_for", "tensors_are_finite", "when"]

_WHEN = ("cpu", "always", "never")
_chosen: ContextVar[str | None] = ContextVar("attnswitch_finite", default=None)


@contextlib.contextmanager
def checking(when: str) -> Iterator[None]:
    """Within the context, calls of this thread look for NaN and inf on the "cpu" only, "always" or "never"."""
    before = _chosen.set(when)
    try:
        yield
    finally:
        _chosen.reset(before)


def when() -> str:
    """When they are looked for here and now. Raises ``InvalidProblem`` for an ATTNSWITCH_CHECK_FINITE that is none."""
    return _chosen.get() or environment()


@functools.cache
def environment() -> str:
    """What ATTNSWITCH_CHECK_FINITE said when it was first asked: on the CPU, unless it says always or never."""
    said = os.environ.get("ATTNSWITCH_CHECK_FINITE", "cpu")
    if said not in _WHEN:
        raise InvalidProblem(f"ATTNSWITCH_CHECK_FINITE={said!r}: expected cpu, always or never")
    return said


def looked_for(when: str, kind: str) -> bool:
    """Whether that includes operands on a device of this kind: on a GPU looking costs a synchronisation."""
    return when == "always" or (when == "cpu" and kind == "cpu")


def finite(operands: tuple[Array, ...]) -> bool:
    """Whether no operand, of one library, holds NaN or inf."""
    library = arrays.library_of(operands[0])
    if library == "numpy":
        numpy: Any = sys.modules["numpy"]
        with numpy.errstate(all="ignore"):
            return all(
                bool(numpy.isfinite(numpy.sum(x, dtype=numpy.float64)) or numpy.isfinite(x).all()) for x in operands
            )
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        return tensors_are_finite(*(arrays.passage(x, library, "torch") for x in operands))


def tensors_are_finite(*tensors: Any) -> bool:
    """``finite`` of torch tensors. A sum that is finite proves that every term is: one pass, no temporary."""
    sums = [tensor.sum().item() for tensor in tensors]
    if all(map(math.isfinite, sums)):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
