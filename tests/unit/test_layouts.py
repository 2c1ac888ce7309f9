"""Operands in memory: junk around them, writes that are noticed, and blocks beside the results."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from attnswitch.verify import Case, check
from attnswitch.verify.drawing.placings import FAR, PLACINGS, TURNED
from attnswitch.verify.launch.layouts import Storage, host, place
from attnswitch.verify.launch.neighbours import Neighbours

SHAPE = (2, 3, 5, 4)
DTYPES = ("float16", "bfloat16", "float32", "float64")
LIBRARIES = ("numpy", "torch")
#: Every placing in every library that can have it.
WAYS = [
    (placing, library) for placing in PLACINGS for library in LIBRARIES if library == "numpy" or placing not in TURNED
]
EVERY = pytest.mark.parametrize(("placing", "library"), WAYS)


def values(placing: str, shape: tuple[int, ...] = SHAPE) -> Any:
    """Numbers that every type holds, equal along the axis that an expanded operand repeats."""
    axis = {"expanded-batch": 0, "expanded-heads": 1, "expanded-rows": 2}.get(placing)
    small = tuple(1 if a == axis else n for a, n in enumerate(shape))
    return np.broadcast_to(np.arange(1.0, 1.0 + math.prod(small)).reshape(small), shape)


def put(placing: str, library: str, dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> tuple[Any, Storage]:
    return place(values(placing, shape), dtype, placing, library, "cpu")


def doubles(array: Any) -> Any:
    return host(array).astype(np.float64)


def its_own(array: Any, storage: Storage) -> Any:
    """Which elements of the buffer the operand has."""
    flat = host(storage.flat)
    mine, offset = host(array), 0
    offset = (mine.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // flat.itemsize
    index = np.full(mine.shape, offset)
    for axis, stride in enumerate(mine.strides):
        steps = np.arange(mine.shape[axis]) * (stride // mine.itemsize)
        index = index + steps.reshape([-1 if a == axis else 1 for a in range(mine.ndim)])
    return np.isin(np.arange(flat.size), index)


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY
def test_the_values_are_the_same_in_every_placing(placing: str, library: str, dtype: str) -> None:
    array, storage = put(placing, library, dtype)
    assert isinstance(array, torch.Tensor if library == "torch" else np.ndarray)
    assert str(array.dtype).removeprefix("torch.") == dtype
    np.testing.assert_array_equal(doubles(array), values(placing))
    assert not storage.changed()


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY
def test_all_around_and_between_is_nan(placing: str, library: str, dtype: str) -> None:
    array, storage = put(placing, library, dtype)
    own = its_own(array, storage)
    assert own.sum() == len(np.unique(values(placing)))
    flat = doubles(storage.flat)
    assert np.isnan(flat[~own]).all()
    assert not np.isnan(flat[own]).any()
    first, last = np.flatnonzero(own)[[0, -1]]
    assert min(first, len(own) - 1 - last) >= 64
    between = ~own[first : last + 1]
    assert between.any() == (placing in ("packed", "strided", "padded-rows", "mirrored"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_mask_lies_in_true(library: str) -> None:
    array, storage = place(np.zeros(SHAPE, np.bool_), "bool", "strided", library, "cpu")
    own = its_own(array, storage)
    assert not host(array).any()
    assert host(storage.flat)[~own].all()


@EVERY
def test_every_write_is_seen(placing: str, library: str) -> None:
    array, storage = put(placing, library)
    own = its_own(array, storage)
    first, last = np.flatnonzero(own)[[0, -1]]
    places = [0, first - 1, first, last, last + 1, len(own) - 1, *np.flatnonzero(~own[first:last])[:1] + first]
    for where in map(int, places):
        before = float(storage.flat[where])
        storage.flat[where] = 77.0
        assert storage.changed(), where
        storage.flat[where] = before
        assert not storage.changed()
    if not placing.startswith("expanded") or library == "torch":
        array[(0,) * 4] = -1.0
        assert storage.changed()


@EVERY
def test_other_junk_of_the_same_kind_is_a_write_too(placing: str, library: str) -> None:
    """A NaN with other bits was written by somebody."""
    _, storage = put(placing, library)
    bits = host(storage.flat).view(np.uint32)
    bits[0] ^= 1
    assert storage.changed()


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 3, 0, 4), (1, 1, 1, 1)])
@EVERY
def test_nothing_and_one(placing: str, library: str, shape: tuple[int, ...]) -> None:
    array, storage = put(placing, library, shape=shape)
    np.testing.assert_array_equal(doubles(array), values(placing, shape))
    assert not storage.changed()


@pytest.mark.parametrize("placing", TURNED)
def test_torch_has_no_operand_that_runs_backwards(placing: str) -> None:
    with pytest.raises(ValueError, match="backwards"):
        put(placing, "torch")


@pytest.mark.parametrize("columns", [1, 4, 16, 17])
def test_mirrored_rows_begin_at_multiples_of_16_bytes(columns: int) -> None:
    array, _ = put("mirrored", "numpy", "float16", (2, 3, 5, columns))
    assert array.strides[3] == -2
    assert not any(n % 16 for n in (array.__array_interface__["data"][0], *array.strides[:3]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_far_rows_are_beyond_31_bits(library: str) -> None:
    shape = (1, 1, 3, 2)
    array, storage = place(values("contiguous", shape), "float16", FAR, library, "cpu")
    stride = host(array).strides[2] // 2
    assert 2 * stride > 2**31
    np.testing.assert_array_equal(doubles(array), values("contiguous", shape))
    assert not storage.changed()  # nobody looks at so much


# -- beside the results ------------------------------------------------------------------------------------------------

#: A free block of the same size elsewhere may be handed out instead, so there are many, of sizes that are rare.
SIZES = [(1, heads, rows, 16) for heads in (1, 2, 3) for rows in (17, 61, 127, 251, 509, 1021)]
#: In a process of its own: one that has run long may have a free block of any size.
FRESH = """
import numpy as np, {library} as library
from attnswitch.verify.launch.layouts import host
from attnswitch.verify.launch.neighbours import Neighbours

