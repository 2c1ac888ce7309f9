"""A forward of either family as launches: laid out once for a problem, and given the arrays of every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from attnswitch.machine.backend import Inputs

from ..compiling.variant import Variant
from .arguments import Arguments

__all__ = ["ForwardLaunches"]


class ForwardLaunches(ABC):
    """A forward in one launch or two, as all who launch it know it."""

    #: What every call passes.
    constants: Arguments
    #: The kernel that computes, and its blocks.
    variant: Variant
    blocks: int
    #: Whether an lse is written, be it asked for or not.
    needs_lse: bool = False

    @abstractmethod
    def variants(self) -> tuple[Variant, ...]:
        """What is launched, in that order."""

    @abstractmethod
    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""

    @abstractmethod
    def bound(self, inputs: Inputs, index: int) -> Callable[[Arguments, Any, Any, int], None]:
        """How to launch it on GPU ``index``, the current one, for tensors that lie like ``inputs``.

        That takes arguments which say where all arrays are, the addresses of query, key and value, output or lse, and
        the stream.
        """
