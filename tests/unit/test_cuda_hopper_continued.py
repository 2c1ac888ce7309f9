"""Hopper's backward where blocks go on with other keys: when they do, and, emulated, what two such blocks compute."""

from __future__ import annotations

import importlib
from dataclasses import replace

import nights
import numpy as np
import pytest
import test_cuda_hopper_backward as one_by_one

from attnswitch import Problem
from attnswitch.machine.device import Device

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
config = importlib.import_module("attnswitch.backends.cuda.config")

H200 = Device.named("h200")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


@pytest.mark.parametrize(
    ("text", "going_on"),
    [
        # By what both took on an H200 (backends/cuda/TRIED.md).
        ("b64.h12.s197.d64.bf16.grad", True),
        ("b3.h64.s25x4389.d64.bf16.grad", True),
        ("b16.h16.s1024.d64.bf16.causal.grad", True),
        ("b8.h16.s4096.d64.bf16.window=256,0.grad", True),
        ("b1.h16.s16384.d64.bf16.grad", True),
        ("b1.h16.s16384.d64.bf16.causal.grad", False),
        ("b2.h16.s777.d64.bf16.causal.grad", False),
        ("b4.h32/4.s2048.d64.bf16.causal.grad", False),  # whose queries are split among blocks
        # Where tiles of keys take as long as lengths or a mask say.
        ("b64.h12.s197.d64.bf16.lengths.grad", False),
        ("b64.h12.s197.d64.bf16.mask=bool.grad", False),
        # No more blocks than SMs.
        ("b1.h8.s2000.d64.bf16.grad", False),
        # Registers or shared memory hold no more.
        ("b64.h12.s128.d128.bf16.grad", False),
        ("b64.h12.s197.d64.bf16.mask=bf16:hqk.grad", False),
        ("b64.h12.s197.d64.bf16.grad.deterministic", False),
    ],
)
def test_blocks_go_on_where_that_is_faster(text: str, going_on: bool) -> None:
    chosen = next(config.configs(Problem.parse(text), H200))
    assert chosen.backward.continued is going_on


def test_tune_measures_both() -> None:
    configs = config.configs(Problem.parse("b64.h12.s197.d64.bf16.grad"), H200)
    assert {next(configs).backward.continued, next(configs).backward.continued} == {True, False}


def test_there_are_as_many_blocks_as_sms() -> None:
    p = Problem.parse("b64.h12.s197.d64.bf16.grad")
    _, computes, finishes = backward.Backward(p, replace(choice.gradients(p), continued=True), H200).steps
    assert computes.blocks == 132
    assert finishes.awaited == 2


# -- emulated ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks go on with other keys."""
    taken = choice.gradients
    monkeypatch.setattr(choice, "gradients", lambda p: replace(taken(p), continued=True))


@compiled
@pytest.mark.usefixtures("going_on")
@pytest.mark.parametrize(
    ("text", "parts"),
    nights.some(
        [
            ("b1.h2.s150x600.d64.bf16.grad", 1),
            ("b2.h4/2.s25x700.d64.fp16.causal.grad", 1),  # most keys are seen by no query
            ("b1.h2.s300x400.d64.fp16.causal-br.grad", 2),
            ("b2.h2.s70x300.d72.bf16.window=40,3.grad", 1),
            ("b1.h2.s100x400.d32.fp16.softcap=3.0.grad", 1),
        ]
    ),
)
def test_gradients_are_right(text: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one.compare(text, parts, monkeypatch)


@compiled
@pytest.mark.usefixtures("going_on")
def test_what_lies_past_the_lengths_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "b3.h2.s100x400.d64.bf16.lengths.causal-br.grad"
    one_by_one.compare(text, 1, monkeypatch, lengths=[130, 0, 400])


@compiled
@pytest.mark.usefixtures("going_on")
def test_masks_hide_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.random.default_rng(5).random((1, 1, 150, 400)) < 0.5
    mask[..., 100:300] = False
    one_by_one.compare("b2.h2.s150x400.d64.bf16.mask=bool:qk.grad", 1, monkeypatch, mask)
