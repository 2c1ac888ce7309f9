"""What Hopper's forward is told of a bool mask, by the kernel that looks at it, in the emulator."""

from __future__ import annotations

import importlib
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.problem import Mask

arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
survey = importlib.import_module("attnswitch.backends.cuda.hopper.survey")
sys.path.append(str(Path(__file__).parents[2] / "fixtures"))
cubin = importlib.import_module("cubin")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

#: Keys of the tiles that Hopper's forward has.
TILES = (64, 80, 112, 128)
PLAIN = Problem.parse("b2.h3.s1.d64.bf16")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def surveyed(mask: Any, keys: int) -> tuple[Any, Any, Any]:
    """The launch's arguments, the sets (planes, groups, 2, words), the bits (planes, tiles, rows, 8)."""
    lk = mask.shape[3]
    problem = PLAIN.replace(seq_k=lk, mask=Mask("bool"))
    operand = torch.zeros(1)
    a = arguments.of_call(arguments.constants(problem), Inputs(operand, operand, operand, mask), mapped=True)
    found = survey.Survey(problem, keys)(mask, a).numpy().view(np.uint32)
    planes, groups, tiles = a.mask_batch * a.mask_heads, -(-a.mask_rows // 64), -(-lk // keys)
    words, rows = -(-tiles // 32), 1 if a.mask_rows == 1 else 64 * groups
    sets, bits = (found[(at - a.counter) // 4 :] for at in (a.mask_sets, a.mask_bits))
    bits = bits.view(np.uint16)
    assert found[0] == 2**32 - 1, "the counter of the forward is blank"
    assert a.mask_bits % 16 == a.counter % 16
    assert len(bits) == planes * tiles * rows * 8
    shape = (planes, groups, 2, words)
    return a, sets[: np.prod(shape)].reshape(shape), bits.reshape(planes, tiles, rows, 8)


def check(mask: Any, keys: int) -> Any:
    """Compare what was found with the mask, tile by tile."""
    a, sets, bits = surveyed(mask, keys)
    lk = mask.shape[3]
    seen = mask.numpy()[: a.mask_batch, : a.mask_heads, : a.mask_rows] != 0
    seen = seen.reshape(-1, a.mask_rows, lk)
    for tile in range(bits.shape[1], 32 * sets.shape[-1]):
        assert not (sets[..., tile // 32] >> tile % 32 & 1).any(), "tiles that there are not"
    for tile in range(bits.shape[1]):
        columns = seen[:, :, tile * keys : (tile + 1) * keys]
        told = sets[..., tile // 32] >> tile % 32 & 1
        for group in range(sets.shape[1]):
            rows = columns[:, 64 * group : 64 * group + 64]
            np.testing.assert_array_equal(told[:, group, 0], rows.any((1, 2)))
            np.testing.assert_array_equal(told[:, group, 1], ~rows.all((1, 2)))
        for column in range(columns.shape[2]):
            (chunk, c), (quarter, e) = divmod(column // 8, 2), divmod(column % 8, 2)
            told = bits[:, tile, : a.mask_rows, chunk] >> (4 * quarter + 2 * c + e) & 1
            np.testing.assert_array_equal(told, columns[:, :, column])
    if a.mask_rows > 1:
        assert (bits[:, :, a.mask_rows :] == 0xFFFF).all(), "rows that are not there"
    return a


@pytest.mark.parametrize("keys", TILES)
@pytest.mark.parametrize("sizes", [(40, 100), (130, 1000), (64, 256), (260, 136)], ids=str)
def test_every_shape_that_broadcasts(sizes: tuple[int, int], keys: int) -> None:
    rng = np.random.default_rng(keys)
    for b, h, lq, lk in product((1, 2), (1, 3), (1, sizes[0]), (1, sizes[1])):
        check(torch.from_numpy(rng.random((b, h, lq, lk)) < rng.choice([0.02, 0.5, 0.98])), keys)


@pytest.mark.parametrize("keys", TILES)
def test_every_way_to_lie(keys: int) -> None:
    drawn = torch.from_numpy(np.random.default_rng(keys).random((2, 3, 70, 420)) < 0.9)
    wide = torch.zeros(2, 3, 140, 432, dtype=torch.bool)
    wide[:, :, ::2, 5:425] = drawn
    padded = torch.zeros(2, 3, 70, 432, dtype=torch.bool)
    padded[..., :420] = drawn
    for mask in (drawn, wide[:, :, ::2, 5:425], padded[..., :420], drawn.transpose(2, 3), drawn.permute(1, 0, 2, 3)):
        check(mask, keys)


@pytest.mark.parametrize(("tiles", "teams"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1)])
def test_a_block_takes_several_groups_where_there_are_enough(tiles: int, teams: int) -> None:
    """More than blocks have to have at least, and not a multiple of what a block takes; of odd lengths."""
    groups, keys = 128 * teams // 2 + 3, 64
    assert survey._teams(tiles, 2 * groups) == teams
    assert survey._teams(tiles, 128 * teams - 1) == max(1, teams // 2)
    rows, lk = 64 * groups - 29, keys * tiles - 3
    rng = np.random.default_rng(tiles)
    check(torch.from_numpy(rng.random((2, 1, rows, lk)) < rng.choice([0.01, 0.99], (2, 1, rows, 1))), keys)


def test_an_axis_of_stride_0_counts_once() -> None:
    padding = torch.arange(700).view(1, 1, 1, 700) < torch.tensor([650, 90]).view(2, 1, 1, 1)
    a = check(padding.expand(2, 3, 300, 700), 128)
    assert (a.mask_batch, a.mask_heads, a.mask_rows) == (2, 1, 1)
    assert check(padding[:1].expand(2, 3, 300, 700), 128).mask_batch == 1
    check(padding[..., :1].expand(2, 1, 1, 700), 80)


def test_more_tiles_than_a_word_has_bits() -> None:
    check(torch.from_numpy(np.random.default_rng(0).random((2, 1, 1, 9000)) < 0.999), 64)


@pytest.mark.parametrize("byte", [1, 2, 128, 255])
def test_every_byte_but_0_is_true(byte: int) -> None:
    mask = np.zeros((1, 1, 65, 256), np.uint8)
    mask[..., 3:200:7] = byte
    check(torch.from_numpy(mask), 128)


def test_what_a_launch_leaves_does_not_depend_on_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward reads all that is found, rows past the last one and bits of tiles that there are not."""
    mask = torch.from_numpy(np.random.default_rng(1).random((1, 2, 100, 300)) < 0.5)
    found = []
    for before in (0, -1):
        empty = survey.memory.empty

        def filled(*given: Any, before: int = before, empty: Any = empty) -> Any:
            return empty(*given).fill_(before)

        with monkeypatch.context() as patch:
            patch.setattr(survey.memory, "empty", filled)
            found.append(surveyed(mask, 128)[1:])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_its_memory_is_an_eighth_of_the_mask() -> None:
    mask = torch.ones(2, 1, 512, 2048, dtype=torch.bool)
    a, sets, bits = surveyed(mask, 128)
    assert a.mask_rows == 512
    assert bits.nbytes == mask.numel() // 8
    assert sets.nbytes < bits.nbytes // 50


@pytest.mark.parametrize("keys", TILES)
def test_whether_all_columns_of_a_thread_are_there_is_not_lost(keys: int) -> None:
    """By ptxas of CUDA 13.0 and 13.2, which took 0 of 16 for all, a GPU read past the end of a mask of 4096 x 4096."""
    pytest.importorskip("cupy")
    nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
    assert cubin.lost_answers(nvrtc.cubin(survey.Survey(PLAIN, keys).variant, "sm_90a")) == 0
