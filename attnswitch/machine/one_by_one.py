"""Sequences of unlike lengths, each by a kernel of its own: for backends that do not take them at once.

They lie one after another, or have their keys in pages, which are gathered for one sequence at a time. Offsets and
lengths are read, so they have to be where the host reads them without waiting: on the CPU.
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
from attnswitch.machine import divergences, trees
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.machine.pages import Pages
from attnswitch.problem import Mask, Memory, Problem, cost

__all__ = ["OneByOne", "asked", "compiled", "extra_bytes", "reasons"]

#: From the problem that one sequence is, and its number, to a kernel for it.
Make = Callable[[Problem, int], Kernel]
#: Kernels that are remembered; beyond, all are forgotten.
_MOST = 1024
#: The axis of an operand (1, H, T, D), or an lse (1, H, T), along which sequences follow one another; and that of
#: (B, H, L, D), of queries whose keys lie in pages.
_ROWS, _BATCH = 2, 0


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
    if problem.cache and device.kind != "cpu":  # of rows that nobody gathers there is nothing to say
        return
    told = set()
    for reason in itertools.chain(
        _unsaid(backend, problem), *(_own(backend, alone, device) for alone in _kinds(problem))
    ):
        if reason not in told:
            told.add(reason)
            yield reason


def extra_bytes(backend: Backend, problem: Problem, device: Device) -> int:
    """Bytes beside operands and results that ``backend`` holds at its peak, gathered keys and values included."""
    alone = asked(backend, problem)
    if alone is problem:
        return backend.extra_bytes(problem, device)
    gathered = cost.kv_bytes(alone) if problem.page else 0
    return backend.extra_bytes(alone, device) + gathered + trees.mask_bytes(problem)


def _own(backend: Backend, problem: Problem, device: Device) -> Iterator[str]:
    yield from _unsaid(backend, problem)
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
    return (problem.varlen and not backend.varlen) or (problem.page > 0 and not backend.paged)


def _against(problem: Problem, device: Device) -> Iterator[str]:
    if device.kind != "cpu" and problem.page:
        yield f"page={problem.page} on {device.kind}: it takes keys that lie one after another, not in pages"
    elif device.kind != "cpu":
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
    """One sequence; of a cache of 8 bits in the type in which its numbers are exact to rounding.

    A tree is a mask.
    """
    p = problem
    lengths, mask = p.key_lengths and not p.page, Mask("bool", "qk") if p.tree else p.mask
    alone = p.dense(key_lengths=lengths, mask=mask)
    if p.cache:
        dtype = "float64" if p.dtype == "float64" else "float32"
        # Once they are gathered they lie plainly; but a cache that runs backwards has to become torch's before that.
        lie = (Memory(negative=memory.negative) for memory in (p.key, p.value))
        alone = alone.replace(dtype=dtype, **dict(zip(("key", "value"), lie, strict=True)))
    return alone.replace(batch=1, seq_q=queries, seq_k=keys)


class OneByOne(Kernel):
    """A kernel for each sequence. What lies past the last one gets 0, and an lse of -inf.

    Keys in pages are gathered before, unless kernels do so themselves (``paged``): then key and value are ``Pages``.
    Those of 8 bits stand for numbers of no 16-bit type: queries are widened too, and the output is rounded once.
    """

    def __init__(self, problem: Problem, make: Make, *, paged: bool = False) -> None:
        self.problem, self._make, self._paged = problem, make, paged
        self._axis = _ROWS if problem.varlen else _BATCH
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
        out = _joined(outs, query, p.dim_v, axis=self._axis)
        if not outs and not p.page and arrays.library_of(query) == "torch":  # still a function of the operands
            out = out + sum(operand[..., :0].sum() for operand in inputs[:3])
        if p.cache:
            out = arrays.cast(out, query.dtype)
        if any(lse is None for lse in lses):
            return out, None
        return out, _joined(lses, query, dtype="float64" if p.dtype == "float64" else "float32", axis=self._axis)

    def _sequences(self, inputs: Inputs) -> Iterator[tuple[Kernel, Inputs]]:
        """Each sequence: its kernel, and its part of the operands."""
        sizes = [1] * self.problem.batch
        if self.problem.varlen:
            assert inputs.offsets is not None
            sizes = _sizes(inputs.offsets.query, inputs.query)
        keys = self._in_pages(inputs) if self.problem.page else self._in_rows(inputs)
        # What lies past the last sequence has no keys.
        bits = _split(inputs.tree_mask, sizes, 1 if self.problem.varlen else _BATCH)
        for number, (query, of_tree, (length, part)) in enumerate(
            zip(_split(inputs.query, sizes, self._axis), bits, keys, strict=False)
        ):
            if self.problem.cache:
                query = arrays.cast(query, inputs.key_scale.dtype)  # type: ignore[union-attr]
            if of_tree is not None:
                part = part._replace(attn_mask=trees.as_mask(of_tree, length))
            yield self._kernel(query.shape[_ROWS], length, number), part._replace(query=query)

    def _in_rows(self, inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
        """How many keys each sequence has, and them."""
        assert inputs.offsets is not None
        sizes = _sizes(inputs.offsets.key, inputs.key)
        operands = zip(sizes[:-1], _split(inputs.key, sizes), _split(inputs.value, sizes), strict=False)
        for number, (size, key, value) in enumerate(operands):
            heads = {"sinks": inputs.sinks, "alibi_slopes": _slopes(inputs, number)}
            yield size, Inputs(None, key, value, seed=inputs.seed, **heads)

    def _in_pages(self, inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
        """The same of those in pages."""
        assert inputs.key_lengths is not None
        assert inputs.block_table is not None
        tables = zip(inputs.key_lengths.tolist(), inputs.block_table, strict=True)
        for number, (length, table) in enumerate(tables):
            caches = (inputs.key, inputs.key_scale), (inputs.value, inputs.value_scale)
            parts = (Pages(cache, table, scales) for cache, scales in caches)
            key, value = parts if self._paged else (part.rows(0, length) for part in parts)
            yield length, Inputs(None, key, value, sinks=inputs.sinks, alibi_slopes=_slopes(inputs, number))

    def _kernel(self, queries: int, keys: int, number: int) -> Kernel:
        which = queries, keys, number if self.problem.seeded else 0
        if which not in self._kernels:
            if len(self._kernels) >= _MOST:
                self._kernels.clear()
            self._kernels[which] = self._make(_alone(self.problem, queries, keys), number)
        return self._kernels[which]


def _slopes(inputs: Inputs, number: int) -> Array | None:
    """Those of one sequence."""
    slopes = inputs.alibi_slopes
    return slopes if slopes is None or slopes.shape[0] == 1 else slopes[number : number + 1]


def _sizes(offsets: Array, operand: Array) -> list[int]:
    """Rows of each sequence, and of what lies past the last one."""
    edges = [*offsets.tolist(), operand.shape[_ROWS]]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def _split(array: Array | None, sizes: Sequence[int], axis: int = _ROWS) -> Sequence[Any]:
    if array is None:
        return [None] * len(sizes)
    if arrays.library_of(array) == "torch":  # whose autograd then adds up one gradient, not one a sequence
        return array.split(sizes, axis)  # type: ignore[no-any-return]
    parts, begin = [], 0
    for size in sizes:
        parts.append(array[(slice(None),) * axis + (slice(begin, begin + size),)])
        begin += size
    return parts


def _joined(
    parts: Sequence[Any], operand: Array, width: int | None = None, dtype: str = "", axis: int = _ROWS
) -> Array:
    """``parts`` along ``axis`` and what lies past them, as much as ``operand`` has.

    They have ``width`` columns, or its own; with a ``dtype`` they are parts of an lse.
    """
    library = arrays.library_of(operand)
    xp: Any = sys.modules[library]
    shape = [*operand.shape[:3]] if dtype else [*operand.shape[:3], width or operand.shape[3]]
    shape[axis] -= sum(part.shape[axis] for part in parts)
    kind = getattr(xp, dtype) if dtype else operand.dtype
    filled = -math.inf if dtype else 0.0
    rest = operand.new_full(shape, filled, dtype=kind) if library == "torch" else xp.full(shape, filled, kind)
    return (xp.cat if library == "torch" else xp.concatenate)([*parts, rest], axis)


def _unsaid(backend: Backend, problem: Problem) -> Iterator[str]:
    """Forms of a call that a backend has to say it takes: one that knows nothing of them would compute without them."""
    if problem.sinks and not backend.sinks:
        yield "sinks: its kernels know of none"
    if problem.alibi and not backend.alibi:
        yield "alibi_slopes: it adds nothing that depends on the distance"
    if problem.cache and backend.paged and problem.cache not in backend.caches:
        yield f"cache={problem.cache}: its kernels read pages of query's dtype"
    if problem.tree and backend.paged and not backend.trees:
        yield "tree_mask: its kernels read no mask beside pages"
    if problem.splits and not backend.splits:
        yield f"num_splits={problem.splits}: how it divides the keys of a sequence may depend on the batch"
