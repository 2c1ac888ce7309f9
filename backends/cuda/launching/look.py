"""``Look``: a launch before the others, which looks at a mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..compiling.variant import Variant
from .arguments import Arguments

__all__ = ["Look"]


class Look(ABC):
    """A launch before the others: it looks at a mask, and leaves what it finds in memory of its own."""

    variant: Variant

    @abstractmethod
    def __call__(self, mask: Any, a: Arguments) -> Any:
        """Launch it. Returns the memory that ``a`` then points to."""

    @abstractmethod
    def bound(self, mask: Any, index: int) -> Callable[[Arguments, int], Any]:
        """How to launch it on GPU ``index``, the current one, for masks that lie like this one.

        That takes arguments which say where the mask is, and the stream, and returns the memory that the arguments then
        point to, a tensor.
        """
