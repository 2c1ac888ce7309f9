"""Parts that splits of keys come to, and the launch that puts them together: ``src/portable/merge.cu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from . import memory
from .arguments import Arguments

__all__ = ["LAUNCH", "Merging", "alone", "of_parts"]

#: Microseconds that the launch takes, and bytes of parts, written and read, for each of them (an H200:
#: h200/tiles.json).
LAUNCH, _BYTES = 2.5, 1.2e6
#: Warps of a block, and splits up to which each of them has a part of a row to itself: so many bytes, STRETCH there.
_WARPS, _ALONE, _STRETCH = 8, 32, 32 * 16
#: Columns of usual heads at most, of which a block's shared memory has as many whatever the problem's.
_COLUMNS = 256


class Merging:
    """Of ``splits`` splits; ``folds`` says that their maxima are in the unit of the exponential.

    Where a part is of a tile of ``rows``, of whatever sequence, ``splits`` are all parts that there may be.
    """

    def __init__(self, p: Problem, splits: int, *, folds: bool, rows: int = 0) -> None:
        self._alone = alone(splits) or rows > 0
        self.variant = _variant(p, self._alone, folds, rows)
        self._splits, self._rows, self._dim, self._size = splits, rows, p.dim_v, _size(p)

    def blocks(self, inputs: Inputs) -> int:
        """Those of its launch."""
        lines = _lines(inputs)
        if not self._alone:
            return lines
        return arithmetic.tiles(lines * arithmetic.tiles(self._dim, _STRETCH // self._size), _WARPS)

    def parts(self, a: Arguments, inputs: Inputs, lse: Any) -> Any:
        """Memory for the parts, which ``a`` then points to: numerators, maxima and sums, of lse's type."""
        return self.parts_for(inputs)(a, lse)

    def parts_for(self, inputs: Inputs) -> Callable[[Arguments, Any], Any]:
        """The same for tensors of the shape of these."""
        lines = self._splits * (self._rows or _lines(inputs))
        numerators, told = lines * self._dim, 2 * _lines(inputs) if self._rows else 0

        def made(a: Arguments, lse: Any) -> Any:
            parts = memory.empty((numerators + 2 * lines + told,), lse)
            at = memory.address(parts)
            a.parts, a.sums = at, at + numerators * lse.itemsize
            return parts

        return made


def alone(splits: int) -> bool:
    """Whether a warp has a row or a part of it, and not a block: of many rows, as splits are few.

    By nothing but the splits, on whose number alone a sequence's bits may depend.
    """
    return splits <= _ALONE


def of_parts(problem: Problem) -> float:
    """Microseconds in which each of several splits writes its numerators, and a launch reads them."""
    return 2 * _size(problem) * problem.batch * problem.heads_q * problem.seq_q * problem.dim_v / _BYTES


def _size(problem: Problem) -> int:
    """Bytes of a numerator: float32, or float64 for float64."""
    return 8 if problem.dtype == "float64" else 4


def _lines(inputs: Inputs) -> int:
    """Rows of lse."""
    batch, heads, rows, _ = inputs.query.shape
    return int(batch * heads * rows)


@per_class
def _variant(p: Problem, alone: bool, folds: bool, rows: int) -> Variant:
    shared = 0 if alone else _WARPS * max(_COLUMNS, p.dim_v) * _size(p)
    flags = ("FOLD", int(folds)), ("SINKS", int(p.sinks)), ("ALONE", int(alone)), ("TOLD", rows)
    resident = 3 if rows else 2  # no registers spill: on Hopper, which alone has tiles of rows; on any GPU
    return Variant("merge", p.dtype, warps=_WARPS, shared=shared, resident=resident, flags=flags, varlen=p.varlen)
