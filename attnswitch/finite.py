"""Whether NaN and inf are looked for among the operands of a call, and looking for them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.errors import InvalidProblem
from attnswitch.problem import Problem

__all__ = ["checking", "chosen", "finite", "look", "looked_for", "shows", "when"]

#: Whether query, key and value hold neither NaN nor inf.
Look = Callable[[Any, Any, Any], bool]
_WHEN = ("cpu", "always", "never")
#: Elements of an operand up to which a temporary of its size costs less than two more calls.
_SMALL = 2**14
#: Up to which comparing, an element at a time, does as well.
_TINY = 2**10
#: Numbers up to which a list of them is faster than a call of torch.
_FEW = 48
_chosen: ContextVar[str | None] = ContextVar("attnswitch_finite", default=None)
#: What the context says of it, if anything.
chosen = _chosen.get


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


def finite(problem: Problem, kind: str, operands: tuple[Array, ...]) -> bool:
    """Whether query, key and value of ``problem`` are free of NaN and inf that a kernel could lose or let leak.

    On the CPU value is not looked at where nothing is hidden: all of it is weighted and summed, NaN and inf included.
    """
    looked_at = operands if _value_matters(problem, kind) else operands[:2]
    library = arrays.library_of(operands[0])
    if library == "numpy":
        numpy: Any = sys.modules["numpy"]
        with numpy.errstate(all="ignore"):
            return all(
                bool(numpy.isfinite(numpy.sum(x, dtype=numpy.float64)) or numpy.isfinite(x).all()) for x in looked_at
            )
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        return _one_by_one(*(arrays.passage(x, library, "torch") for x in looked_at))


def look(problem: Problem, kind: str) -> Look:
    """``finite`` of the torch tensors of ``problem``, in as few calls as can be."""
    p = problem
    elements = p.batch * p.heads_q * p.seq_q * p.dim_qk
    alike = (p.heads_q, p.seq_q) == (p.heads_kv, p.seq_k)
    if _value_matters(p, kind):
        found = _all_at_once if alike and p.dim_qk == p.dim_v and elements <= _SMALL else _one_by_one
    else:
        found = _two_at_once if alike and elements <= _TINY else _two
    return _beside_autograd(found) if p.grads else found


def shows(problem: Problem) -> Callable[[Any], bool]:
    """Whether 0, NaN or inf is in an lse (B, Hq, Lq) of ``problem``, a dense tensor on the CPU."""
    rows = problem.batch * problem.heads_q * problem.seq_q
    number = ctypes.c_double if problem.dtype == "float64" else ctypes.c_float
    return _shown_by_few((number * rows).from_address) if rows <= _FEW else _shown_by_many()


def _shown_by_few(at: Callable[[int], Any]) -> Callable[[Any], bool]:
    def shown(lse: Any) -> bool:
        numbers = at(lse.data_ptr())[:]
        return 0.0 in numbers or not math.isfinite(sum(numbers))

    return shown


def _shown_by_many() -> Callable[[Any], bool]:
    ones: Any = None

    def shown(lse: Any) -> bool:
        nonlocal ones
        if ones is None:
            ones = sys.modules["torch"].ones_like(lse)
        return not lse.div(lse).equal(ones)

    return shown


def _value_matters(problem: Problem, kind: str) -> bool:
    """Whether a value may be weighted with 0 that is no weight of its score; GPUs were not tried without."""
    p = problem
    hides = p.mask is not None or p.key_lengths or p.dropout > 0.0 or (p.positional and not p.sees_all)
    return hides or kind != "cpu"


def _all_at_once(query: Any, key: Any, value: Any) -> bool:
    """One call costs more than a pass: a product or a sum with NaN or inf is either."""
    return math.isfinite(query.addcmul(key, value).sum().item()) or _one_by_one(query, key, value)


def _two_at_once(query: Any, key: Any, _: Any) -> bool:
    """What is between query and itself, by key, is query or NaN, which equals nothing."""
    return query.lerp(query, key).equal(query)  # type: ignore[no-any-return]


def _two(query: Any, key: Any, _: Any) -> bool:
    return _one_by_one(query, key)


def _one_by_one(*operands: Any) -> bool:
    """A pass each, and no temporary: a sum that is finite proves that every term is."""
    if all(math.isfinite(operand.sum().item()) for operand in operands):
        return True
    return all(bool(operand.isfinite().all()) for operand in operands)


def _beside_autograd(look: Look) -> Look:
    """``look``, of which autograd takes no note; ``no_grad`` would take as long as the look itself."""
    torch: Any = sys.modules["torch"]
    switch = torch._C._set_grad_enabled

    def found(query: Any, key: Any, value: Any) -> bool:
        switch(False)
        try:
            return look(query, key, value)
        finally:
            switch(True)  # as it is wherever a problem has gradients

    return found
