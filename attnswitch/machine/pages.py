"""Keys or values of one sequence in the pages of a cache."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array

__all__ = ["Pages"]


class Pages(NamedTuple):
    """Where they are: ``cache`` (P, H, page, D), and the pages that ``table`` (M,) names in their order.

    Both are arrays of NumPy, CuPy or torch, side by side.
    """

    cache: Array
    table: Array

    def rows(self, begin: int, end: int) -> Array:
        """Rows ``begin`` to ``end``, (1, H, end - begin, D). Nothing else is read of either array."""
        library = arrays.library_of(self.cache)
        xp: Any = sys.modules[library]
        at = xp.arange(begin, end, **({"device": self.cache.device} if library == "torch" else {}))
        page = self.cache.shape[2]
        return self.cache[self.table[at // page], :, at % page].swapaxes(0, 1)[None]
