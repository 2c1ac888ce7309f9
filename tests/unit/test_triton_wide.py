"""Heads of more than 256 columns, which the Triton kernels take in panels: interpreted, beside the reference.

The checks run in one process that has TRITON_INTERPRET=1: see ``interpreting``.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import interpreting
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.device import Device

pytest.importorskip("triton", "3.6")
pytestmark = pytest.mark.slow

backend = importlib.import_module("attnswitch.backends.triton.backend")
config = importlib.import_module("attnswitch.backends.triton.config")

SERVING = Path(__file__).parents[2] / "fixtures" / "results" / "h200" / "bench-serving.json"


@dataclass(frozen=True)
class Case:
    """A call of few queries and keys, which is two tiles of either, and the widths of its heads."""

    dims: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    mask: str = ""
    heads: tuple[int, int] = (2, 1)
    lengths: tuple[int, int] = (33, 19)
    dtype: torch.dtype = torch.float32
    grads: bool = True


BOTTOM: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
CASES = {
    "whole panels": Case((384, 384), {"is_causal": True}),
    "a part of a panel": Case((260, 290), {"window": (5, 9), "key_lengths": [7]}),
    "a narrow value": Case((300, 40), BOTTOM),
    "a narrow key": Case((24, 257)),
    "bool mask": Case((264, 264), mask="bool"),
    "float mask": Case((264, 264), mask="float"),
    "float mask of -1e9": Case((264, 264), mask="saturated"),
    "softcap, bfloat16": Case((512, 512), {"softcap": 3.0}, dtype=torch.bfloat16),
    "dropout": Case((272, 264), {"dropout_p": 0.3, "seed": 5}),
    "decoding of latent heads": Case((576, 512), BOTTOM, heads=(4, 1), lengths=(2, 70), grads=False),
}
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def masked(case: Case, draw: torch.Generator) -> torch.Tensor | None:
    shape = 1, case.heads[0], *case.lengths
    if case.mask == "bool":
        return torch.rand(shape, generator=draw) < 0.5
    if case.mask == "saturated":
        return -1e9 - 1e9 * (torch.rand(shape, generator=draw) < 0.5).float()
    return torch.randn(shape, generator=draw) if case.mask else None


def results(name: str, case: Case) -> list[torch.Tensor]:
    """Output, lse and gradients, those of lse included."""
    draw = torch.Generator().manual_seed(0)
    (heads, heads_kv), (rows, keys), (dim, dim_v) = case.heads, case.lengths, case.dims
    sizes = (heads, rows, dim), (heads_kv, keys, dim), (heads_kv, keys, dim_v)
    leaves = [torch.randn(1, *size, generator=draw).to(case.dtype).requires_grad_(case.grads) for size in sizes]
    mask = masked(case, draw)
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_(case.grads))
    out, lse = attnswitch.attention(*leaves[:3], attn_mask=mask, return_lse=True, backend=name, **case.options)
    if not case.grads:
        return [out, lse]
    upstream = torch.randn(out.shape, generator=draw).to(case.dtype), torch.randn(lse.shape, generator=draw)
    of_lse = torch.where(lse == -math.inf, 0.0, upstream[1])
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (upstream[0], of_lse))]


def check(case: Case) -> None:
    names = ("out", "lse", "dq", "dk", "dv", "dmask")
    for what, got, wanted in zip(names, results("triton", case), results("tiled", case), strict=False):
        near = NEAR[case.dtype]
        torch.testing.assert_close(got, wanted, rtol=near, atol=near, msg=f"{what}: {got} is not {wanted}")


INTERPRETED: dict[str, Callable[[], None]] = {name: functools.partial(check, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each of the checks raised, "" for nothing; skips where this interpreter does not work."""
    return interpreting.raised(__file__)


@pytest.mark.parametrize("name", list(CASES))
def test_it_agrees_with_tiled(name: str, raised: dict[str, str]) -> None:
    assert raised[name] == "", raised[name]


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_what_it_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreting.VARIABLE, raising=False)
    made = backend.TritonBackend()
    for dims in ("576/512", "512", "257/8"):
        problem = Problem.parse(f"b2.h8/2.s512.d{dims}.bf16.mask=bf16:hqk.lengths.softcap=3.0.grad=qkvm")
        assert made.supports(problem, Device.named(device)) == ()
        assert not next(config.configs(problem, Device.named(device))).forward.generic
    wider = Problem.parse("b2.h8.s512.d577.bf16")
    assert made.supports(wider, Device.named(device)) == tuple(
        f"{name}=577: head dimensions are tried up to 576" for name in ("dim_qk", "dim_v")
    )


def test_an_untimed_kernel_stands_behind_one_that_was_timed() -> None:
    """Forecasts rest on narrower heads, whose kernels are others; Hopper's of wide heads takes the first."""
    assert attnswitch.plan("b4.h16.s2048.d512.bf16.causal", device="h200").backend == "cuda"
    masked = attnswitch.plan("b4.h16.s2048.d512.bf16.causal.mask=bool", device="h200")
    assert masked.backend == "sdpa-efficient"
    # Chosen with its gradients: b2.h8.s4096.d224.bf16.dropout=0.25.grad takes sdpa-efficient 19.2 ms, triton 4.9.
    assert attnswitch.plan("b4.h16.s2048.d512.bf16.causal.dropout=0.1", device="h200").backend == "triton"
    assert attnswitch.plan("b4.h16.s2048.d512.bf16.causal.softcap=30.0.grad", device="h200").backend == "triton"


def test_training_of_wide_heads_is_of_whom_was_the_faster_on_an_h200() -> None:
    """torch's own call, which is ``sdpa-efficient`` there, and triton, by a file that the forecast is not made of."""
    problem, times = "b2.h8.s4096.d512.bf16.causal", {"torch": 0.0, "triton": 0.0}
    for record in json.loads(SERVING.read_text(encoding="utf-8"))["records"]:
        if record["problem"] == problem and record["candidate"] in times:
            times[record["candidate"]] += record["ms"]
    assert times["triton"] < 0.9 * times["torch"]
    assert attnswitch.plan(f"{problem}.grad", device="h200").backend == "triton"


if __name__ == "__main__":
    interpreting.tell(INTERPRETED)
