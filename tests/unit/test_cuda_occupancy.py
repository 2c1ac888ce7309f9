"""Tiles on GPUs where none was measured: what an SM holds of them, and that the kernels are right with each of them."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nights
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.device import Device

config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
occupancy = importlib.import_module("attnswitch.backends.cuda.portable.occupancy")
choice = importlib.import_module("attnswitch.backends.cuda.portable.choice")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")

KERNELS = ("forward", "key_gradients", "query_gradient", "mask_gradient")
SMALL, LARGE = ("a10", "l4", "rtx5090"), ("a100", "b200")
DIMS = ("32", "64", "96", "128", "192/128", "256")


def long(dim: str, dtype: str) -> Problem:
    return Problem.parse(f"b4.h16.s2048.d{dim}.{dtype}.mask=bf16:hqk.grad=qkvm")


def portable(problem: Problem, device: str) -> Any:
    """The first config of the portable kernels alone."""
    return config._heuristic(problem, Device.named(device))


def warps(kernel: str, problem: Problem, device: str) -> int:
    """Of an SM, with the tile that is taken at first."""
    tile, where = getattr(portable(problem, device), kernel), Device.named(device)
    return int(tile.warps * occupancy.blocks(kernel, tile, problem, occupancy.sm(where)))


# -- what an SM holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "kib", "warps", "blocks", "tensor", "ordinary"),
    [
        ("t4", 64, 32, 16, 512, 64),
        ("a100", 164, 64, 32, 1024, 64),
        ("a10", 100, 48, 16, 512, 128),
        ("l4", 100, 48, 24, 512, 128),
        ("h200", 228, 64, 32, 1024, 128),
        ("b200", 228, 64, 32, 1024, 128),
        ("rtx5090", 100, 48, 24, 512, 128),
    ],
)
def test_an_sm_has_what_the_tables_say(
    device: str, kib: int, warps: int, blocks: int, tensor: int, ordinary: int
) -> None:
    found = occupancy.sm(Device.named(device))
    assert (found.shared, *found[2:]) == (kib * 1024, warps, blocks, tensor, ordinary)
    assert found.shared - found.reserved == Device.named(device).shared_memory


def test_a_gpu_that_nobody_knows_holds_the_least() -> None:
    found = occupancy.sm(Device("cuda", "another", (13, 0)))
    assert (found.shared, found.warps, found.blocks) == (100 * 1024, 32, 16)


def test_blocks_are_bound_by_whatever_ends_first() -> None:
    problem, narrow = long("128", "bf16"), long("32", "bf16")
    small, large = (occupancy.sm(Device.named(device)) for device in ("a10", "b200"))
    tile = tiles.Tile(128, 32, 4, 2)
    assert occupancy.blocks("forward", tile, problem, small) == 1, "68 KiB of shared memory each"
    assert occupancy.blocks("forward", tile, problem, large) == 2, "255 registers a thread"
    assert occupancy.blocks("forward", tiles.Tile(128, 128, 4, 2), problem, small) == 0
    most = large._replace(warps=12)
    assert occupancy.blocks("forward", tiles.Tile(64, 16, 4, 2), narrow, most) == 3
    assert occupancy.blocks("forward", tiles.Tile(64, 16, 4, 2), narrow, most._replace(blocks=2)) == 2


def test_registers_follow_from_the_rows_of_a_warp() -> None:
    problem = long("128", "bf16")
    forward = occupancy.registers("forward", tiles.Tile(64, 32, 4, 2), problem)
    assert forward == occupancy.registers("forward", tiles.Tile(128, 32, 8, 1), problem)
    assert forward == occupancy.registers("forward", tiles.Tile(64, 32, 4, 2), long("96", "bf16"))
    assert occupancy.registers("forward", tiles.Tile(128, 64, 4, 2), problem) is None, "it spills"
    turned = occupancy.registers("key_gradients", tiles.Tile(32, 64, 4, 2), problem)
    assert turned == occupancy.registers("key_gradients", tiles.Tile(32, 128, 8, 2), problem)


# -- what is taken -----------------------------------------------------------------------------------------------------

#: What 99 KiB do not hold eight warps of: both operands of 128 rows, or of 64 rows twice.
NARROW = {("key_gradients", "256"), ("query_gradient", "256"), ("mask_gradient", "256"), ("mask_gradient", "192/128")}


@pytest.mark.parametrize("device", [*SMALL, *LARGE])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_sm_has_eight_warps_of_16_bit_tiles(kernel: str, dim: str, device: str) -> None:
    """One warp for each of its four parts waits for everything; another one works meanwhile."""
    least = 4 if (kernel, dim) in NARROW else 8
    assert warps(kernel, long(dim, "bf16"), device) >= least


@pytest.mark.parametrize("device", [*SMALL, *LARGE])
@pytest.mark.parametrize("dim", DIMS[:4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_sm_has_eight_warps_of_float32_tiles(kernel: str, dim: str, device: str) -> None:
    assert warps(kernel, long(dim, "fp32"), device) >= 8


@pytest.mark.parametrize("device", [*SMALL, *LARGE, "t4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dim", DIMS)
def test_tiles_are_those_that_spill_nothing(dim: str, dtype: str, device: str) -> None:
    problem, where = long(dim, dtype), Device.named(device)
    for kernel in KERNELS:
        for tile in choice.ranked(kernel, problem, where):
            assert occupancy.registers(kernel, tile, problem) <= 248
            assert config._suits(tile, kernel, problem, where.shared_memory) or kernel == "mask_gradient"
            assert tile.stages == 1 or device != "t4", "copies run beside"


MEASURED = [
    ("64", "bf16", "128x64 w4 s2 r2", "32x128 w4 s2 r2", "128x32 w4 s2 r2", "64x32 w4 s1 r1"),
    ("128", "bf16", "128x32 w4 s2 r2", "32x64 w4 s2 r2", "64x64 w4 s2 r2", "64x32 w4 s1 r1"),
    ("192/128", "bf16", "64x64 w4 s1 r2", "32x64 w4 s2 r1", "64x32 w4 s2 r1", "64x32 w4 s1 r1"),
    ("256", "bf16", "64x64 w4 s1 r2", "32x64 w4 s2 r1", "64x32 w4 s2 r1", "64x32 w4 s1 r1"),
    ("32", "fp32", "128x64 w4 s1 r2", "64x64 w4 s1 r2", "64x64 w4 s1 r2", "64x32 w4 s1 r1"),
    ("64", "fp32", "128x64 w4 s1 r2", "64x64 w4 s1 r2", "64x64 w4 s1 r2", "64x32 w4 s1 r1"),
    ("128", "fp32", "64x32 w4 s2 r2", "32x64 w4 s1 r2", "64x32 w4 s1 r2", "32x32 w4 s1 r1"),
    ("256", "fp64", "32x32 w4 s1 r1", "16x16 w4 s1 r1", "16x16 w4 s1 r1", "32x16 w4 s1 r1"),
]


@pytest.mark.parametrize(("dim", "dtype", *KERNELS), MEASURED)
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_on_hopper_tiles_are_those_that_were_measured(
    device: str, dim: str, dtype: str, forward: str, key_gradients: str, query_gradient: str, mask_gradient: str
) -> None:
    found = portable(long(dim, dtype), device)
    wanted = (forward, key_gradients, query_gradient, mask_gradient)
    assert tuple(str(getattr(found, kernel)) for kernel in KERNELS) == wanted


@pytest.mark.parametrize("kernel", KERNELS[:3])
@pytest.mark.parametrize(("dim", "dtype"), [("64", "bf16"), ("128", "bf16"), ("64", "fp32")])
def test_the_reckoning_likes_what_was_measured_on_hopper(dim: str, dtype: str, kernel: str) -> None:
    """What an H200 was measured to be fastest with is by it no more than an eighth slower than what it likes best."""
    problem, sm = long(dim, dtype), occupancy.sm(Device.named("h200"))
    tile = replace(getattr(portable(problem, "h200"), kernel), resident=1)
    measured = choice._step(kernel, tile, problem, sm, occupancy.blocks(kernel, tile, problem, sm))
    assert measured.pace <= 1.125 * min(step.pace for step in choice._steps(problem, kernel, sm))


def test_few_blocks_take_smaller_tiles_only_where_that_is_much_sooner_done() -> None:
    def chosen(text: str, device: str = "a100") -> str:
        return str(portable(Problem.parse(text), device).forward)

    assert chosen("b4.h16.s2048.d64.bf16") == chosen("b3.h16.s2000.d64.bf16") == "128x64 w4 s2 r1"
    assert chosen("b1.h16.s1024.d64.bf16") == "64x64 w4 s2 r1", "two blocks of 128 rows on 20 of 108 SMs, and one on 88"


@pytest.mark.parametrize("device", ["a10", "b200"])
def test_tuning_is_offered_the_neighbours(device: str) -> None:
    problem, where = Problem.parse("b4.h16.s2048.d128.bf16.mask=bf16:hqk.grad=qkvm"), Device.named(device)
    found = list(config.configs(problem, where))
    for kernel in KERNELS:
        offered = {getattr(each, kernel) for each in found}
        assert set(choice.ranked(kernel, problem, where)) <= offered, kernel
    assert len(found) == len(set(found))


def test_splits_are_as_many_as_an_sm_has_room_for() -> None:
    """Of 128 rows and 8 warps it has one block, whatever shared memory is left."""
    chosen = portable(Problem.parse("b1.h8.s128x8192.d128.bf16"), "b200")
    assert chosen.forward.warps * chosen.splits * 8 <= 8 * 148


# -- what they take ----------------------------------------------------------------------------------------------------

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN = [f"b4.h16.s2048.d{dim}.bf16{more}.grad" for dim, more in (("64", ".causal"), ("128", ".causal"), ("256", ""))]


def test_the_kernels_of_plain_problems_were_compiled_and_spill_nothing() -> None:
    builds = json.loads((FIXTURES / "results" / "cuda-builds-13.2.json").read_text())["builds"]
    for device, arch in (
        ("a100", "sm_80"),
        ("a10", "sm_86"),
        ("l4", "sm_89"),
        ("b200", "sm_100a"),
        ("rtx5090", "sm_120a"),
    ):
        for text in PLAIN:
            problem = Problem.parse(text)
            chosen = portable(problem, device)
            for kernel in KERNELS[:3]:
                tile = getattr(chosen, kernel)
                rows = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
                name = f"{rows[0]}x{rows[1]} w{tile.warps} s{tile.stages}"
                found = [
                    build
                    for build in builds
                    if build["kernel"].startswith(kernel) and (build["arch"], build["problem"]) == (arch, text)
                ]
                assert found, (arch, text, kernel)
                assert {build["tile"] for build in found} == {name}, (arch, text, kernel)
                assert not any(build["spilled"] for build in found), (arch, text, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(5))
def test_the_table_has_the_registers_of_today(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.syspath_prepend(str(FIXTURES))
    make: Any = importlib.import_module("make_cuda_registers")
    table = json.loads(make.TABLE.read_text())
    assert tuple(table["archs"]) == make.ARCHS
    if tuple(table["nvrtc"]) != make.nvrtc.version():
        pytest.skip("each version allots registers in its own way")
    drawn = [key for key in make.shapes() if key[2] in ("64", "128") and key[1] == "bf16"][place * 11]
    kernel, dtype, dim, rows, columns = drawn
    most, spilled = make.registers(drawn)
    assert table["registers"][f"{kernel} {dtype} {dim}"].get(f"{rows}x{columns}") == (None if spilled else most)


# -- emulated ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", ["positions", "scores"])
@pytest.mark.parametrize(("dim", "device"), nights.some([(64, "a10"), (128, "a10"), (128, "a100"), (256, "a10")]))
def test_results_are_those_of_the_tiled_backend(
    dim: int, device: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two query heads on one of keys, lengths that end inside a tile."""
    chosen = portable(long(str(dim), "bf16"), device)
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 2, 134, dim), (1, 1, 140, dim), (1, 1, 140, dim))
    arrays = [torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16() for shape in shapes]
    extra: dict[str, Any] = {"window": (60, 5), "key_lengths": [131]}
    if options == "scores":
        bias = torch.randn((2, 134, 140), generator=generator)
        extra = {"attn_mask": bias, "softcap": 8.0, "dropout_p": 0.3, "seed": 5, "is_causal": True}
    results = []
    for name, kind in (("cuda", torch.bfloat16), ("tiled", torch.float64)):
        given = [array.to(kind).requires_grad_() for array in arrays]
        wanted = list(given)
        if "attn_mask" in extra:
            mask = extra["attn_mask"].detach()
            extra["attn_mask"] = (mask.double() if name == "tiled" else mask).requires_grad_()
            wanted.append(extra["attn_mask"])
        out = attnswitch.attention(*given, backend=name, **extra)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        results.append([out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))])
    for got, expected in zip(*results, strict=True):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=2e-2 * size)
