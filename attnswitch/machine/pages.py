"""Keys or values of one sequence in the pages of a cache, of 8 bits or more."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array

__all__ = ["Pages"]


class Pages(NamedTuple):
    """Where they are: ``cache`` (P, H, page, D), and the pages that ``table`` (M,) names in their order.

    Of a cache of 8 bits ``scales`` (P, H) say what an element stands for: itself times the scale, in the scale's dtype.
    All are arrays of NumPy, CuPy or torch, side by side.
    """

    cache: Array
    table: Array
    scales: Array | None = None

    def rows(self, begin: int, end: int) -> Array:
        """Rows ``begin`` to ``end``, (1, H, end - begin, D), as what they stand for. Nothing else is read."""
        library = arrays.library_of(self.cache)
        xp: Any = sys.modules[library]
        at = xp.arange(begin, end, **({"device": self.cache.device} if library == "torch" else {}))
        page = self.cache.shape[2]
        pages = self.table[at // page]
        if self.scales is None:
            return self.cache[pages, :, at % page].swapaxes(0, 1)[None]
        bits = self.cache.view(xp.uint8)  # no library picks elements of every type of 8 bits
        rows, scales = bits[pages, :, at % page].view(self.cache.dtype), self.scales[pages][..., None]
        wide = rows.to(scales.dtype) if library == "torch" else rows.astype(scales.dtype)
        with sys.modules["numpy"].errstate(all="ignore") if library == "numpy" else contextlib.nullcontext():
            return (wide * scales).swapaxes(0, 1)[None]
