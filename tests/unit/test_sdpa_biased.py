"""The launch of torch's operators with an additive mask, by shapes alone: neither runs on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.device import Device

biased = importlib.import_module("attnswitch.backends.sdpa.biased")
masks = importlib.import_module("attnswitch.backends.sdpa.masks")

OPERATORS: dict[str, Any] = {
    "cudnn": torch._scaled_dot_product_cudnn_attention,
    "efficient": torch._scaled_dot_product_efficient_attention,
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lse", ["", ".lse"])
@pytest.mark.parametrize("name", OPERATORS)
def test_output_and_lse_have_the_shapes_of_the_contract(name: str, lse: str, masked: bool) -> None:
    """70 queries: one operator pads their lse to a multiple of 32, the other gives it a last axis."""
    problem = Problem.parse(f"b2.h3.s70x50.d64/32.bf16{lse}")
    operands = (torch.empty(2, 3, n, d, dtype=torch.bfloat16, device="meta") for n, d in ((70, 64), (50, 64), (50, 32)))
    mask = torch.ones(2, 1, 1, 50, dtype=torch.bool, device="meta") if masked else None
    given: list[tuple[torch.Tensor | None, bool]] = []

    def operator(*passed: Any, **more: float) -> tuple[torch.Tensor, ...]:
        given.append(passed[3:5])
        found: tuple[torch.Tensor, ...] = OPERATORS[name](*passed, **more)
        return found

    out, found = biased.launcher(problem, operator)(masks.Hiding(mask))(*operands)
    assert out.shape == (2, 3, 70, 32)
    assert (found is None) == (not lse)
    assert found is None or found.shape == (2, 3, 70)
    ((added, with_lse),) = given
    assert (None if added is None else added.shape) == ((2, 3, 70, 50) if masked else None)
    assert with_lse is bool(lse)


@pytest.mark.parametrize(("text", "always", "expected"), [("", False, False), (".grad", False, True), ("", True, True)])
def test_lse_is_computed_only_where_something_needs_it(text: str, always: bool, expected: bool) -> None:
    problem = Problem.parse(f"b1.h1.s8.d64.bf16{text}")
    asked: list[bool] = []

    def operator(query: torch.Tensor, key: object, value: object, bias: object, with_lse: bool) -> Any:
        asked.append(with_lse)
        return query, None

    biased.launcher(problem, operator, always_lse=always)(masks.Hiding())(*torch.zeros(3, 1, 1, 8, 64))
    assert asked == [expected]


@pytest.mark.parametrize(
    ("text", "torch_version", "expected"),
    [
        ("", (2, 14), False),
        (".k=expanded", (2, 14), True),
        (".v=expanded", (2, 14), True),
        (".k=expanded", (2, 15), False),
    ],
)
def test_the_efficient_operator_computes_lse_where_it_would_misread_without(
    text: str, torch_version: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    efficient = importlib.import_module("attnswitch.backends.sdpa.efficient")
    asked: list[bool] = []
    monkeypatch.setattr(efficient, "version", lambda *_: torch_version)
    monkeypatch.setattr(efficient.biased, "launcher", lambda *_, always_lse: asked.append(always_lse))
    efficient.EfficientBackend().launcher(Problem.parse(f"b1.h2.s8.d64.bf16{text}"), Device.named("h200"))
    assert asked == [expected]
