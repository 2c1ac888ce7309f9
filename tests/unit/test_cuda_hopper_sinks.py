"""Gradients of calls with sinks by Hopper's forward and backward, emulated: its backward knows of them by the lse."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hopper_forms import KEYS, QUERIES, compare, shown

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
pytestmark = [
    pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++"),
    pytest.mark.usefixtures("emulated"),
]
#: Of four heads: one that has none, one above all scores, an ordinary one, one below all.
SINKS = (-np.inf, 1e4, 0.5, -1e4)


def added() -> torch.Tensor:
    """Some rows see nothing, others all keys alike, far from 0."""
    mask = np.random.default_rng(2).standard_normal((4, QUERIES, KEYS + 3))
    mask[:, :9], mask[:, 9:20] = -np.inf, -6e4
    return torch.from_numpy(mask).half()[..., :KEYS]


CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "causal_alignment": "bottom_right", "window": (20, 0)},
    "lengths": {"key_lengths": [0, 40], "softcap": 3.0},
    "deterministic": {"is_causal": True, "deterministic": True},
    "bool mask": {"attn_mask": shown()},
    "float mask": {"attn_mask": added()},
}


@pytest.mark.parametrize(
    "dim", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_reference(name: str, dim: int, variants: list[Any]) -> None:
    if dim == 256 and name in ("deterministic", "float mask"):
        pytest.skip("Hopper's backward refuses it")
    exact = {**CASES[name], **({"attn_mask": added().double()} if name == "float mask" else {})}
    compare(dim, {"sinks": torch.tensor(SINKS, requires_grad=True)}, CASES[name], exact)
    assert {each.family for each in variants if each.kernel.startswith(("forward", "backward"))} == {"hopper"}
    assert [each.kernel.partition("_")[0] for each in variants].count("backward") == 1
