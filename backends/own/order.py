"""The order of launches of a backward, and what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnswitch.machine.backend import Gradients, Inputs

__all__ = ["Backward", "Saved"]


class Saved(NamedTuple):
    """What the backward works on beside the inputs: dO, and for each row what ``prepare`` made of lse and dO.

    ``base`` and ``delta`` are (B, Hq, Lq padded to whole tiles), ``base`` twice that where a float mask is added. With
    ``varlen`` they are (1, Hq, rows of all sequences, each padded).
    """

    grad_out: Any
    base: Any
    delta: Any


@dataclass(frozen=True, slots=True)
class Backward:
    """Launches of a backward, in their order; None for a gradient that nobody asks for."""

    prepare: Callable[[Inputs, Any, Any, Any, Any], Saved]
    query: Callable[[Inputs, Saved], Any] | None = None
    #: Gives the gradients of key and value, either of which may be None.
    keys: Callable[[Inputs, Saved], tuple[Any, Any]] | None = None
    mask: Callable[[Inputs, Saved], Any] | None = None

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients from the output and lse that are given, and from the upstream gradients."""
        saved = self.prepare(inputs, out, lse, grad_out, grad_lse)
        query = None if self.query is None else self.query(inputs, saved)
        key, value = (None, None) if self.keys is None else self.keys(inputs, saved)
        mask = None if self.mask is None else self.mask(inputs, saved)
        return Gradients(query, key, value, mask)
