"""Which sequence comes when, where rows are few: the kernels' own code, in the emulator."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

KERNEL = """#include "portable/order.cuh"
KERNEL order(const Arguments a) {
    const int found = by_length(a, block_index());
    if (thread_index() % 32 == 0) reinterpret_cast<int*>(a.lse)[2 * block_index() + thread_index() / 32] = found;
}
"""
SIZES = {"WARPS": 2, "RESIDENT": 1, "STORAGE": "float", "BLOCK_N": 16, "VARLEN": 0, "PAGED": 1}
MOST_ORDERED = 256


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("order")
    source = folder / "order.cu"
    source.write_text(KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(folder))
        return emulator.load(str(source), "order", SIZES)


def order(kernel: Any, lengths: np.ndarray) -> np.ndarray:
    """The sequences in their order, as each of the block's warps finds it."""
    count = len(lengths)
    a, found = arguments.Arguments(), np.full((count, 2), -1, np.int32)
    a.batch, a.keys, a.queries = count, int(lengths.max()), 1
    a.lengths, a.length_bytes, a.length_stride = lengths.ctypes.data, -4, 4
    a.lse = found.ctypes.data
    kernel.run(64, count, a, 0)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    return found[:, 0]


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 200, MOST_ORDERED])
@pytest.mark.parametrize("most", [1, 31, 32, 4096, 2**31 - 1])
def test_the_longest_come_first(kernel: Any, count: int, most: int) -> None:
    rng = np.random.default_rng([count, most])
    lengths = rng.integers(0, most, count, np.int32, endpoint=True)
    found = order(kernel, lengths)
    assert sorted(found) == list(range(count))
    # Sequences that are alike in the five highest bits of the longest come as they are.
    bits = lengths >> max(0, int(lengths.max()).bit_length() - 5)
    np.testing.assert_array_equal(found, np.argsort(-bits, kind="stable"))


@pytest.mark.parametrize("lengths", [[0] * 40, [7] * 40, [0, 5] * 33, list(range(100)), list(range(100, 0, -1))])
def test_none_is_left_out(kernel: Any, lengths: list[int]) -> None:
    found = order(kernel, np.array(lengths, np.int32))
    assert sorted(found) == list(range(len(lengths)))
    gaps = np.diff(np.array(lengths)[found])
    assert (gaps <= max(lengths) / 16).all()


def test_more_come_as_they_are(kernel: Any) -> None:
    lengths = np.arange(MOST_ORDERED + 1, dtype=np.int32)
    np.testing.assert_array_equal(order(kernel, lengths), np.arange(MOST_ORDERED + 1))
