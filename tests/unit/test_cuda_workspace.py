"""Sums that blocks of the CUDA kernels leave to one another: the memory for them, and the state that it is left in."""

from __future__ import annotations

import importlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.device import Device

arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
config = importlib.import_module("attnswitch.backends.cuda.config")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
portable = importlib.import_module("attnswitch.backends.cuda.portable.forward")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")
workspace = importlib.import_module("attnswitch.backends.cuda.launching.workspace")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


class Runtime:
    """CUDA's: what is filled, and which streams are captured."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, ...]] = []
        self.captured: set[int] = set()

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802 - CuPy's name
        return stream in self.captured

    def memsetAsync(self, *passed: int) -> None:  # noqa: N802 - CuPy's name
        self.filled.append(passed)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    cuda = pytest.importorskip("cupy_backends.cuda.api.runtime")
    for name in ("streamIsCapturing", "memsetAsync"):
        monkeypatch.setattr(cuda, name, getattr(made, name))
    monkeypatch.setattr(workspace, "_kept", {})
    monkeypatch.setattr(workspace, "_allocated", lambda size: workspace._of_caller(size, 0))
    monkeypatch.setattr(workspace.memory, "index", lambda like: like)
    monkeypatch.setattr(workspace.memory, "empty", lambda shape, *_: torch.empty(shape, dtype=torch.uint8))
    return made


def test_launches_of_a_stream_share_memory_that_was_filled_once(runtime: Runtime) -> None:
    first = workspace.blank(4000, 0, 7)
    assert runtime.filled == [(first.address, 0xFF, 4096, 7)]
    assert workspace.blank(4000, 0, 7) is first
    assert workspace.blank(400, 0, 7) is first
    larger = workspace.blank(8000, 0, 7)
    assert runtime.filled[1:] == [(larger.address, 0xFF, 8192, 7)]
    assert workspace.blank(4000, 0, 7) is larger


def test_where_there_is_no_memory_left_that_of_the_caller_serves_a_launch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose allocator holds the whole GPU has room there."""
    out_of_memory = pytest.importorskip("cupy_backends.cuda.api.runtime").CUDARuntimeError(2)

    def refused(size: int) -> Any:
        raise out_of_memory

    monkeypatch.setattr(workspace, "_allocated", refused)
    first, second = workspace.blank(4000, 0, 7), workspace.blank(4000, 0, 7)
    assert first is not second
    assert runtime.filled == [(array.address, 0xFF, 4000, 7) for array in (first, second)]


def test_what_may_run_at_once_shares_none(runtime: Runtime) -> None:
    first, second, third = (workspace.blank(4000, *where) for where in ((0, 7), (0, 8), (1, 7)))
    assert len({first.address, second.address, third.address}) == 3
    runtime.captured = {7}
    one, another = workspace.blank(4000, 0, 7), workspace.blank(4000, 0, 7)
    assert len({first.address, one.address, another.address}) == 3
    assert [stream for *_, stream in runtime.filled] == [7, 8, 7, 7, 7]
    runtime.captured = set()
    assert workspace.blank(4000, 0, 7) is first


def test_memory_is_freed_when_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("cupy_backends.cuda.api.runtime")
    freed: list[int] = []
    monkeypatch.setattr(cuda, "malloc", lambda size: 2 * size)
    monkeypatch.setattr(cuda, "free", freed.append)
    places = workspace._allocated(4096)
    assert (places.address, places.nbytes) == (8192, 4096)
    assert not freed
    del places
    assert freed == [8192]


def test_the_stream_of_each_thread_is_one_by_thread(runtime: Runtime) -> None:
    here = workspace.blank(4000, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(workspace.blank, 4000, 0, 2).result() is not here
    assert workspace.blank(4000, 0, 2) is here


@pytest.fixture
def alone(emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))


@compiled
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("splits", [2, 5, 18])
def test_a_launch_leaves_it_blank(dtype: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN among the values as well, and splits without a key: what is left is never taken for nothing."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, length, 24, generator=generator).to(getattr(torch, dtype))
        for heads, length in ((6, 1), (2, 300), (2, 300))
    )
    value[0, 0, 3, 5], value[0, 0, 4, 6] = torch.nan, -torch.nan
    lengths = torch.tensor([300, 40])
    used: list[Any] = []

    def kept(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        if dtype != "uint8":
            return empty(shape, like, dtype)
        used.extend([] if used else [empty(shape, like, dtype)])
        return used[0]

    empty = run.memory.empty
    tile, other = tiles.Tile(16, 16, 3, 2, apart=True), tiles.Tile(32, 32, 1, 1)
    chosen = config.CudaConfig(tile, other, other, other, splits=splits)
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    whole = attnswitch.attention(query, key, value, key_lengths=lengths, backend="reference")
    found = []
    monkeypatch.setattr(run.memory, "empty", kept)
    for _ in range(2):
        found.append(attnswitch.attention(query, key, value, key_lengths=lengths, backend="cuda"))
        assert len(used) == 1
        assert bool((used[0] == 0xFF).all())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    assert torch.equal(found[0].isnan(), whole.isnan())
    assert torch.allclose(found[0].nan_to_num(), whole.nan_to_num(), rtol=2e-2, atol=2e-2)


def test_a_divisor_divides_every_number_below_2_31() -> None:
    chosen = random.Random(1)
    for _ in range(2000):
        by = chosen.choice((chosen.randrange(1, 300), chosen.randrange(1, 2**31)))
        divisor = arguments.Divisor.of(by)
        assert divisor.multiplier == -(-(2**divisor.shift) // by), "it fits"
        for number in (0, by - 1, by, (2**31 - 1) // by * by, 2**31 - 1, chosen.randrange(2**31)):
            assert number * divisor.multiplier >> divisor.shift == number // by


def test_keys_that_are_read_once_leave_the_cache_first() -> None:
    def once(text: str) -> bool:
        return bool(tiles.once(Problem.parse(text), tiles.Tile(16, 32, 8, 3, apart=True)))

    assert once("b1.h32/8.s1x8192.d128.bf16")
    assert once("b1.h8.s4x8192.d128.bf16")
    assert not once("b1.h32/8.s1x131072.d128.bf16"), "more than the L2 has room for"
    assert not once("b1.h8.s64x8192.d128.bf16"), "tiles of rows share them"
    assert not once("b1.h64/2.s4x8192.d128.bf16"), "so do query heads"
    one_stage = tiles.Tile(16, 32, 1, 1)
    assert not tiles.once(Problem.parse("b4.h8.s1x128.d64.bf16"), one_stage), "ptxas 13.0 fails to copy so"


def test_what_blocks_leave_has_a_place_for_each_row_and_split() -> None:
    problem = Problem.parse("b1.h32/8.s1x8192.d128.bf16")
    chosen = next(config.configs(problem, Device.named("h200")))
    forward = portable.Forward(problem, chosen.forward, chosen.splits)
    assert forward._left == 8 * 15 * 16 * (128 + 2) * 4
