"""The CUDA backend beside ``verify``: refusals, tiles, and in the emulator what a launch has to get right."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.call import attend, finite
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import Mask, Memory
from attnswitch.verify.launch.layouts import place

arithmetic = importlib.import_module("attnswitch.backends.own.arithmetic")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
libcuda = importlib.import_module("attnswitch.backends.cuda.launching.driver")
config = importlib.import_module("attnswitch.backends.cuda.config")
splits = importlib.import_module("attnswitch.backends.cuda.portable.splits")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
hopper_tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")
VARIABLE = emulator.VARIABLE
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


def forget() -> None:
    """Drop what was planned, compiled and prepared."""
    planner.forget()
    attend.forget()


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without the variable, and leaves no plan of an emulated backend."""
    monkeypatch.delenv(VARIABLE, raising=False)
    forget()
    yield
    forget()


# -- what it refuses ---------------------------------------------------------------------------------------------------

PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16.causal.grad")
PADDED = PLAIN.replace(nonfinite=True, causal=False, key_lengths=True)


def refusals(problem: Problem, device: Device | str) -> tuple[str, ...]:
    where = Device.named(device) if isinstance(device, str) else device
    found: tuple[str, ...] = backend.CudaBackend().supports(problem, where)
    return found


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (PLAIN, "cpu", f"{VARIABLE}=1 emulates it"),
        (PLAIN.replace(dim_qk=257), "h200", "dim_qk=257"),
        (PLAIN.replace(dim_v=512), "h200", "dim_v=512"),
        (PLAIN, "t4", "sm_75.*bfloat16.*8.0"),
        (PLAIN.replace(dtype="float32"), "v100", "sm_70.*7.5"),
        (PLAIN, Device("rocm", "MI300X"), "rocm"),
        (PLAIN.replace(batch=1, heads_kv=1, seq_k=2**29), "h200", "positions"),
        (PLAIN.replace(batch=2**20, seq_q=2**9), "h200", r"8589934592 queries of all heads.*split the batch"),
        (PLAIN.replace(batch=2**20, seq_q=1), "h200", r"4294967296 keys of all heads"),
        (PLAIN.replace(key=Memory(align=1)), "h200", "key is aligned to 1 bytes"),
        (PLAIN.replace(nonfinite=True), "h200", "NaN or inf"),
        (PADDED.replace(mask=Mask("bool")), "h200", "NaN or inf"),
    ],
    ids=lambda value: value.kind if isinstance(value, Device) else str(value),
)
def test_it_says_why_it_does_not_take_a_problem(problem: Problem, device: Device | str, words: str) -> None:
    (reason,) = refusals(problem, device)
    assert re.search(words, reason)


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "rtx3090"])
@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        PLAIN.replace(dtype="float64", dim_qk=256, dim_v=1),
        PLAIN.replace(key=Memory(align=2), value=Memory(strided=True), query=Memory(negative=True, expanded=True)),
        PLAIN.replace(mask=Mask("bool"), attn_mask=Memory(align=1)),
        PADDED,
    ],
    ids=str,
)
def test_it_takes_a_problem(problem: Problem, device: str) -> None:
    assert refusals(problem, device) == ()
    assert refusals(problem.replace(dtype="float32", key=Memory()), "t4") == ()


def test_emulated_it_takes_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert refusals(PLAIN, "cpu") == ()
    assert len(refusals(PLAIN.replace(dim_qk=300, dim_v=300), "cpu")) == 1
    monkeypatch.setenv(VARIABLE, "0")
    assert len(refusals(PLAIN, "cpu")) == 1


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    backend._unavailable.cache_clear()
    assert re.search(r"attnswitch\[cuda13\]", backend.CudaBackend().unavailable())
    backend._unavailable.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_it_can_be_emulated() -> None:
    pytest.importorskip("cupy")
    assert VARIABLE in backend.CudaBackend().unavailable()


def test_without_its_compiler_it_says_so_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(backend, "_no_gpu", lambda: None)
    monkeypatch.setattr(nvrtc, "version", missing)
    for cached in (backend._unavailable, nvrtc.unavailable, families._missing):
        cached.cache_clear()
    try:
        found = backend.CudaBackend().unavailable()
        assert re.search(r"NVRTC.*libnvrtc\.so\.13.*pip install attnswitch\[cuda13\]", found)
        assert families._missing() == found
    finally:
        for cached in (backend._unavailable, nvrtc.unavailable, families._missing):
            cached.cache_clear()


