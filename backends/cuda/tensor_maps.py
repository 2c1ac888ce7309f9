"""Tensor maps, by which TMA knows an operand: encoded by the driver, and kept for as long as they are asked for."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from attnswitch.problem import DTYPES

from . import memory

__all__ = ["COLUMNS", "TensorMap", "encoded", "of"]

#: Columns that a load brings, the span of the swizzle: PANEL of ``src/hopper/tma.cuh``.
COLUMNS = 64
#: A CUtensorMap, passed by value.
_BY_VALUE = np.dtype("V128")


class TensorMap(NamedTuple):
    """An operand (batch, heads, rows, columns) of which a load brings ``box`` rows of one head; strides in bytes.

    It says all that the encoded map depends on, and nothing else.
    """

    dtype: str
    address: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: int


def of(array: Any, box: int) -> TensorMap:
    """The tensor map of ``array``. What the strides of axes of length 1 are means nothing, and may be no legal one."""
    dtype = memory.dtype_name(array)
    address, *steps = memory.place(array)
    b, h, rows, columns = array.shape
    size = DTYPES[dtype]
    line = -(-columns * size // 16) * 16
    by_batch, by_head, by_row = (
        line if length == 1 else step * size for length, step in zip((b, h, rows), steps, strict=False)
    )
    return TensorMap(dtype, address, (b, h, rows, columns), (by_batch, by_head, by_row), box)


@functools.lru_cache(maxsize=4096)
def encoded(tensor_map: TensorMap) -> np.ndarray[Any, Any]:
    """As a launch passes it, an array of one element of 128 bytes. Raises ``RuntimeError`` if the driver refuses it."""
    from cuda.bindings import driver

    m = tensor_map
    kind = "BFLOAT16" if m.dtype == "bfloat16" else "FLOAT16"
    error, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        4,
        m.address,
        [driver.cuuint64_t(length) for length in reversed(m.shape)],
        [driver.cuuint64_t(stride) for stride in reversed(m.strides)],
        [driver.cuuint32_t(length) for length in (COLUMNS, m.box, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # 0, and no NaN
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver does not encode {m}: {error.name}")
    return np.frombuffer(ctypes.string_at(made.getPtr(), _BY_VALUE.itemsize), _BY_VALUE)
