"""Sequences that lie one after another, each by a kernel of its own: for backends that do not take them at once.

It reads the offsets, so they have to be where the host reads them without waiting: on the CPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.errors import Unsupported
from attnswitch.machine import divergences, forms
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

__all__ = ["OneByOne", "asked", "compiled", "reasons"]

#: From the problem that one sequence is, and its number, to a kernel for it.
Make = Callable[[Problem, int], Kernel]
#: Kernels that are remembered; beyond, all are forgotten.
_MOST = 1024
#: The axis of an operand (1, H, T, D), or an lse (1, H, T), along which sequences follow one another.
_ROWS = 2


def asked(backend: Backend, problem: Problem) -> Problem:
    """What ``backend`` is asked about: ``problem``, or the longest sequence where it takes them one by one."""
    return _kinds(problem)[0] if _one_by_one(backend, problem) else problem


def reasons(backend: Backend, problem: Problem, device: Device) -> Iterator[str]:
    """Why ``backend`` does not take ``problem``, the cheapest to find out first.

    They are its own reasons, what it is known to get wrong, and what speaks against sequences one by one.
    """
    if not _one_by_one(backend, problem):
        yield from _own(backend, problem, device)
        return
    yield from _against(problem, device)
    told = set()
    for alone in _kinds(problem):
        for reason in _own(backend, alone, device):
            if reason not in told:
                told.add(reason)
                yield reason


def _own(backend: Backend, problem: Problem, device: Device) -> Iterator[str]:
    yield from forms.refused(backend, problem)
    said: Iterable[str] = backend.reasons(problem, device)
    yield from (said,) if isinstance(said, str) else map(str, said)
    yield from divergences.refused(backend, problem, device)


def _kinds(problem: Problem) -> tuple[Problem, ...]:
    """What sequences of ``problem`` may be, the longest first.

    Where positions count from the last query and key, one with as many queries as keys is plainly causal, and another
    is not: each goes another way.
    """
    p = problem
    longest = _alone(p, p.seq_q, p.seq_k)
    if not p.bottom_right:
        return (longest,)
    square = min(p.seq_q, p.seq_k)
    return (longest, _alone(p, square, square + 1), _alone(p, square, square))


def _one_by_one(backend: Backend, problem: Problem) -> bool:
    """Whether ``backend`` takes the sequences of ``problem`` each alone."""
    return problem.varlen and not backend.varlen


def _against(problem: Problem, device: Device) -> Iterator[str]:
    if device.kind != "cpu":
        yield f"varlen on {device.kind}: it takes sequences one by one, and the host does not know where they begin"
    if problem.seeded:
        yield "varlen with a seed: the dropout mask is a function of the sequence's number, which it is not told"


def compiled(backend: Backend, problem: Problem, device: Device, config: Config) -> Kernel:
    """The kernel of ``backend`` for ``problem``. Raises ``CompileError``."""
    if not _one_by_one(backend, problem):
        return backend.compile(problem, device, config)

    def make(alone: Problem, number: int) -> Kernel:
        for reason in _own(backend, alone, device):
            raise Unsupported(f"backend {backend.name!r} does not take sequence {number}, {alone}: {reason}")
        configs = {str(other): other for other in backend.configs(alone, device)}
        return backend.compile(alone, device, configs.get(str(config), next(iter(configs.values()))))

    return OneByOne(problem, make)


def _alone(problem: Problem, queries: int, keys: int) -> Problem:
    return problem.replace(batch=1, seq_q=queries, seq_k=keys, varlen=False)


class OneByOne(Kernel):
    """A kernel for each sequence. What lies past the last one gets 0, and an lse of -inf."""

    def __init__(self, problem: Problem, make: Make) -> None:
        self.problem, self._make = problem, make
        self._kernels: dict[tuple[int, int, int], Kernel] = {}

    def forward(self, inputs: Inputs) -> tuple[Array, Array | None]:
        """Output (1, Hq, T, Dv), and lse (1, Hq, T) where each gives one."""
        return self._of_each(inputs, lambda kernel, part: kernel.forward(part))

    def results(self, inputs: Inputs) -> tuple[Array, Array]:
        """Output and lse."""
        return self._of_each(inputs, lambda kernel, part: kernel.results(part))

    def backward(
        self, inputs: Inputs, out: Array | None, lse: Array | None, grad_out: Array, grad_lse: Array | None
    ) -> Gradients:
        """Gradients, one sequence after another."""
        queries = _sizes(inputs.offsets.query, inputs.query)  # type: ignore[union-attr]
        given = zip(*(_split(array, queries) for array in (out, lse, grad_out, grad_lse)), strict=True)
        parts = [
            kernel.backward(part, *results)
            for (kernel, part), results in zip(self._sequences(inputs), given, strict=False)
        ]
        query, key, value = (
            _joined([part[at] for part in parts], operand) if letter in self.problem.grads else None
            for at, (letter, operand) in enumerate(zip("qkv", inputs[:3], strict=True))
        )
        return Gradients(query, key, value, None)

    def _of_each(
        self, inputs: Inputs, run: Callable[[Kernel, Inputs], tuple[Array, Array | None]]
    ) -> tuple[Array, Array]:
        outs, lses = [], []
        for kernel, part in self._sequences(inputs):
            out, lse = run(kernel, part)
            outs.append(out)
            lses.append(lse)
        query, p = inputs.query, self.problem
        out = _joined(outs, query, p.dim_v)
        if not outs and arrays.library_of(query) == "torch":  # still a function of the operands
            out = out + sum(operand[..., :0].sum() for operand in inputs[:3])
        if any(lse is None for lse in lses):
            return out, None
        return out, _joined(lses, query, dtype="float64" if p.dtype == "float64" else "float32")

    def _sequences(self, inputs: Inputs) -> Iterator[tuple[Kernel, Inputs]]:
        """Each sequence: its kernel, and its part of the operands."""
        offsets = inputs.offsets
        assert offsets is not None
        queries, keys = _sizes(offsets.query, inputs.query), _sizes(offsets.key, inputs.key)
        operands = (_split(inputs.query, queries), _split(inputs.key, keys), _split(inputs.value, keys))
        for number, (query, key, value) in enumerate(zip(*operands, strict=True)):
            if number == len(queries) - 1:  # what lies past the last one
                break
            slopes = inputs.alibi_slopes
            if slopes is not None and slopes.shape[0] > 1:
                slopes = slopes[number : number + 1]
            part = Inputs(query, key, value, seed=inputs.seed, sinks=inputs.sinks, alibi_slopes=slopes)
            yield self._kernel(queries[number], keys[number], number), part

    def _kernel(self, queries: int, keys: int, number: int) -> Kernel:
        which = queries, keys, number if self.problem.seeded else 0
        if which not in self._kernels:
            if len(self._kernels) >= _MOST:
                self._kernels.clear()
            self._kernels[which] = self._make(_alone(self.problem, queries, keys), number)
        return self._kernels[which]


def _sizes(offsets: Array, operand: Array) -> list[int]:
    """Rows of each sequence, and of what lies past the last one."""
    edges = [*offsets.tolist(), operand.shape[_ROWS]]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def _split(array: Array | None, sizes: Sequence[int]) -> Sequence[Array | None]:
    if array is None:
        return [None] * len(sizes)
    if arrays.library_of(array) == "torch":  # whose autograd then adds up one gradient, not one a sequence
        return array.split(sizes, _ROWS)  # type: ignore[no-any-return]
    parts, begin = [], 0
    for size in sizes:
        parts.append(array[:, :, begin : begin + size])
        begin += size
    return parts


def _joined(parts: Sequence[Any], operand: Array, width: int | None = None, dtype: str = "") -> Array:
    """``parts`` and what lies past them, as many rows as ``operand`` has.

    They have ``width`` columns, or its own; with a ``dtype`` they are parts of an lse.
    """
    library = arrays.library_of(operand)
    xp: Any = sys.modules[library]
    _, heads, rows, own = operand.shape
    past = rows - sum(part.shape[_ROWS] for part in parts)
    shape = (1, heads, past) if dtype else (1, heads, past, width or own)
    kind = getattr(xp, dtype) if dtype else operand.dtype
    filled = -math.inf if dtype else 0.0
    rest = operand.new_full(shape, filled, dtype=kind) if library == "torch" else xp.full(shape, filled, kind)
    return (xp.cat if library == "torch" else xp.concatenate)([*parts, rest], _ROWS)