# -- tiles and splits --------------------------------------------------------------------------------------------------

DEVICES = ("h200", "a100", "rtx3090", "b200", "t4", "cpu")
PROBLEMS = [
    Problem.parse(f"{sizes}.d{dim}.{dtype}{more}")
    for sizes, dim, dtype, more in [
        *product(
            ["b4.h16/4.s1024"], ["16", "64", "96", "128", "256", "256/1"], ["bf16", "fp32", "fp64"], ["", ".grad"]
        ),
        *product(["b1.h8/1.s1x4096", "b64.h8.s1x48", "b2.h2.s4x130"], ["64", "256"], ["bf16", "fp32", "fp64"], [""]),
        ("b1.h4.s512", "80", "fp16", ".mask=fp32:qk.grad=qkvm"),
        ("b1.h1.s0x5", "1", "fp16", ".grad"),
        ("b1.h1.s5x0", "1", "fp32", ".grad"),
    ]
]
KERNELS = ("forward", "key_gradients", "query_gradient", "mask_gradient")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_tiles_are_what_the_kernels_take(problem: Problem, device: str) -> None:
    where = Device.named(device)
    found = list(config.configs(problem, where))
    assert len(set(found)) == len(found)
    assert device != "cpu" or len(found) == 1
    tensor = tiles.on_tensor_cores(problem)
    for chosen in found:
        if isinstance(chosen.forward, hopper_tiles.HopperTile):
            assert hopper_tiles.shared(chosen.forward, problem) <= where.shared_memory
            assert chosen.splits == 1
            continue
        for name in KERNELS:
            tile = getattr(chosen, name)
            own, by = (tile.keys, tile.queries) if name == "key_gradients" else (tile.queries, tile.keys)
            assert own % (tile.warps // tile.teams * (16 if tensor else 4)) == 0, (name, tile)
            assert name == "forward" or not tile.apart
            assert by % (16 if tensor else 8) == 0, (name, tile)
            assert max(own, by) <= 128, "to which rows are padded in the backward"
            assert device == "cpu" or tiles.shared(name, tile, problem) <= (where.shared_memory or 0), (name, tile)
        assert chosen.splits >= 1
        assert chosen.splits == 1 or problem.seq_k > (chosen.splits - 1) * chosen.forward.keys


def test_few_queries_are_split_over_the_gpu_and_many_are_not() -> None:
    h200 = Device.named("h200")

    def splits(text: str) -> int:
        return int(next(config.configs(Problem.parse(text), h200)).splits)

    assert 8 * splits("b1.h32/8.s1x131072.d128.bf16") in range(120, 133)
    assert splits("b8.h32/8.s1x8192.d128.bf16") == 2
    assert splits("b4.h16.s2048.d128.bf16") == 1
    assert splits("b1.h8.s1x64.d128.bf16") == 1
    assert next(config.configs(Problem.parse("b4.h16.s1024.d128.bf16"), Device.named("a100"))).splits == 1


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        # Two splits each once, and slower for it: 116, 105 and 63 us on an H200, whose other kernels took 44, 42, 48.
        ("b4.h16.s199.d64.fp32", False),
        ("b4.h12.s191.d128.fp32.causal", False),
        ("b2.h8/4.s155.d128.bf16.mask=bf16:hqk", False),
        ("b1.h8.s4000.d64.bf16.mask=bf16:hqk", False),
        ("b1.h8.s128x8192.d64.fp32", True),
        ("b1.h8.s128x8192.d64.bf16.mask=bf16:hqk", True),
        ("b2.h32/8.s8x8192.d128.bf16", True),
    ],
)
def test_parts_are_put_together_only_where_that_is_sooner_done(text: str, splits: bool) -> None:
    """A launch reads the parts of every row again: with many rows and few tiles of keys, what is gained is lost."""
    chosen, *others = config.configs(Problem.parse(text), Device.named("h200"))
    assert (chosen.splits > 1) == splits
    assert replace(chosen, splits=1) in (chosen, *others)


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize(
    "text", ["b1.h32/8.s1x131072.d128.bf16", "b11.h32/8.s1x16384.d128.bf16", "b50.h64/8.s1x16384.d64.bf16"]
)
def test_decoding_leaves_few_multiprocessors_without_work(text: str, device: str) -> None:
    problem, where = Problem.parse(text), Device.named(device)
    chosen = next(config.configs(problem, where))
    blocks = problem.batch * problem.heads_kv * chosen.splits
    at_once = where.sms * (where.shared_memory // tiles.shared("forward", chosen.forward, problem))
    assert blocks / (-(-blocks // at_once) * at_once) > 0.85


def test_warps_are_apart_where_rows_are_few() -> None:
    def chosen(text: str) -> Any:
        return next(config.configs(Problem.parse(text), Device.named("h200")))

    assert chosen("b16.h32/8.s1x8192.d128.bf16").forward.teams == 8
    assert chosen("b200.h32/8.s1x100.d128.bf16").forward.teams == 4, "rounds of short blocks overlap"
    assert chosen("b16.h32/8.s8x8192.d128.bf16").forward.teams == 1
    assert str(chosen("b16.h32/8.s1x8192.d128.bf16").forward) == "16x16 w8 s3 r1 apart"


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("b63.h8.s1x1355.d128.fp32", "4x8 w8 s3 r1 apart"),
        ("b8.h64/8.s1x4096.d128.fp32", "8x8 w8 s3 r1 apart"),
        ("b20.h4.s1x1329.d256.fp32", "4x8 w6 s2 r1 apart"),
        ("b59.h16.s1x383.d64.fp32", "4x16 w4 s3 r1 apart"),
        ("b1.h4.s13x9329.d128.fp32", "16x8 w8 s3 r1 apart"),
        ("b20.h4.s1x1329.d128.fp64", "4x8 w6 s2 r1 apart"),
    ],
)
def test_the_ordinary_units_compute_few_rows_that_are_not_there(text: str, tile: str) -> None:
    """Tiles of 16 rows took 1.3 to 4 times as long for one query on an H200."""
    assert str(next(config.configs(Problem.parse(text), Device.named("h200"))).forward) == tile


def test_many_splits_are_merged_by_a_launch_of_their_own() -> None:
    def split(text: str) -> int:
        chosen = next(config.configs(Problem.parse(text), Device.named("h200")))
        return int(splits.how(chosen.forward, chosen.splits))

    assert split("b16.h32/8.s1x8192.d128.bf16") == splits.WHOLE
    assert split("b1.h32/8.s1x8192.d128.bf16") == splits.MERGED
    assert split("b1.h8/1.s1x131072.d128.bf16") == splits.PARTS
    assert split("b1.h32/8.s8x32768.d128.bf16") == splits.PARTS, "rows are too many for one block"


@pytest.mark.parametrize(
    ("dim", "dtype", "padded"),
    [(1, "bfloat16", 16), (72, "float16", 80), (256, "bfloat16", 256), (33, "float32", 64), (17, "float64", 32)],
)
def test_head_dimensions_are_padded_to_steps(dim: int, dtype: str, padded: int) -> None:
    assert tiles.block(dim, PLAIN.replace(dtype=dtype), tiles.Tile(64, 64, 4, 1)) == padded


# -- launches ----------------------------------------------------------------------------------------------------------


class Driver:
    """libcuda, which notes launches: a thread has no context until it has called CUDA's runtime."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.freed: list[int] = []

    def free(self, address: int) -> None:
        self.freed.append(address)

    def cuLaunchKernelEx(self, at: int, function: int, parameters: int, extra: None) -> int:  # noqa: N802 - CUDA's name
        if not self.freed:
            return 201
        given = libcuda._Config.from_address(at)
        attributes = [(given.attributes[n].id, given.attributes[n].value[0]) for n in range(given.count)]
        passed = list((ctypes.c_void_p * 4).from_address(parameters))
        sizes = tuple(given.grid), tuple(given.block), given.shared, given.stream
        self.launched.append((function, *sizes, passed, attributes))
        return 0 if given.grid[0] < 9 else 1

    def cuGetErrorName(self, result: int, said: Any) -> int:  # noqa: N802 - as above
        said._obj.value = f"CUDA_ERROR_{result}".encode()
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(libcuda, "_library", lambda: made)
    monkeypatch.setattr(pytest.importorskip("cupy_backends.cuda.api.runtime"), "free", made.free)
    monkeypatch.setattr(run.memory, "on_cpu", lambda _: False)
    monkeypatch.setattr(run.memory, "stream", lambda _: 17)
    monkeypatch.setattr(run.memory, "index", lambda _: 3)
    monkeypatch.setattr(run, "loaded", lambda what, index: 1000 + index)
    return made


def variant_of(kernel: str) -> Any:
    module = importlib.import_module("attnswitch.backends.cuda.compiling.variant")
    return module.Variant(kernel, "float32", warps=4, shared=7)


def test_a_launch_passes_the_addresses_of_maps_and_arguments(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy_backends")
    asked: list[Any] = []

    def blank(size: int, like: Any, stream: int) -> Any:
        asked.append((size, stream))
        return run.workspace.Places(4096, size, None)

    monkeypatch.setattr(run.workspace, "blank", blank)
    a = importlib.import_module("attnswitch.backends.cuda.launching.arguments").Arguments(batch=3, scale=0.5)
    run.start(variant_of("merge"), 0, a, None, (), True)
    assert (driver.launched, asked) == ([], [])
    run.start(variant_of("merge"), 5, a, None)
    launch = (1003, (5, 1, 1), (128, 1, 1), 7, 17)
    assert driver.launched == [(*launch, [ctypes.addressof(a), None, None, None], [])]
    maps = [type("Map", (), {"pointer": pointer}) for pointer in (64, 128)]
    run.start(variant_of("merge"), 5, a, None, maps, True)
    assert driver.launched[1] == (*launch, [64, 128, ctypes.addressof(a), None], [])
    assert (asked, a.counter) == ([(4, 17)], 4096)
    assert driver.freed == [0]  # once, for a context


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_beside_another_says_so(driver: Driver, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver knows how; the kernel waits by itself in either case."""
    pytest.importorskip("cupy_backends")
    monkeypatch.setattr(run, "_overlaps", lambda: overlaps)
    driver.free(0)
    a = importlib.import_module("attnswitch.backends.cuda.launching.arguments").Arguments(batch=3)
    run.start(variant_of("forward"), 5, a, None, beside=True)
    parameters, attributes = [ctypes.addressof(a), None, None, None], [(6, 1)] * overlaps
    assert driver.launched == [(1003, (5, 1, 1), (128, 1, 1), 7, 17, parameters, attributes)]
    with pytest.raises(libcuda.DriverError, match="cuLaunchKernelEx: CUDA_ERROR_1"):
        run.start(variant_of("forward"), 9, a, None, beside=True)


def test_the_structures_are_as_large_as_those_of_cuda() -> None:
    """64-bit systems: CUlaunchConfig and CUlaunchAttribute of cuda.h."""
    assert ctypes.sizeof(libcuda._Attribute) == 72
    assert ctypes.sizeof(libcuda._Config) == 56
    assert libcuda._Attribute.value.offset == 8
    assert [getattr(libcuda._Config, name).offset for name in ("stream", "attributes", "count")] == [32, 40, 48]
    bindings = pytest.importorskip("cuda.bindings.driver")
    assert bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6
    kinds = bindings.CUtensorMapDataType
    assert libcuda._TYPES == {
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }
    assert bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE == libcuda._INTERLEAVE
    assert bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B == libcuda._SWIZZLE
    assert bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B == libcuda._PROMOTION
    assert bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE == libcuda._FILL
    attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert attribute == libcuda._MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT == libcuda._INVALID_CONTEXT


# -- launches, emulated ------------------------------------------------------------------------------------------------

SIZES = {"batch": 2, "heads": 4, "heads_kv": 2, "queries": 37, "keys": 53, "dim": 24, "dim_v": 40}
DTYPES = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}


