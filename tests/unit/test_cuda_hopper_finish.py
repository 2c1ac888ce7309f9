"""Hopper's backward: the launch that finishes waits for the blocks that add to its rows, which count themselves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import ml_dtypes
import mutated
import numpy as np
import pytest

from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")

H200 = Device.named("h200")
#: Some key heads, which as many blocks work on each.
PROBLEMS = (
    "b2.h8/2.s1000.d64.bf16.causal.grad",
    "b1.h4.s300x900.d128.bf16.grad.deterministic",
    "b2.h4.s500.d192/128.bf16.grad",
    "b1.h2.s700.d256.bf16.window=100,0.grad",
    "b42.h12.s17x2873.d256.fp16.causal.grad",
)
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("parts", [1, 3])
def test_each_key_head_is_waited_for_as_often_as_it_has_blocks(
    text: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "splits", lambda *_: parts)
    p = Problem.parse(text)
    *_, computes, finishes = backward.Backward(p, choice.gradients(p), H200).steps
    assert finishes.awaited * p.batch * p.heads_kv == computes.blocks > 0
    assert computes.awaited == 0


@pytest.mark.parametrize("text", PROBLEMS)
def test_counts_lie_between_base_and_delta(text: str) -> None:
    """A number for each key head, which ends where delta begins."""
    p = Problem.parse(text)
    launch = backward.Backward(p, choice.gradients(p), H200)
    rows = launch.steps[0].blocks * 64
    at_base, at_delta, _, _ = launch.begins
    assert at_delta - at_base - 4 * rows >= 4 * p.batch * p.heads_kv


# -- emulated ----------------------------------------------------------------------------------------------------------

UNTOLD = "a barrier is waited for that some threads never reach, or a number that no block has left"
#: What a build lacks, of which kernel, and what the emulator says of it.
MUTANTS = {
    "no block is counted": ("b1.h2.s200.d64.bf16.grad", "backward", "#define count_block(at) ((void)0)", UNTOLD),
    "counted when additions are read": (
        "b1.h1.s200.d256.bf16.grad",
        "backward_wide",
        "#define finish_additions() wait_additions()",
        "a block is counted before its additions are done",
    ),
    "counts are not cleared": (
        "b1.h2.s200.d64.bf16.grad",
        "prepare",
        "#define clear_number(at) ((void)0)",
        "a number is past what",
    ),
}


def launched(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Gradients, where the memory that launches leave to one another was NaN before."""
    p = Problem.parse(text)
    rng = np.random.default_rng(0)
    q, grad = rng.standard_normal((2, p.batch, p.heads_q, p.seq_q, p.dim_qk)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, p.batch, p.heads_kv, p.seq_k, p.dim_qk)).astype(ml_dtypes.bfloat16)
    lse = np.full(q.shape[:3], 6.0, np.float32)
    launch = backward.Backward(p, choice.gradients(p), Device.cpu())
    monkeypatch.setattr(backward.memory, "empty", lambda shape, *_: np.full(shape, np.nan, np.float32))
    return tuple(launch(Inputs(q, k, v), np.zeros_like(q), lse, grad, np.zeros_like(lse))[:3])


@compiled
@pytest.mark.parametrize("name", MUTANTS)
def test_a_part_that_is_missing_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kernel, macro, told = MUTANTS[name]
    mutated.compile_with(kernel, macro, tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match=told):
        launched(text, monkeypatch)
