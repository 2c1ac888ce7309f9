"""What a problem costs: the arithmetic against figures from papers and against counting, and the command."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from typing import get_args

import numpy as np
import pytest

from attnswitch import Device, Problem
from attnswitch.bench import traffic
from attnswitch.bench.estimate import Peak, estimate, published
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.machine.device import KNOWN
from attnswitch.problem import Alignment, cost
from attnswitch.verify import Case
from attnswitch.verify.truth.oracle import visible_positions

MIB = 2**20
HEAD = Problem.parse("b1.h1.s4096.d128.fp16")


def test_the_worked_figures_of_flash_attention() -> None:
    """N 4096, D 128, fp16, one head: four arrays of 1 MiB, four passes over scores of 32 MiB."""
    assert traffic.standard_bytes(HEAD) == 132 * MIB
    assert cost.least_bytes(HEAD) == 4 * MIB
    assert 4.4e6 < traffic.sram_bytes(HEAD, 228 * 1024) < traffic.sram_bytes(HEAD, 100_000) < 11e6
    assert cost.flops(HEAD) == 4 * 4096**2 * 128
    assert traffic.extra_standard(HEAD) == 64 * MIB
    assert cost.extra_tiled(HEAD) == 4096 * 4


def test_tiles_without_a_cache_read_the_keys_each() -> None:
    assert traffic.tiled_bytes(HEAD, 4096) == 4 * MIB + 4096 * 4
    assert traffic.tiled_bytes(HEAD, 128) == (2 + 32 * 2) * MIB + 4096 * 4
    grouped = Problem.parse("b2.h8/2.s64x4096.d128.fp16")
    assert traffic.tiled_bytes(grouped, 64) - traffic.tiled_bytes(grouped.replace(heads_kv=8), 64) == 0


@pytest.mark.parametrize("options", ["", ".mask=bf16:hqk", ".mask=bool:bk"])
def test_the_backward_moves_each_array_once_at_least(options: str) -> None:
    problem = Problem.parse(f"b2.h4/2.s8x16.d32/64.bf16{options}")
    q, k, v, out = 2 * 4 * 8 * 32, 2 * 2 * 16 * 32, 2 * 2 * 16 * 64, 2 * 4 * 8 * 64
    mask = {"": 0, ".mask=bf16:hqk": 4 * 8 * 16 * 2, ".mask=bool:bk": 2 * 16}[options]
    assert cost.least_bytes(problem) == 2 * (q + k + v + out) + mask
    assert cost.least_bytes(problem, backward=True) == 2 * (2 * (q + k + v) + 2 * out) + mask
    scores = 2 * 4 * 8 * 16 * 2
    assert traffic.standard_bytes(problem, backward=True) - cost.least_bytes(problem, backward=True) == 7 * scores


@pytest.mark.parametrize("sizes", ["s7x7", "s5x12", "s12x5", "s1x9", "s0x4"])
@pytest.mark.parametrize(
    "hiding", ["", ".causal", ".causal-br", ".window=2,1", ".bottom-right.window=3,*", ".causal.window=2,0"]
)
def test_the_visible_share_is_what_is_counted(sizes: str, hiding: str) -> None:
    problem = Problem.parse(f"b1.h1.{sizes}.d8.fp32{hiding}")
    if problem.is_empty:
        assert cost.visible(problem) == 1.0
        return
    seen = visible_positions(Case.of(problem), None)
    assert cost.visible(problem) == pytest.approx(np.broadcast_to(seen, (1, 1, problem.seq_q, problem.seq_k)).mean())


def test_the_visible_share_is_exact() -> None:
    """Every pair counted one by one, of all short lengths, alignments and windows."""
    sides = (None, 0, 1, 2, 4, 6)
    for lq, lk, causal in itertools.product(range(1, 6), range(1, 6), (False, True)):
        for alignment, left, right in itertools.product(get_args(Alignment), sides, sides):
            window = (left, right)
            problem = Problem(1, 1, 1, lq, lk, 8, 8, "float32", causal=causal, alignment=alignment, window=window)
            shift = lk - lq if alignment == "bottom_right" else 0
            distances = [j - i - shift for i in range(lq) for j in range(lk)]
            above = 0 if causal else right
            seen = [(above is None or d <= above) and (left is None or d >= -left) for d in distances]
            assert cost.visible(problem) == sum(seen) / (lq * lk), problem


@pytest.mark.parametrize(
    ("hiding", "seen"),
    [
        ("causal", 10**7 * (10**7 + 1) // 2),
        ("causal-br", 10**7 * 2 * 10**7 - 10**7 * (10**7 - 1) // 2),
        ("window=100,7", 10**7 * 108 - 100 * 101 // 2),
        ("bottom-right.window=100,7", 10**7 * 108 - 7 * 8 // 2),
    ],
)
def test_the_visible_share_of_a_long_call_takes_no_time(hiding: str, seen: int) -> None:
    problem = Problem.parse(f"b1.h1.s{10**7}x{2 * 10**7}.d64.fp16.{hiding}")
    start = time.perf_counter()
    assert cost.visible(problem) == seen / (2 * 10**14)
    assert time.perf_counter() - start < 0.5


def test_the_roofline_is_the_slower_of_the_two() -> None:
    assert traffic.roofline(1e12, 1e6, tflops=1.0, gbps=1000.0) == 1000.0
    assert traffic.roofline(1e6, 1e12, tflops=1.0, gbps=1000.0) == 1000.0
    found = estimate(HEAD, Device.named("h200"), Peak(100.0, 1000.0, "here")).forward
    assert found.ms == pytest.approx(4 * 4096**2 * 128 / 100e9)
    assert found.ms_standard == pytest.approx(132 * MIB / 1e9)
    assert found.intensity == 2048


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_device_has_a_data_sheet(name: str) -> None:
    device = Device.named(name)
    half, single, double = (published(device, dtype) for dtype in ("float16", "float32", "float64"))
    assert half is not None
    assert single is not None
    assert double is not None
    assert half.tflops > single.tflops > double.tflops > 0
    bf16 = published(device, "bfloat16")
    assert bf16 is not None
    assert bf16.tflops == (half.tflops if device.capability >= (8, 0) else single.tflops)  # type: ignore[operator]


def test_a_device_as_its_driver_names_it() -> None:
    def rate(name: str) -> float | None:
        peak = published(Device("cuda", name), "bfloat16")
        return None if peak is None else peak.tflops

    assert rate("NVIDIA H200") == rate("NVIDIA H100 80GB HBM3") == 989.4
    assert rate("NVIDIA A100-SXM4-80GB") == 312.0
    assert rate("Tesla V100-SXM2-32GB") == 15.7
    assert rate("NVIDIA GeForce RTX 4090") == 165.2
    assert rate("NVIDIA L40S") == 362.0
    assert rate("NVIDIA L4") == 121.0
    assert rate("Tesla T4") == 8.1
    assert published(Device.cpu(), "float32") is None


@pytest.mark.parametrize(
    "name",
    [
        *("Unheard", "L40", "L40G", "T400 4GB", "T4G", "A10G", "A100-PCIE-40GB", "A100-SXM4-40GB", "A100 80GB PCIe"),
        *("H100 PCIe", "H100 NVL", "H200 NVL", "H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-PCIE-16GB", "B2000"),
        *("GeForce RTX 3090 Ti", "GeForce RTX 4090 D", "GeForce RTX 4090 Laptop GPU"),
    ],
)
def test_a_device_that_is_called_almost_alike_is_another(name: str) -> None:
    assert published(Device("cuda", f"NVIDIA {name}"), "float16") is None


def test_tiles_of_backends_fit_what_the_device_has() -> None:
    device = Device.named("h200")
    found = estimate(Problem.parse("b1.h8.s4096.d128.bf16.grad"), device, None)
    told = {tile.backend for tile in found.tiles}
    assert "cuda" in told
    portable = {"forward", "key_gradients", "query_gradient"}
    for name, kernels in {"cuda": {"forward", "backward"}, "triton": portable}.items():
        if name in told:
            assert {tile.role for tile in found.tiles if tile.backend == name} == kernels, name
    assert all(0 < tile.shared <= device.shared_memory for tile in found.tiles)
    assert found.backward is not None
    assert found.backward.ms is None
    every = estimate(found.problem, device, None, configs=True).tiles
    assert set(found.tiles) < set(every)
    assert len(every) == len(set(every)) > 2 * len(found.tiles)


#: Kernels without tiles, or of others' tiles.
BESIDE = {"prepare", "prepare_added", "finish", "merge", "survey", "add_parts"}


@pytest.mark.parametrize("device", ["h200", "a100", "rtx4090"])
@pytest.mark.parametrize("more", ["", ".grad", ".mask=bf16:hqk.grad=qkvm"])
@pytest.mark.parametrize("sizes", ["b1.h8.s4096.d128.bf16", "b2.h8/2.s1x4096.d64.fp16", "b1.h4.s100.d40.fp32"])
def test_shared_memory_is_what_the_kernels_take(sizes: str, more: str, device: str) -> None:
    problem, where = Problem.parse(sizes + more), Device.named(device)
    backend = registry.load("cuda")
    assert isinstance(backend, Backend)
    config = next(backend.configs(problem, where))
    taken: dict[str, set[int]] = {}
    for variant in backend.compile(problem, where, config).variants():  # type: ignore[attr-defined]
        taken.setdefault(variant.kernel, set()).add(variant.shared)
    told = [tile for tile in estimate(problem, where, None).tiles if tile.backend == "cuda"]
    assert {tile.role for tile in told} == taken.keys() - BESIDE
    assert all(taken[tile.role] == {tile.shared} for tile in told)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["attnswitch", "estimate", *arguments])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as end:
        importlib.import_module("attnswitch.cli.app").main()
    return int(end.value.code or 0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, str(HEAD), "--device", "h200") == 0
    out = capsys.readouterr().out
    assert "132 MiB" in out
    assert "4 MiB" in out
    assert "data sheet of the H200" in out
    assert run(monkeypatch, f"{HEAD}.causal.grad", "--device", "h200", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["forward"]["standard"] == 132 * MIB
    assert document["visible"] == pytest.approx(0.5, abs=1e-3)
    assert document["backward"]["flops"] == 2.5 * document["forward"]["flops"]


def test_a_device_that_is_here_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "b1.h1.s64.d8.fp32", "--device", "cpu", "--json") == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    assert peak["source"] == "measured here, with a float32 matrix product and a copy"
    assert peak["tflops"] > 0
    assert run(monkeypatch, "b1.h1.s64.d8.fp32", "--device", "h200", "--measured") == 2
    assert "is not in this machine" in capsys.readouterr().err
    assert run(monkeypatch, "b1.h1.s64.d8.fp32", "--device", "CPU") == 0


def test_a_length_that_no_array_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, f"b1.h1.s{10**330}.d8.fp32", "--device", "h200") == 2
    assert "no array is as long" in capsys.readouterr().err
    most = 2**63 - 1
    assert run(monkeypatch, f"b{most}.h{most}.s{most}.d{most}.fp64.causal.grad", "--device", "h200") == 0