def operands(dtype: str = "float32", **sizes: int) -> tuple[Any, Any, Any]:
    s = {**SIZES, **sizes}
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (s["batch"], s["heads"], s["queries"], s["dim"]),
        (s["batch"], s["heads_kv"], s["keys"], s["dim"]),
        (s["batch"], s["heads_kv"], s["keys"], s["dim_v"]),
    )
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    kind = getattr(torch, dtype)
    return q.to(kind), k.to(kind), v.to(kind)


def compare(arrays: Any, tolerance: float, mask: Any = None, **options: Any) -> None:
    """Output, lse and every gradient beside ``tiled`` in float64."""
    results = []
    for name, wide in (("cuda", False), ("tiled", True)):
        given = [array.detach().to(torch.float64) if wide else array.detach() for array in arrays]
        given = [array.requires_grad_() for array in given]
        extra: dict[str, Any] = (
            {} if mask is None else {"attn_mask": (mask.double() if wide and mask.is_floating_point() else mask)}
        )
        grads = list(given)
        if mask is not None and mask.is_floating_point():
            extra["attn_mask"] = extra["attn_mask"].detach().requires_grad_()
            grads.append(extra["attn_mask"])
        query, key, value = given
        out, lse = attnswitch.attention(query, key, value, return_lse=True, backend=name, **extra, **options)
        generator = torch.Generator().manual_seed(2)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        upstream_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
        alive = torch.isfinite(lse)
        total = (out * upstream).sum() + (torch.where(alive, lse, 0) * upstream_lse).sum()
        results.append([out.detach(), torch.where(alive, lse, -7.0).detach(), *torch.autograd.grad(total, grads)])
    for got, expected in zip(*results, strict=True):
        size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * size)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("lies", ["expanded", "every other", "reversed"])
