"""What torch's operators are told: all that says something, and no more."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

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
