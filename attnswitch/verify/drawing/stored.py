"""Keys and values as a cache of 8 bits stores them, and the scales of its pages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from attnswitch.arrays import Array
from attnswitch.verify.drawing.case import Case

__all__ = ["DTYPES", "SCALE_KINDS", "elements", "passed", "stored"]

#: Whether there is one scale, one of each head, of each page, or of each page and head.
SCALE_KINDS = ("tensor", "head", "page", "page-head")
DTYPES: dict[str, Any] = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
#: The largest number of each type.
_MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def stored(case: Case, x: Array, u: Array) -> tuple[Array, Array]:
    """What ``x`` (B, H, L, D) becomes by being stored, and the scales (B, H, L / page) of its pages: float32 numbers.

    ``u`` (H, L / page) from [0, 1) says how far each scale is above the least that has room for all of ``x``: up to
    twice, so that no two pages or heads are alike. The products are exact in float64.
    """
    room = (float(abs(x).max(initial=0.0)) or 1.0) / _MOST[case.cache] * (1.0 + 2.0**-20)
    first = {"tensor": u[:1, :1], "head": u[:, :1], "page": u[:1], "page-head": u}[case.scales]
    scales = np.broadcast_to((room * (1.0 + first)).astype(np.float32).astype(np.float64), (x.shape[0], *u.shape))
    of_rows = np.repeat(scales, case.page, 2)[..., None]
    return elements(x / of_rows, case.cache).astype(np.float64) * of_rows, scales


def elements(x: Array, dtype: str) -> Array:
    """``x`` rounded to what the type has. Numbers beyond its range become the largest, and NaN what stands for it."""
    most = _MOST[dtype]
    within = np.clip(x, -most, most)
    if dtype == "int8":
        return np.rint(np.nan_to_num(within, nan=-128.0)).astype(np.int8)
    return within.astype(DTYPES[dtype])


def passed(kind: str, scales: Array) -> Array:
    """The scales (P, H) of all pages as a caller passes them who has one of each ``kind``."""
    if kind == "tensor":
        return scales[0, 0] if scales.size else np.float64(1.0)
    return {"head": scales[0] if len(scales) else np.ones(scales.shape[1]), "page": scales[:, :1]}.get(kind, scales)