def test_however_a_gradient_lies_its_kernels_are_those_that_were_listed(lies: str, variants: list[Any]) -> None:
    """As that of a sum, which is one number everywhere: nothing is compiled for it."""
    query, key, value = (x.requires_grad_() for x in operands())
    out = attnswitch.attention(query, key, value, backend="cuda")
    dense = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    upstream = {
        "expanded": torch.ones(()).expand(out.shape),
        "every other": torch.stack((dense, dense), -1).flatten(-2)[..., ::2],
        "reversed": dense.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }[lies]
    found = torch.autograd.grad(out, (query, key, value), upstream)
    plain = attnswitch.attention(query, key, value, backend="tiled")
    for gradient, expected in zip(
        found, torch.autograd.grad(plain, (query, key, value), upstream.clone()), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-5)
    p = attnswitch.Problem.parse("b2.h4/2.s37x53.d24/40.fp32.grad")
    cpu = Device.parse("cpu")
    kernel: Any = backend.CudaBackend().compile(p, cpu, next(backend.CudaBackend().configs(p, cpu)))
    assert set(variants) <= set(kernel.variants())


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_alignment": "bottom_right", "window": (20, None), "key_lengths": [53, 30]},
        {"softcap": 2.0, "scale": -0.3, "dropout_p": 0.3, "seed": 2**40 + 7},
        {"dropout_p": 1.0, "seed": 3},
    ],
    ids=["plain", "positions", "softcap-dropout", "all-dropped"],
)
def test_results_are_those_of_the_tiled_backend(dtype: str, options: dict[str, Any]) -> None:
    compare(operands(dtype), DTYPES[dtype], **options)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["bool", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (53,), (37, 1), (2, 1, 1, 53), (1, 4, 37, 1), (1, 1, 1, 1)], ids=str)
