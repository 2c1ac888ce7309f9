"""Parts that splits of keys come to, and the launch that puts them together: ``src/portable/merge.cu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import memory
from ..launching.arguments import Arguments
from . import tiles, variants

__all__ = ["Merging"]


class Merging:
    """Of ``splits`` splits; ``folds`` says that their maxima are in the unit of the exponential."""

    def __init__(self, p: Problem, splits: int, *, folds: bool) -> None:
        self.variant = _variant(p, tiles.merges_alone(splits), folds)
        self._p, self._splits = p, splits

    def blocks(self, inputs: Inputs) -> int:
        """Those of its launch."""
        return tiles.merging_blocks(self._p, self._splits, _lines(inputs))

    def parts(self, a: Arguments, inputs: Inputs, lse: Any) -> Any:
        """Memory for the parts, which ``a`` then points to: numerators, maxima and sums, of lse's type."""
        numerators, size = self._numbers(inputs)
        parts = memory.empty((size,), lse)
        at = memory.address(parts)
        a.parts, a.sums = at, at + numerators * lse.itemsize
        return parts

    def parts_for(self, inputs: Inputs) -> Callable[[Arguments, Any], Any]:
        """The same for torch tensors of the shape of these, on the GPU that is the current one then."""
        numerators, size = self._numbers(inputs)
        empty = memory.allocator(inputs.query)

        def made(a: Arguments, lse: Any) -> Any:
            parts = empty((size,), (1,), lse.dtype)
            at = parts.data_ptr()
            a.parts, a.sums = at, at + numerators * lse.itemsize
            return parts

        return made

    def _numbers(self, inputs: Inputs) -> tuple[int, int]:
        """Those of the numerators, and of all."""
        lines = self._splits * _lines(inputs)
        return lines * self._p.dim_v, lines * (self._p.dim_v + 2)


def _lines(inputs: Inputs) -> int:
    """Rows of lse."""
    batch, heads, rows, _ = inputs.query.shape
    return int(batch * heads * rows)


@per_class
def _variant(p: Problem, alone: bool, folds: bool) -> Variant:
    plain = variants.of_rows(p, "merge", folds)
    flags = (*plain.flags, ("SINKS", int(p.sinks)), ("ALONE", int(alone)))
    return plain._replace(warps=tiles.MERGING_WARPS, shared=0 if alone else tiles.merging_shared(p), flags=flags)
