"""Dropout in Hopper's backward, emulated, beside all that changes weights before it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hopper_forms import KEYS, QUERIES, compare, shown

import attnswitch

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")

pytestmark = [
    pytest.mark.usefixtures("emulated"),
    pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++"),
]
#: Added to scores: of all queries, and of each, with whole rows that see nothing.
_ADDED = torch.from_numpy(np.random.default_rng(2).standard_normal((4, QUERIES, KEYS))).half()
_ADDED[:, :9] = -torch.inf
CASES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0, "is_causal": True, "causal_alignment": "bottom_right"},
    "lengths": {"key_lengths": [0, 40]},
    "bool mask": {"attn_mask": shown(), "window": (60, 9)},
    "float mask": {"attn_mask": _ADDED},
    "float mask and softcap": {"attn_mask": _ADDED, "softcap": 3.0},
    "a row of a float mask": {"attn_mask": _ADDED[:, 20:21]},
    "sinks": {"sinks": torch.tensor((0.5, -3.0, 2.0, 1e4))},
}


def _exact(given: Any) -> Any:
    """As the reference takes it beside operands of float64."""
    return given.double() if isinstance(given, torch.Tensor) and given.is_floating_point() else given


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_of_the_weights_that_are_kept(name: str, dim: int, variants: list[Any]) -> None:
    options = {**CASES[name], "dropout_p": 0.25, "seed": 2**40 + 9}
    exact = {said: _exact(given) for said, given in options.items()}
    compare(dim, {"alibi_slopes": torch.tensor((0.0, 0.5, 1.0, -0.03))} if "mask" not in name else {}, options, exact)
    assert "backward" in [each.kernel for each in variants]


def test_where_nothing_is_kept_gradients_are_0() -> None:
    operands = [torch.randn(1, 2, size, 64).half().requires_grad_() for size in (QUERIES, KEYS, KEYS)]
    out = attnswitch.attention(*operands, dropout_p=1.0, seed=3, backend="cuda")
    assert not out.any()
    for gradient in torch.autograd.grad(out, operands, torch.ones_like(out)):
        assert not gradient.any()