def test_masks_of_every_type_and_shape(kind: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(shape, generator=generator)
    mask = drawn < 0.5 if kind == "bool" else drawn.to(getattr(torch, kind))
    compare(operands(), {"float16": 2e-3, "bfloat16": 2e-2}.get(kind, 1e-5), mask)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "columns", "pairs"),
    [
        ("bool", slice(0, 53), True),
        ("bool", slice(1, 54), False),  # aligned to a byte alone
        ("bool", slice(0, 106, 2), False),
        ("bfloat16", slice(0, 53), True),
        ("bfloat16", slice(1, 54), False),
        ("float32", slice(0, 53), True),
        ("float32", slice(1, 54), False),
        ("float32", slice(0, 106, 2), False),
        ("float64", slice(0, 53), False),  # 16 bytes
    ],
)
def test_masks_are_loaded_in_pairs_where_they_are_aligned(
    dtype: str, kind: str, columns: slice, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.randn((4, 38, 112), generator=torch.Generator().manual_seed(3))
    mask = (drawn < 0.5 if kind == "bool" else drawn.to(getattr(torch, kind)))[..., columns]
    used, launch = list[dict[str, int]](), emulator.launch

    def noted(variant: Any, *rest: Any) -> None:
        used.append(dict(variant.flags))
        launch(variant, *rest)

    monkeypatch.setattr(emulator, "launch", noted)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(kind, DTYPES[dtype])
    compare(operands(dtype, queries=38), tolerance, mask)  # of an odd number Hopper's forward takes a bool mask
    assert {flags["MASK_PAIRS"] for flags in used if flags.get("MASK_KIND")} == {pairs and dtype == "bfloat16"}


@compiled
@pytest.mark.usefixtures("emulated")
def test_hidden_by_a_float_mask() -> None:
    mask = torch.zeros(37, 53)
    mask[:, 10:20] = -torch.inf
    mask[5] = -torch.inf
    compare(operands(), 1e-5, mask)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("window", [(0, 16), (3, 0), (None, 5)])
def test_a_split_that_the_window_leaves_nothing_of(window: tuple[int | None, int]) -> None:
    """With a padding mask, whose hull of nothing is nothing."""
    arrays = operands(queries=1, keys=64)
    compare(arrays, 1e-5, torch.linspace(-1, 1, 64), window=window)
    compare(arrays, 1e-5, torch.arange(64) % 3 > 0, window=window)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("queries", [1, 37, 70])
def test_the_least_number_in_all_of_a_row_hides_nothing(queries: int) -> None:
    q, k, v = operands(queries=queries)
    out = attnswitch.attention(q, k, v, attn_mask=torch.full((53,), torch.finfo(torch.float32).min), backend="cuda")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"queries": 1, "keys": 300, "heads": 8},  # split, with the heads of a group in one tile
        {"queries": 3, "keys": 130, "heads": 2, "dim": 5, "dim_v": 3},
        {"queries": 0},
        {"keys": 0},
        {"batch": 0},
        {"dim": 256, "dim_v": 130, "queries": 17, "keys": 33},
    ],
    ids=str,
)
def test_sizes(dtype: str, sizes: dict[str, int]) -> None:
    compare(operands(dtype, **sizes), DTYPES[dtype], is_causal=sizes.get("queries", 9) > 1)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_the_gradients_that_are_asked_for(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[Any] = []
    start = run.start

    def record(variant: Any, *rest: Any, **more: Any) -> None:
        names.append(variant)
        start(variant, *rest, **more)

    monkeypatch.setattr(run, "start", record)
    arrays = operands()
    leaves = [array.requires_grad_(letter in wanted) for letter, array in zip("qkv", arrays, strict=True)]
    out = attnswitch.attention(*leaves, backend="cuda")
    found = torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf.requires_grad])
    again = [leaf.detach().requires_grad_() for leaf in leaves]
    every = torch.autograd.grad(attnswitch.attention(*again, backend="cuda").sum(), again)
    expected = [grad for letter, grad in zip("qkv", every, strict=True) if letter in wanted]
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got, right)
    first = [variant.kernel for variant in names[: names.index(next(v for v in names[1:] if v.kernel == "forward"), 1)]]
    assert ("query_gradient" in first) == ("q" in wanted)
    assert ("key_gradients" in first) == bool({"k", "v"} & set(wanted))


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("mask", [None, torch.randn(9, 9)])
@pytest.mark.parametrize("lse", [False, True])
def test_gradients_of_calls_like_one_before(layout: str, mask: torch.Tensor | None, lse: bool) -> None:
    def step() -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        extra = None if mask is None else mask.clone().requires_grad_()
        found = attnswitch.attention(*leaves, attn_mask=extra, layout=layout, return_lse=lse, backend="cuda")
        total = sum(tensor.sum() for tensor in (found if lse else (found,)))
        wanted = leaves if extra is None else [*leaves, extra]
        return [*(found if lse else (found,)), *torch.autograd.grad(total, wanted)]

    given = [torch.randn(1, 9, 9, 16) for _ in range(3)]
    first = step()  # through every step
    for _ in range(2):
        for one, other in zip(step(), first, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_strides(dtype: str) -> None:
    """Turned, sliced, expanded and offset operands give the bits that plain ones give, in the portable kernels."""
    q, k, v = operands(dtype, queries=20)  # of odd numbers Hopper's kernels take those that lie plainly
    plain = attnswitch.attention(q, k, v, backend="cuda")

    def offset(array: Any, by: int) -> Any:
        room = torch.full((array.numel() + by,), torch.nan, dtype=array.dtype)
        room[by:] = array.flatten()
        return room[by:].view(array.shape)

    def turned(array: Any) -> Any:
        return array.mT.contiguous().mT

    def sliced(array: Any) -> Any:
        room = torch.full((*array.shape[:3], 2 * array.shape[3]), torch.nan, dtype=array.dtype)
        room[..., ::2] = array
        return room[..., ::2]

    changes: list[Callable[[Any], Any]] = [turned, sliced, *(partial(offset, by=by) for by in (1, 2, 4))]
    for change in changes:
        arrays = [change(array) for array in (q, k, v)]
        assert torch.equal(attnswitch.attention(*arrays, backend="cuda"), plain)
    one = k[:, :1].expand(-1, 2, -1, -1)
    both = attnswitch.attention(q, one.contiguous(), v, backend="cuda")
    assert torch.equal(attnswitch.attention(q, one, v, backend="cuda"), both)


@compiled
@pytest.mark.usefixtures("emulated")
def test_numpy_arrays_may_run_backwards() -> None:
    q, k, v = (array.numpy() for array in operands())
    plain = attnswitch.attention(q, k, v, backend="cuda")
    back = [np.ascontiguousarray(array[..., ::-1, ::-1])[..., ::-1, ::-1] for array in (q, k, v)]
    assert all(array.strides[3] < 0 for array in back)
    found = attnswitch.attention(*back, backend="cuda")
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, plain)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("role", ["query", "key", "value", "attn_mask"])
def test_rows_that_run_backwards_from_an_aligned_address(role: str, dtype: str) -> None:
    q, k, v = (array.numpy() for array in operands(dtype, heads=2, dim=17, dim_v=17))
    mask = np.random.default_rng(0).standard_normal((2, 2, 37, 53)).astype("float32")
    call = {"query": q, "key": k, "value": v, "attn_mask": mask}
    plain = attnswitch.attention(**call, backend="cuda")
    call[role], _ = place(call[role].astype("float64"), str(call[role].dtype), "mirrored", "numpy", "cpu")
    np.testing.assert_array_equal(attnswitch.attention(**call, backend="cuda"), plain)