hits = 0
for shape in 8 * {SIZES}:
    beside = Neighbours({{"out": (shape, "float32")}}, "{library}", "cpu")
    out = library.empty(shape, dtype=library.float32)
    assert beside.look({{"out": out}}) == ""
    hits += beside.hits
    if beside.hits:  # an allocator may note something in the first bytes
        assert np.isnan(host(out).astype(np.float64)[..., 8:]).all()
assert hits > 0
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_take_the_place_that_was_freed(library: str) -> None:
    script = FRESH.format(library=library, SIZES=SIZES)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_write_beside_a_result_is_reported(library: str, side: int) -> None:
    beside = Neighbours({"out": (SIZES[0], "float32"), "lse": ((1, 1, 16), "float32")}, library, "cpu")
    assert beside.look({}) == ""
    block = beside._kept["lse"][side]
    block[0 if side else -1] = 0
    assert beside.look({}) == "lse"
    assert beside.hits == 0


def test_an_empty_result_has_no_neighbours() -> None:
    assert Neighbours({"out": ((0, 1, 2, 3), "float16")}, "numpy", "cpu").look({}) == ""


def test_what_is_found_beside_a_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def overrun(self: Neighbours, results: dict[str, Any]) -> str:
        self._kept["out"][1][0] = 0
        return look(self, results)

    look = Neighbours.look
    assert check(Case(seq_q=4, library="numpy"), "tiled").verdict == "verified"
    monkeypatch.setattr(Neighbours, "look", overrun)
    outcome = check(Case(seq_q=4, library="numpy"), "tiled")
    assert outcome.failure is not None
    assert (outcome.failure.check, outcome.failure.result) == ("inputs", "out")
