"""Which sequence comes when, where rows are few: the kernels' own code, in the emulator."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

KERNEL = """#include "order.cuh"
KERNEL order(const Arguments a) {
    const int found = by_length(a, block_index());
    if (thread_index() % 32 == 0) reinterpret_cast<int*>(a.lse)[2 * block_index() + thread_index() / 32] = found;
}
"""
SIZES = {"WARPS": 2, "RESIDENT": 1, "STORAGE": "float", "BLOCK_N": 16, "VARLEN": 0, "PAGED": 1}
MOST_ORDERED, SHORT = 256, 512


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("order")
    source = folder / "order.cu"
    source.write_text(KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(folder))
        return emulator.load(str(source), "order", SIZES)


def order(kernel: Any, lengths: Any) -> Any:
    """The sequences in their order, as each of the block's warps finds it."""
    count, size = len(lengths), lengths.itemsize
    a, found = arguments.Arguments(), np.full((count, 2), -1, np.int32)
    a.batch, a.keys, a.queries = count, int(lengths.max()), 1
    a.lengths, a.length_bytes, a.length_stride = lengths.ctypes.data, -size, size
    a.lse = found.ctypes.data
    kernel.run(64, count, a, 0)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    return found[:, 0]


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 200, MOST_ORDERED])
@pytest.mark.parametrize("most", [SHORT, 4 * SHORT, 2**31 - 1])
def test_the_longest_come_first(kernel: Any, count: int, most: int) -> None:
    rng = np.random.default_rng([count, most])
    lengths = rng.integers(0, most, count, np.int32, endpoint=True)
    found = order(kernel, lengths)
    assert sorted(found) == list(range(count))
    # Sequences that are alike in the five highest bits of the longest come as they are.
    bits = lengths >> max(0, int(lengths.max()).bit_length() - 5)
    expected = np.argsort(-bits, kind="stable") if lengths.max() > SHORT else np.arange(count)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "lengths", [[0] * 40, [700] * 40, [0, 513] * 33, list(range(600)[::6]), list(range(600, 0, -6))]
)
def test_none_is_left_out(kernel: Any, lengths: list[int]) -> None:
    found = order(kernel, np.array(lengths, np.int32))
    assert sorted(found) == list(range(len(lengths)))
    gaps = np.diff(np.array(lengths)[found])
    assert max(lengths) <= SHORT or (gaps <= max(lengths) / 16).all()


def test_more_come_as_they_are(kernel: Any) -> None:
    lengths = 4 * np.arange(MOST_ORDERED + 1, dtype=np.int32)
    np.testing.assert_array_equal(order(kernel, lengths), np.arange(MOST_ORDERED + 1))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_lengths_of_other_types(kernel: Any, dtype: Any) -> None:
    lengths = np.random.default_rng(3).integers(0, min(np.iinfo(dtype).max, 2000), 70).astype(dtype)
    found = order(kernel, lengths)
    expected = np.argsort(-(lengths >> 6), kind="stable") if dtype == np.int64 else np.arange(70)
    np.testing.assert_array_equal(found, expected)


def test_what_is_no_length_leaves_nobody_out(kernel: Any) -> None:
    lengths = np.random.default_rng(4).integers(-(2**31), 2**31, 100).astype(np.int32)
    assert sorted(order(kernel, lengths)) == list(range(100))
