"""A backward of either family as launches: laid out once for a problem, and given the arrays of every call."""

from __future__ import annotations

from typing import Any, NamedTuple

from attnswitch.machine.backend import Gradients, Inputs
from attnswitch.problem import DTYPES, Problem

from ..compiling.variant import Variant
from . import arguments, memory, run
from .arguments import Arguments, put
from .look import Look
from .tensor_maps import TensorMap

__all__ = ["BackwardLaunches", "Step", "turned"]


class Step(NamedTuple):
    """One launch of the backward: a kernel, its blocks, and how many heads run side by side.

    ``mapped``: it is passed ``BackwardLaunches.maps``. ``beside``: see ``run.start``. ``splits``: so many blocks share
    what one would do. ``awaited``: tiles of keys of each key head in the launch before, which are waited for alone.
    """

    variant: Variant
    blocks: int
    section: int
    mapped: bool = False
    beside: bool = False
    splits: int = 1
    awaited: int = 0


class BackwardLaunches:
    """A backward in several launches, and the memory between them.

    ``counts`` are the numbers, of lse's type, that lie in it: of base, of delta, of ``sums`` and of ``parts``, which
    families use as they like; each begins at a multiple of 16 bytes. ``least`` is how many bytes one copy of the
    gradient of the output moves at least.
    """

    def __init__(self, p: Problem, constants: Arguments, counts: tuple[int, int, int, int], least: int) -> None:
        self.constants = constants
        dims = zip("qkv", (p.dim_qk, p.dim_qk, p.dim_v), strict=True)
        #: Columns of the gradients of query, key and value, and the shape of the mask's; None where nobody asks for it.
        self.dims = tuple(dim if letter in p.grads else None for letter, dim in dims)
        self.mask_shape = p.mask_shape if "m" in p.grads else None
        size = 8 if p.dtype == "float64" else 4
        lying = [-(-n * size // 16) * 16 // size for n in counts]
        #: Numbers of the memory, and where in it base, delta, sums and parts begin, in bytes.
        self.space = sum(lying)
        self.begins = tuple(size * sum(lying[:n]) for n in range(len(lying)))
        self._dtype, self._bytes = p.dtype, least
        #: What is launched, in that order; before it, a look at a mask. If nothing is, all gradients are 0.
        self.steps: list[Step] = []
        self.look: Look | None = None
        #: Whether ``maps`` are of query, key, value, the output's gradient and the mask, or of all but the mask.
        self.maps_mask = False
        #: Whether gradients of key and value are filled with 0 first (``key_grid``).
        self.clears = False

    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""
        steps = tuple(step.variant for step in self.steps)
        return steps if self.look is None else (self.look.variant, *steps)

    def maps(self, *places: tuple[int, ...]) -> tuple[TensorMap, ...]:
        """Those that ``Step.mapped`` launches are passed, of operands at these places: ``maps_mask`` says of which."""
        return ()

    def readable(self, rows: Any) -> Any:
        """The output, or its gradient; or a dense copy where rows lie so that the kernels would read less at once.

        How they lie is no part of the problem, and each way would be one more kernel to compile.
        """
        return rows if memory.copied(memory.layout(rows), DTYPES[self._dtype]) >= self._bytes else memory.dense(rows)

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Launch it."""
        a = arguments.of_call(self.constants, inputs)
        out, grad_out = self.readable(out), self.readable(grad_out)
        put(a, Arguments.out.offset, out)
        put(a, Arguments.grad_out.offset, grad_out)
        lse, grad_lse = memory.contiguous(lse), memory.contiguous(grad_lse)
        a.lse, a.grad_lse = memory.address(lse), None if grad_lse is None else memory.address(grad_lse)
        space = memory.empty((self.space,), lse)
        a.base, a.delta, a.sums, a.parts = (memory.address(space) + begin for begin in self.begins)
        a.turned = turned(inputs)
        q, k, v = (
            None if dim is None else memory.like(operand, dim)
            for operand, dim in zip(inputs[:3], self.dims, strict=True)
        )
        grads = Gradients(q, k, v, self.mask_shape and memory.empty(self.mask_shape, inputs.attn_mask))
        a.grad_query, a.grad_key, a.grad_value, a.grad_mask = (
            None if grad is None else memory.address(grad) for grad in grads
        )
        if not self.steps:
            memory.clear(*grads)
            return grads
        if self.clears:
            memory.clear(*grads[1:3])
        looked = None if self.look is None else self.look(inputs.attn_mask, a)
        mapped = (*inputs[:3], grad_out, *((inputs.attn_mask,) if self.maps_mask else ()))
        maps = self.maps(*map(memory.place, mapped))
        for step in self.steps:
            a.section, a.splits, a.awaited = step.section, step.splits, step.awaited
            run.start(step.variant, step.blocks, a, lse, maps if step.mapped else (), beside=step.beside)
        del looked  # not before: what it points to is the next launch's from here on
        return grads


def turned(inputs: Inputs) -> int:
    """Bits of the gradients of query, key and value whose heads lie inside L, as those of their operands."""
    return sum(memory.turned(operand) << at for at, operand in enumerate(inputs[:3]))
