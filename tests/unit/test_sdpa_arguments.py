"""What torch's operators are told: all that says something, and no more."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem

arguments = importlib.import_module("attnswitch.backends.sdpa.arguments")


@pytest.mark.parametrize(
    ("text", "causal", "expected"),
    [
        ("d64", False, {}),
        ("d64", True, {"is_causal": True}),
        ("d64.dropout=0.5", False, {"dropout_p": 0.5}),
        ("d64.dropout=0.5", True, {"dropout_p": 0.5, "is_causal": True}),
        ("d64.scale=0.125", False, {"scale": 0.125}),
        ("d64.scale=0", True, {"is_causal": True, "scale": 0.0}),
        ("d36", False, {"scale": 36**-0.5}),  # by default that of 40, to which it is padded
    ],
)
def test_what_says_nothing_is_left_out(text: str, causal: bool, expected: dict[str, Any]) -> None:
    call = arguments.told(lambda *given, **named: (given, named), Problem.parse(f"b1.h1.s8.{text}.fp32"), causal)
    assert call(1, 2) == ((1, 2), expected)


@pytest.mark.parametrize("backend", ["sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize("dim", [3, 8, 24, 32, 40, 128])
def test_the_default_scale_is_torchs_to_the_bit(backend: str, dim: int) -> None:
    """1 / sqrt(D), and not D ** -0.5: left out, written out here, or left to torch, it gives the same bits."""
    query, key, value = torch.randn(3, 1, 2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale = Problem.parse(f"b1.h2.s5.d{dim}.fp64").softmax_scale
    left_out = attnswitch.attention(query, key, value, backend=backend)
    written = attnswitch.attention(query, key, value, backend=backend, scale=scale)
    assert torch.equal(left_out, written)
    assert scale == 1.0 / math.sqrt(dim)