@compiled
@pytest.mark.usefixtures("emulated")
def test_lengths_of_every_integer_type() -> None:
    q, k, v = operands(batch=4)
    values = [53, 0, 17, 1]
    expected = attnswitch.attention(q, k, v, key_lengths=values, backend="cuda")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        lengths = torch.tensor(values).to(getattr(torch, name))
        apart = torch.tensor([n for value in values for n in (value, 99)]).to(getattr(torch, name))[::2]
        for given in (lengths, apart):
            assert torch.equal(attnswitch.attention(q, k, v, key_lengths=given, backend="cuda"), expected), name


@compiled
@pytest.mark.usefixtures("emulated")
def test_saved_results_may_lie_anyhow() -> None:
    q, k, v = (array.numpy() for array in operands())
    out, lse = attnswitch.attention(q, k, v, return_lse=True, backend="cuda")
    upstream = np.ones_like(out)
    plain = attnswitch.attention_backward(upstream, q, k, v, out=out, lse=lse, backend="cuda")

    def turned(array: Any) -> Any:
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)

    found = attnswitch.attention_backward(turned(upstream), q, k, v, out=turned(out), lse=turned(lse), backend="cuda")
    for got, expected in zip(found[:3], plain[:3], strict=True):
        np.testing.assert_array_equal(got, expected)


