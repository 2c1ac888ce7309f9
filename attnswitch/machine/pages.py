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
        """Rows ``begin`` to ``end``, (1, H, end - begin, D), as what they stand for. No other page is read."""
        library, page = arrays.library_of(self.cache), self.cache.shape[2]
        xp: Any = sys.modules[library]
        first = begin // page
        table, cache = self.table[first : -(-end // page)], self.cache
        begin, end = begin - first * page, end - first * page
        if end <= page:  # of a page longer than what is asked for, no more than that
            cache, begin, end = cache[:, :, begin:end], 0, end - begin
        if self.scales is None:
            rows = _picked(cache, table, library)
        else:
            bits = _picked(cache.view(xp.uint8), table, library)  # no library picks every type of 8 bits
            rows, scales = bits.view(self.cache.dtype), self.scales[table][:, None, :, None]
            wide = arrays.cast(rows, scales.dtype)
            with sys.modules["numpy"].errstate(all="ignore") if library == "numpy" else contextlib.nullcontext():
                rows = wide * scales
        return rows.reshape(-1, *rows.shape[2:])[begin:end].swapaxes(0, 1)[None]


def _picked(cache: Array, table: Array, library: str) -> Array:
    """The pages that ``table`` names, (M, page, H, D), which lie one after another."""
    cache = cache.swapaxes(1, 2)
    return cache.index_select(0, table) if library == "torch" else cache[table]
