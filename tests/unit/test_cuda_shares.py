"""Blocks that share the steps of one tile of gradients: how many do, and that their sums are right and repeat."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch import Problem
from attnswitch.call import attend
from attnswitch.machine.device import Device
from attnswitch.planning import planner

config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
kernel = importlib.import_module("attnswitch.backends.cuda.kernel")
shares = importlib.import_module("attnswitch.backends.cuda.portable.shares")

H200 = Device.named("h200")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


def launched(text: str, device: Device = H200) -> dict[str, tuple[int, int]]:
    """Blocks and splits of every launch of a portable backward."""
    p = Problem.parse(text)
    chosen = next(c for c in config.configs(p, device) if c.backward is None)
    made = kernel.CudaKernel(p, chosen, device)._backward
    return {step.variant.kernel: (step.blocks, step.splits) for step in made.steps}


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("b8.h1.s10862x28.d80.fp32.mask=bool.dropout=0.1.grad", "key_gradients"),
        ("b2.h12/3.s9307x233.d64.fp32.mask=bool.grad", "key_gradients"),
        ("b3.h4.s11662x30.d64.bf16.mask=bool.grad", "key_gradients"),
        ("b8.h1.s28x10862.d80.fp32.mask=bool.grad", "query_gradient"),
        ("b1.h32/8.s1x8192.d128.bf16.mask=bool.grad", "query_gradient"),
    ],
)
def test_few_blocks_with_long_ways_are_shared_by_as_many_as_run(text: str, shared: str) -> None:
    found = launched(text)
    blocks, splits = found[shared]
    assert splits > 1
    assert 0.9 * H200.sms <= blocks <= 4 * 4 * H200.sms
    assert found["add_parts"][1] == splits
    (other,) = {"key_gradients", "query_gradient"} - {shared}
    assert found[other][1] == 1


@pytest.mark.parametrize(
    "text",
    [
        "b8.h16.s2048.d64.fp32.mask=bool.grad",  # as many blocks as there is room for, many times
        "b1.h2.s40.d64.bf16.grad.mask=bool",  # next to nothing to do
        "b1.h1.s9000x30.d64.bf16.varlen.grad",
    ],
)
def test_others_are_not(text: str) -> None:
    assert {splits for _, splits in launched(text).values()} == {1}


@pytest.mark.parametrize(
    "text", ["b1.h1.s667x1.d1/4.fp16.grad", "b3.h1.s901x7.d3/5.fp32.grad", "b1.h1.s900x7.d3.fp64.grad"]
)
def test_parts_begin_where_vectors_do(text: str) -> None:
    """And each has room for what every block leaves (fixtures/corpus/own-cuda-parts-of-value.json)."""
    p = Problem.parse(text)
    made = kernel.CudaKernel(p, next(c for c in config.configs(p, H200) if c.backward is None), H200)._backward
    size = 8 if p.dtype == "float64" else 4
    (by_keys,) = {step.splits for step in made.steps if step.variant.kernel == "key_gradients"}
    assert by_keys > 1
    assert not any(begin % 16 for begin in made.begins)
    _, _, of_values, of_keys = (n // size for n in made.begins)
    rows = p.batch * p.heads_kv * p.seq_k
    assert of_keys - of_values >= by_keys * rows * p.dim_v
    assert made.space - of_keys >= by_keys * rows * p.dim_qk


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(emulator.VARIABLE, "1")
    planner.forget()
    attend.forget()
    yield
    planner.forget()
    attend.forget()


def gradients(arrays: list[Any], backend: str, **call: Any) -> tuple[Any, ...]:
    """Of arrays q, k, v and the output's gradient."""
    *operands, grad = arrays
    out, lse = attnswitch.attention(*operands, return_lse=True, backend=backend, **call)
    found = attnswitch.attention_backward(grad, *operands, out=out, lse=lse, backend=backend, **call)
    return tuple(found[:3])


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("b2.h4/2.s201x20.d64.fp32.grad", {}),
        ("b2.h4/2.s201x20.d64.fp32.lengths.grad", {"key_lengths": [7, 20]}),
        ("b2.h2.s201x70.d128.fp32.causal.grad", {"is_causal": True}),  # a launch each for keys and values
        ("b1.h2.s21x301.d40/24.fp16.softcap=5.dropout=0.1.grad", {"softcap": 5.0, "dropout_p": 0.1, "seed": 7}),
    ],
)
def test_what_is_added_up_is_right_and_repeats(text: str, call: dict[str, Any], turned: bool) -> None:
    p = Problem.parse(text)
    assert next(config.configs(p, Device.cpu())).backward is None
    assert launched(text, Device.cpu())["add_parts"][1] > 1
    rng = np.random.default_rng(3)
    by_query, by_key = (p.batch, p.heads_q, p.seq_q), (p.batch, p.heads_kv, p.seq_k)
    shapes = (*by_query, p.dim_qk), (*by_key, p.dim_qk), (*by_key, p.dim_v), (*by_query, p.dim_v)
    arrays = [rng.standard_normal(shape).astype(p.dtype) for shape in shapes]
    right = gradients([x.astype("f8") for x in arrays], "reference", **call)
    if turned:
        arrays = [np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2) for x in arrays]
    got, again = gradients(arrays, "cuda", **call), gradients(arrays, "cuda", **call)
    for name, mine, repeated, wanted in zip("qkv", got, again, right, strict=True):
        assert np.array_equal(mine, repeated)
        error = np.abs(mine.astype("f8") - wanted).max() / np.abs(wanted).max()
        assert error <= (2e-6 if p.dtype == "float32" else 2e-3), name


RECORD = json.loads((Path(__file__).parents[2] / "fixtures/results/h200/shares.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("found", RECORD["problems"], ids=lambda found: found["problem"])
def test_as_many_share_as_were_fastest(found: dict[str, Any]) -> None:
    """Of what was measured, within a tenth and 5 us; and the choice is still that one."""
    p = Problem.parse(found["problem"])
    chosen = next(c for c in config.configs(p, H200) if c.backward is None)
    kernels = ("query_gradient", chosen.query_gradient), ("key_gradients", chosen.key_gradients)
    assert [shares.shares(name, p, H200, tile) for name, tile in kernels] == found["shares"]
    times = found["milliseconds"]
    assert times["chosen"] <= 1.1 * min(times.values()) + 0.005
    assert all(difference < 0.2 for difference in found["difference"].values())