@compiled
@pytest.mark.usefixtures("emulated")
def test_sections_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few heads run side by side, each is done once."""
    arrays = operands(batch=3, heads=6)
    plain = attnswitch.attention(*arrays, is_causal=True, backend="cuda")
    for section in (1, 2, 4, 5):
        monkeypatch.setattr(arithmetic, "heads_a_section", lambda *_, section=section, **__: section)
        forget()
        compare(arrays, DTYPES["float32"], is_causal=True)
        assert torch.equal(attnswitch.attention(*arrays, is_causal=True, backend="cuda"), plain)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("warps", "stages", "rows"), [(1, 1, 32), (2, 2, 32), (4, 3, 64), (1, 3, 16)])
def test_tiles_change_nothing_but_rounding(
    dtype: str, warps: int, stages: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = tiles.Tile(rows, 32, warps, stages)
    turned = tiles.Tile(32, rows, warps, stages)
    chosen = config.CudaConfig(tile, turned, tile, replace(tile, stages=1))
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    forget()
    compare(operands(dtype), DTYPES[dtype], is_causal=True, dropout_p=0.25, seed=9)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("warps", "stages", "rows"), [(5, 1, 16), (2, 3, 32), (4, 2, 16)])
@pytest.mark.parametrize(("parts", "most"), [(1, 24), (3, 24), (3, 2)], ids=["whole", "merged", "parts"])
def test_warps_apart_change_nothing_but_rounding(
    dtype: str, warps: int, stages: int, rows: int, parts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in several tiles, warps and splits without a tile of keys, and rows that see nothing."""
    other = tiles.Tile(32, 32, 1, 1)
    chosen = config.CudaConfig(tiles.Tile(rows, 16, warps, stages, apart=True), other, other, other, splits=parts)
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    monkeypatch.setattr(splits, "_MOST_MERGED", most)
    forget()
    arrays, lengths = operands(dtype), torch.tensor([0, 50])
    compare(arrays, DTYPES[dtype], causal_alignment="bottom_right", is_causal=True, key_lengths=lengths)
    compare(arrays, DTYPES[dtype], dropout_p=0.25, seed=9)
    first, again = (attnswitch.attention(*arrays, key_lengths=lengths, backend="cuda") for _ in range(2))
    assert torch.equal(first, again)


