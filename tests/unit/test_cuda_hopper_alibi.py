"""ALiBi in Hopper's forward and backward, emulated: scores fall with the distance."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hopper_forms import compare, shown

import attnswitch
from attnswitch import Problem
from attnswitch.machine.device import Device

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")

H200 = Device.named("h200")
emulated = pytest.mark.usefixtures("emulated")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
#: As it is called here, with lengths in lists.
attention: Any = attnswitch.attention
#: Of four heads: none, that of a model, one that leaves each row one key, and scores that rise with the distance.
SLOPES = (0.0, 0.5, 300.0, -0.03)


CASES: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal": {"is_causal": True},
    "deterministic": {"deterministic": True, "causal_alignment": "bottom_right"},
    "window": {"is_causal": True, "causal_alignment": "bottom_right", "window": (20, 0)},
    "lengths": {"key_lengths": [0, 40], "softcap": 3.0, "causal_alignment": "bottom_right"},
    "bool mask": {"attn_mask": shown(), "sinks": torch.tensor((-np.inf, 1e4, 0.5, -1e4))},
}


@compiled
@emulated
@pytest.mark.parametrize(
    "dim", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", CASES)
def test_scores_fall_with_the_distance(name: str, dim: int, variants: list[Any]) -> None:
    if (name, dim) == ("deterministic", 256):
        pytest.skip("Hopper's backward refuses it")
    compare(dim, {"alibi_slopes": torch.tensor(SLOPES)}, CASES[name], CASES[name])
    slanted = [each for each in variants if each.kernel.startswith(("forward", "backward"))]
    assert [each.kernel.partition("_")[0] for each in slanted] == ["forward", "backward"]
    assert {(each.family, dict(each.flags)["ALIBI"]) for each in slanted} == {("hopper", 1)}


@compiled
@emulated
def test_each_batch_entry_and_each_sequence_has_its_slopes() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, heads, 131, 64))).half() for heads in (4, 2, 2))
    slopes = torch.from_numpy(rng.random((2, 4))).float()
    exact = attention(q.double(), k.double(), v.double(), alibi_slopes=slopes.double(), backend="reference")
    out = attention(q, k, v, alibi_slopes=slopes, backend="cuda")
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)
    q, k, v = (array.transpose(1, 2).flatten(0, 1) for array in (q, k, v))
    packed = attnswitch.attention_varlen(q, k, v, [0, 131, 262], alibi_slopes=slopes, backend="cuda")
    torch.testing.assert_close(packed.double(), exact.transpose(1, 2).flatten(0, 1), rtol=0, atol=2e-3)


def test_a_float_mask_beside_is_the_portable_kernels() -> None:
    p = Problem.parse("b4.h16.s1024.d128.bf16.mask=bf16.alibi")
    assert [reason for reason in families.against_hopper(p, H200) if "alibi_slopes" in reason]
    assert families.against_hopper(p.replace(mask=None), H200) == ()
    assert families.against_hopper_backward(p.replace(mask=None, grads="q"), H200) == ()
