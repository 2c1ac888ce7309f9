"""Blocks of known bytes where a kernel's results are likely to be allocated, to see what it writes beside them.

Three blocks of a result's size are filled with 0xFF, which is NaN in every float type, and the middle one is freed:
allocators hand out the block that fits best, so the result takes its place. It then starts out as NaN, so that what the
kernel leaves unwritten shows; and what it writes before or after its result changes a neighbour. ``hits`` counts the
results that were placed so; the others are still judged by their values.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from attnswitch import arrays

__all__ = ["Neighbours", "overlap"]

_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Neighbours:
    """Lays out the blocks for ``results`` (shape and dtype by name) in the memory of ``library`` on ``device``."""

    def __init__(self, results: dict[str, tuple[tuple[int, ...], str]], library: str, device: str) -> None:
        self.hits = 0
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._freed: dict[int, str] = {}
        middles = []
        for name, (shape, dtype) in results.items():
            size = math.prod(shape) * _ITEMSIZES[dtype]
            if size:
                before, middle, after = (_block(library, device, size) for _ in range(3))
                self._kept[name] = (before, after)
                self._freed[arrays.address(middle)] = name
                middles.append(middle)
        del middles

    def look(self, results: dict[str, Any]) -> str:
        """The result beside which something was written; empty if there is none."""
        addresses = {arrays.address(result) for result in results.values()}
        self.hits = len(addresses & self._freed.keys())
        for name, blocks in self._kept.items():
            if not all(_intact(block) for block in blocks):
                return name
        return ""


def _block(library: str, device: str, size: int) -> Any:
    if library == "torch":
        torch: Any = importlib.import_module("torch")
        return torch.full((size,), 255, dtype=torch.uint8, device=device)
    if library == "cupy":
        cupy: Any = importlib.import_module("cupy")
        with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
            block = cupy.empty(size, dtype=cupy.uint8)
            block.data.memset_async(255, size)  # without a kernel, which CuPy would compile in each process
            return block
    block = np.empty(size, np.uint8)
    block.fill(255)
    return block


def _intact(block: Any) -> bool:
    if hasattr(block, "get"):  # CuPy's
        block = block.get()
    return bool((block == 255).all())


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays have memory in common: the bytes from first to last element of each."""
    (first, end), (start, last) = _reach(one), _reach(other)
    return first < last and start < end


def _reach(array: Any) -> tuple[int, int]:
    """Where the first byte of any element is, and the end of the last."""
    if 0 in array.shape:
        return 0, 0
    size = array.dtype.itemsize
    steps = array.strides if hasattr(array, "strides") else [size * step for step in array.stride()]
    ways = [(length - 1) * step for length, step in zip(array.shape, steps, strict=True)]
    begin = arrays.address(array)
    return begin + sum(min(way, 0) for way in ways), begin + sum(max(way, 0) for way in ways) + size