@compiled
@pytest.mark.usefixtures("emulated")
def test_uniform_weights_are_exact_over_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "generic", lambda *_, **__: False)  # whose keys are never split
    q, k, v = operands(queries=1, keys=64, dim=16)
    v = torch.round(v * 4)
    found = attnswitch.attention(torch.zeros_like(q), k, v, backend="cuda")
    assert next(config.configs(Problem.parse("b2.h4/2.s1x64.d16/40.fp32"), Device.cpu())).splits > 1
    assert torch.equal(found, v.mean(2, keepdim=True).repeat_interleave(2, 1))


@compiled
@pytest.mark.usefixtures("emulated")
def test_output_lies_as_query_does() -> None:
    q, k, v = operands()
    inside = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attnswitch.attention(inside, k, v, backend="cuda").transpose(1, 2).is_contiguous()
    assert attnswitch.attention(q, k, v, backend="cuda").is_contiguous()


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("turned", ["", "q", "k", "qv", "qkv"])
def test_gradients_lie_as_operands_do(turned: str) -> None:
    plain = operands()
    grad = torch.randn(*plain[0].shape[:3], plain[2].shape[3])
    given = [
        x.swapaxes(1, 2).contiguous().swapaxes(1, 2) if n in turned else x for n, x in zip("qkv", plain, strict=True)
    ]
    expected = attnswitch.attention_backward(grad, *plain, is_causal=True, backend="reference")
    found = attnswitch.attention_backward(grad, *given, is_causal=True, backend="cuda")
    for name, ours, theirs in zip("qkv", found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours is not None
        assert (ours.swapaxes(1, 2) if name in turned else ours).is_contiguous()


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"is_causal": True}, (0, 64)),
        ({"window": (10, 3)}, (0, 96)),
        ({"window": (0, 0), "causal_alignment": "bottom_right"}, (96, 160)),
        ({"key_lengths": [90]}, (0, 90)),
        ({"attn_mask": "padding"}, (64, 128)),
    ],
    ids=str,
)
def test_tiles_that_hide_everything_are_not_loaded(dtype: str, options: dict[str, Any], seen: tuple[int, int]) -> None:
    """NaN in them would show: it is left to the kernels here to keep away from it."""
    q, k, v = operands(dtype, batch=1, queries=64, keys=160)
    if "attn_mask" in options:
        mask = torch.zeros(160, dtype=torch.bool)
        mask[70:100] = True
        options = {"attn_mask": mask}
    for array in (k, v):
        array[:, :, : seen[0]] = torch.nan
        array[:, :, seen[1] :] = torch.nan
    leaves = [array.requires_grad_() for array in (q, k, v)]
    with finite.checking("never"):
        out = attnswitch.attention(*leaves, backend="cuda", **options)
    assert torch.isfinite(out).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert torch.isfinite(grad).all()
