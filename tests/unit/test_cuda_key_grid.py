"""Keys that no query sees: their gradients are zeros that are filled in, and the grid of blocks leaves them out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

key_grid = importlib.import_module("attnswitch.backends.cuda.launching.key_grid")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
config = importlib.import_module("attnswitch.backends.cuda.config")
kernel = importlib.import_module("attnswitch.backends.cuda.kernel")
fused = importlib.import_module("attnswitch.backends.cuda.fused.backward")
hopper = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
hopper_choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
memory = importlib.import_module("attnswitch.backends.cuda.launching.memory")
tiles = importlib.import_module("attnswitch.backends.cuda.fused.tiles")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")
LARGE = "b42.h12.s17x2873.d256.fp16.causal.grad"


def seen_by_some(p: Problem) -> int:
    """How many keys there are up to the last one that a query sees, counted one by one."""
    left, right = p.reach
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    i, j = np.arange(p.seq_q)[:, None] + offset, np.arange(p.seq_k)
    seen = np.ones((p.seq_q, p.seq_k), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    (columns,) = np.nonzero(seen.any(0))
    return int(columns[-1]) + 1 if columns.size else 0


@pytest.mark.parametrize("sizes", [(17, 2873), (30, 31), (31, 30), (1, 90)])
@pytest.mark.parametrize("how", ["", ".causal", ".window=4,9", ".causal.window=5,0", ".window=3,*", ".causal-br"])
def test_the_keys_that_are_seen_are_counted(sizes: tuple[int, int], how: str) -> None:
    p = Problem.parse(f"b1.h1.s{sizes[0]}x{sizes[1]}.d8.fp32{how}.grad")
    assert key_grid.seen_keys(p) == seen_by_some(p)


def test_lengths_may_leave_fewer() -> None:
    """They are not known here: the kernels look, and keys that count from the last may all be seen."""
    assert key_grid.seen_keys(Problem.parse("b2.h1.s17x90.d8.fp32.causal.lengths")) == 17
    assert key_grid.seen_keys(Problem.parse("b2.h1.s17x90.d8.fp32.causal-br.lengths")) == 90


def test_many_blocks_without_a_query_are_left_out() -> None:
    p = Problem.parse(LARGE)
    assert key_grid.key_grid(p, 64, 7) == (42 * 12, 42 * 12, True)
    assert hopper.Backward(p, hopper_choice.gradients(p), H200).steps[1].blocks == 42 * 12


@pytest.mark.parametrize(
    ("change", "splits"),
    [
        ({}, 2),  # parts are added up for every key
        ({"causal": False}, 1),
        ({"alignment": "bottom_right"}, 1),
        ({"batch": 1, "heads_q": 1, "heads_kv": 1}, 1),  # few blocks
        ({"seq_q": 1500}, 1),  # half of the keys are seen
    ],
)
def test_else_the_grid_is_whole(change: dict[str, Any], splits: int) -> None:
    p = Problem.parse(LARGE).replace(**change)
    assert key_grid.key_grid(p, 64, 7, splits) == (p.batch * p.heads_kv * 45 * splits, 7, False)


# -- in the emulator ---------------------------------------------------------------------------------------------------


def by_hopper(p: Problem) -> Any:
    return hopper.Backward(p, hopper_choice.gradients(p), Device.cpu())


def by_fused(p: Problem) -> Any:
    return fused.Backward(p, tiles.FusedTile(128, 64))


def by_portable(p: Problem) -> Any:
    device = Device.cpu()
    return kernel._backward(p, next(config.configs(p, device)), device)


def made(p: Problem, turned: bool) -> tuple[Inputs, Any, Any, Any]:
    """Inputs, output, lse and upstream gradients; heads lie inside of positions if ``turned``."""
    rng = np.random.default_rng(3)
    dtype = ml_dtypes.bfloat16 if p.dtype == "bfloat16" else p.dtype

    def array(heads: int, length: int, dim: int) -> Any:
        if turned:
            return rng.standard_normal((p.batch, length, heads, dim)).astype(dtype).swapaxes(1, 2)
        return rng.standard_normal((p.batch, heads, length, dim)).astype(dtype)

    query, grad = (array(p.heads_q, p.seq_q, dim) for dim in (p.dim_qk, p.dim_v))
    key, value = (array(p.heads_kv, p.seq_k, dim) for dim in (p.dim_qk, p.dim_v))
    lengths = np.array([p.seq_k // (b + 1) for b in range(p.batch)]) if p.key_lengths else None
    exact = [x.astype(np.float64) for x in (query, key, value)]
    say: dict[str, Any] = {
        "is_causal": p.causal,
        "window": p.window,
        "key_lengths": lengths,
        "causal_alignment": p.alignment,
    }
    out, lse = attnswitch.attention(*exact, return_lse=True, backend="reference", **say)
    return Inputs(query, key, value, None, lengths), out.astype(dtype), lse.astype(np.float32), grad


FAMILIES: dict[str, tuple[Callable[[Problem], Any], str]] = {
    "hopper": (by_hopper, "b2.h4/2.s70x600.d64.bf16.causal.grad"),
    "hopper, lengths": (by_hopper, "b2.h2.s70x600.d64.bf16.causal.lengths.grad"),
    "hopper, window": (by_hopper, "b1.h2.s70x600.d128.bf16.window=40,9.grad"),
    "hopper, in turn": (by_hopper, "b2.h4/2.s140x600.d64.bf16.causal.grad.deterministic"),
    "hopper, halved": (by_hopper, "b1.h2.s70x600.d192/128.bf16.causal.grad"),
    "hopper, wide": (by_hopper, "b1.h2.s70x300.d256.bf16.causal.grad"),
    "fused": (by_fused, "b2.h4/2.s70x600.d32.fp32.causal.grad"),
    "portable": (by_portable, "b2.h4/2.s20x300.d32.fp32.causal.grad"),
    "portable, of values": (by_portable, "b1.h2.s20x300.d32.bf16.causal.lengths.grad=qv"),
}


@compiled
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradients_are_the_same_on_a_smaller_grid(name: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    family, text = FAMILIES[name]
    p = Problem.parse(text)
    inputs, out, lse, grad = made(p, turned)
    monkeypatch.setattr(hopper, "splits", lambda *_: 1)  # so few blocks would share their queries
    whole = family(p)
    monkeypatch.setattr(key_grid, "_BLOCKS", 1)
    some = family(p)
    fewer = [each.blocks for each in some.steps] < [each.blocks for each in whole.steps]
    assert (whole.clears, some.clears, fewer) == (False, True, True)
    one, other = (launch(inputs, out, lse, grad, None) for launch in (whole, some))
    for letter, expected, got in zip("qkv", one[:3], other[:3], strict=True):
        if expected is None:
            assert letter not in p.grads
            assert got is None
        elif letter == "q":  # blocks may add to it in any order
            np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=3e-2)
        else:
            assert np.abs(expected.astype(np.float32)).max() > 0.1
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_tensors_are_cleared_however_they_lie() -> None:
    for array in (torch.ones(2, 3, 4, 5).swapaxes(1, 2), np.ones((2, 3, 4, 5)).swapaxes(1, 2)):
        memory.clear(array)
        assert not array.any()
