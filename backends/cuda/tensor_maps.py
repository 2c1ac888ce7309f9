"""Tensor maps, by which TMA knows an operand: encoded by the driver once, and kept by address, shape and strides."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnswitch.problem import DTYPES

__all__ = ["COLUMNS", "TensorMap", "tensor_map"]

#: Columns that a load brings, the span of the swizzle: PANEL of ``src/hopper/tma.cuh``.
COLUMNS = 64
#: A CUtensorMap.
_BY_VALUE = np.dtype("V128")
#: Maps that are kept: buffers take turns, and a graph holds its own copies.
_KEPT = 768


@dataclass(frozen=True)
class TensorMap:
    """An operand (batch, heads, rows, columns) of which a load brings ``box`` rows of one head; strides in bytes.

    It says all that the encoded map depends on, and nothing else.
    """

    dtype: str
    address: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: int

    @functools.cached_property
    def encoded(self) -> np.ndarray[Any, Any]:
        """An array of one element of 128 bytes. Raises ``RuntimeError`` if it is refused."""
        from cuda.bindings import driver

        kinds, ones, rest = _constants()
        error, encoded = driver.cuTensorMapEncodeTiled(
            kinds[self.dtype],
            4,
            self.address,
            [driver.cuuint64_t(length) for length in reversed(self.shape)],
            [driver.cuuint64_t(stride) for stride in reversed(self.strides)],
            [driver.cuuint32_t(COLUMNS), driver.cuuint32_t(self.box), *ones[2:]],
            ones,
            *rest,
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver does not encode {self}: {error.name}")
        return np.frombuffer(ctypes.string_at(encoded.getPtr(), _BY_VALUE.itemsize), _BY_VALUE)

    @functools.cached_property
    def pointer(self) -> int:
        """Where the encoded map is, as a launch passes it. Raises as ``encoded`` does."""
        return int(self.encoded.ctypes.data)


@functools.cache
def _constants() -> tuple[dict[str, Any], list[Any], tuple[Any, ...]]:
    """What every map has: its types by name, steps of 1 along each axis, and how loads go."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    return (
        {
            "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        },
        [driver.cuuint32_t(1)] * 4,
        (
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # 0, and no NaN
        ),
    )


@functools.lru_cache(maxsize=_KEPT)
def tensor_map(dtype: str, shape: tuple[int, int, int, int], box: int, place: tuple[int, ...]) -> TensorMap:
    """The tensor map of an operand at ``place``: the address and the strides in elements.

    What the strides of axes of length 1 are means nothing, and may be no legal one.
    """
    size = DTYPES[dtype]
    line = -(-shape[3] * size // 16) * 16
    address, *steps = place
    by_batch, by_head, by_row = (
        line if length == 1 else step * size for length, step in zip(shape[:3], steps[:3], strict=True)
    )
    return TensorMap(dtype, address, shape, (by_batch, by_head, by_row), box)
