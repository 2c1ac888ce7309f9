"""Whether NaN, inf and numbers that overflow are looked for among the operands of a call, and looking for them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Shows
from attnswitch.names import one_of
from attnswitch.problem import Problem

__all__ = ["Look", "checking", "finite", "look_of", "looked_for", "of_context", "shown", "shows", "when"]

#: Whether query, key and value hold nothing that a kernel could lose or let leak.
Look = Callable[[Any, Any, Any], bool]
_WHEN = ("cpu", "always", "never")
#: Elements of an operand up to which comparing, an element at a time, costs less than another call.
_TINY = 2**10
#: The largest number of float32, in which all types but float64 are summed.
_LARGEST = 2.0**128 - 2.0**104
#: Numbers up to which a list of them is faster than a call of torch.
_FEW = 48
_chosen: ContextVar[str | None] = ContextVar("attnswitch_finite", default=None)
#: What the context says of it, if anything.
of_context = _chosen.get


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
    return _chosen.get() or of_process()


@functools.cache
def of_process() -> str:
    """What ATTNSWITCH_CHECK_FINITE said when it was first asked: on the CPU, unless it says always or never."""
    said = os.environ.get("ATTNSWITCH_CHECK_FINITE", "cpu")
    if said not in _WHEN:
        raise InvalidProblem(f"ATTNSWITCH_CHECK_FINITE={said!r}: {one_of(said, _WHEN)}")
    return said


def looked_for(when: str, kind: str) -> bool:
    """Whether that includes operands on a device of this kind: on a GPU looking costs a synchronisation."""
    return when == "always" or (when == "cpu" and kind == "cpu")


def finite(problem: Problem, kind: str, operands: tuple[Array, ...]) -> bool:
    """Whether query, key and value of ``problem`` are free of what a kernel could lose or let leak."""
    return look_of(problem, kind, arrays.library_of(operands[0]))(*operands)


def look_of(problem: Problem, kind: str, library: str = "torch") -> Look:
    """What finds out whether query, key and value of ``problem`` are free of what a kernel could lose or let leak.

    That is NaN, inf and, where something is hidden, numbers so large that a product with them overflows: hidden, they
    make inf - inf of a score, or 0 * inf of a gradient. On the CPU value is not looked at where nothing is hidden: all
    of it is weighted and summed, NaN and inf included.
    """
    p, hides = problem, _hides(problem, kind)
    if _empty(p):
        return lambda *_: True
    if library == "numpy":
        return _in_numpy(_limit(p)) if hides else _in_numpy(math.inf, 2)
    found: Look = _two
    if hides:
        found = _within(_limit(p))
    elif (p.heads_q, p.seq_q) == (p.heads_kv, p.seq_k) and p.batch * p.heads_q * p.seq_q * p.dim_qk <= _TINY:
        found = _two_at_once
    if p.grads:
        found = _beside_autograd(found)
    if library == "cupy":
        return lambda *operands: found(*(arrays.passage(operand, "cupy", "torch") for operand in operands))
    return found


def shown(problem: Problem, where: Shows) -> Callable[[Any, Any], bool]:
    """Whether output or lse of a forward on the CPU show that the operands have to be looked at."""
    if _empty(problem):
        return lambda out, lse: True
    in_lse = shows(problem)
    if where is Shows.OUTPUT:
        return lambda out, lse: _nan(out)
    if where is Shows.LSE:
        return lambda out, lse: lse is None or in_lse(lse)
    return lambda out, lse: lse is None or in_lse(lse) or _nan(out)


def _nan(out: Any) -> bool:
    """The least of numbers is NaN where one of them is."""
    least: float = out.min().item()
    return least != least


def shows(problem: Problem) -> Callable[[Any], bool]:
    """Whether 0, NaN or inf is in an lse (B, Hq, Lq) of ``problem``, a dense tensor on the CPU."""
    rows = problem.batch * problem.heads_q * problem.seq_q
    if rows > _FEW:
        return lambda lse: not (bool(lse.isfinite().all()) and bool(lse.all()))
    import ctypes  # slow to import

    at = ((ctypes.c_double if problem.dtype == "float64" else ctypes.c_float) * rows).from_address

    def shown(lse: Any) -> bool:
        address = lse.data_ptr()
        if not address:  # of a mode of torch that computes nothing
            return True
        numbers = at(address)[:]
        return 0.0 in numbers or not math.isfinite(sum(numbers))

    return shown


def _hides(problem: Problem, kind: str) -> bool:
    """Whether a value may be weighted with 0 that is no weight of its score; GPUs were not tried without."""
    p = problem
    hides = p.mask is not None or p.key_lengths or p.dropout > 0.0 or p.hides_by_position
    return hides or p.varlen or kind != "cpu"


def _limit(problem: Problem) -> float:
    """Up to where numbers make no product of two rows that overflows, with the scale or without."""
    largest = sys.float_info.max if problem.dtype == "float64" else _LARGEST
    return math.sqrt(largest / max(problem.dim_qk, problem.dim_v) / max(1.0, abs(problem.softmax_scale)))


def _in_numpy(limit: float, count: int = 3) -> Look:
    """Whether every number of the first ``count`` operands is within ``limit``."""
    numpy: Any = sys.modules["numpy"]

    def found(*operands: Any) -> bool:
        with numpy.errstate(all="ignore"):
            return all(-limit < x.min() and x.max() < limit for x in operands[:count])

    return found


def _within(limit: float) -> Look:
    """Whether every number is: NaN, which is the least and the greatest where it is, is not."""

    def found(*operands: Any) -> bool:
        for operand in operands:
            least, greatest = _dense(operand).aminmax()
            if not (-limit < least.item() and greatest.item() < limit):
                return False
        return True

    return found


def _dense(operand: Any) -> Any:
    """Its elements, each once, in the order of memory, where the pass over them would else take ten times as long."""
    if operand.is_contiguous():
        return operand
    strides = operand.stride()
    for axis, stride in enumerate(strides):
        if stride == 0:
            operand = operand.narrow(axis, 0, 1)
    return operand.permute(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _empty(problem: Problem) -> bool:
    return not (problem.batch and problem.seq_q and problem.seq_k)


def _two_at_once(query: Any, key: Any, _: Any) -> bool:
    """``lerp(q, q, k)`` is q, unless q or k is not finite: then it is NaN, which never compares equal."""
    return query.lerp(query, key).equal(query)  # type: ignore[no-any-return]


def _two(query: Any, key: Any, _: Any) -> bool:
    """A pass each, and no temporary: a sum that is finite proves that every term is."""
    if math.isfinite(query.sum().item()) and math.isfinite(key.sum().item()):
        return True
    return bool(query.isfinite().all()) and bool(key.isfinite().all())


def _beside_autograd(look: Look) -> Look:
    """``look``, of which autograd takes no note; ``no_grad`` would take as long as the look itself."""
    torch: Any = importlib.import_module("torch")
    switch = torch._C._set_grad_enabled

    def found(query: Any, key: Any, value: Any) -> bool:
        before = torch.is_grad_enabled()  # gradients may be asked for without autograd
        switch(False)
        try:
            return look(query, key, value)
        finally:
            switch(before)

    return found
