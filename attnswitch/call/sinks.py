"""The gradient of sinks, of which kernels know nothing: it follows from the results."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array

__all__ = ["gradient", "written_out"]


def gradient(sinks: Array, out: Array, lse: Array, grad_out: Array | None, grad_lse: Array | None) -> Array:
    """Gradient of ``sinks`` (Hq,), in their dtype, from out (B, Hq, L, Dv) and lse (B, Hq, L), which count them."""
    xp: Any = sys.modules[arrays.library_of(lse)]
    with xp.errstate(all="ignore") if hasattr(xp, "errstate") else contextlib.nullcontext():
        return written_out(xp, sinks, out, lse, grad_out, grad_lse)


def written_out(xp: Any, sinks: Array, out: Array, lse: Array, grad_out: Array | None, grad_lse: Array | None) -> Array:
    """The same in functions of the library ``xp``; written to be traced.

    A sink is a key whose value is 0: its dS is P * (dlse - rowsum(dO * O)), with P = exp(sink - lse).
    """
    none = lse == -xp.inf  # rows without a sink or a key, and of no sequence, whose gradient may be anything
    scores = arrays.cast(sinks, lse.dtype)[:, None] - lse
    slope = xp.zeros_like(lse) if grad_lse is None else arrays.cast(grad_lse, lse.dtype)
    if grad_out is not None:
        slope = slope - (arrays.cast(grad_out, lse.dtype) * out).sum(-1)
    terms = xp.where(none, xp.zeros_like(lse), xp.exp(scores) * slope)
    return arrays.cast(terms.sum((0, 2)), sinks.dtype)
