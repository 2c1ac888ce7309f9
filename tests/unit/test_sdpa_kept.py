"""What hides by position and length, kept from call to call: the same answers, and made once."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs

kept = importlib.import_module("attnswitch.backends.sdpa.kept")
masks = importlib.import_module("attnswitch.backends.sdpa.masks")

HOW: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right", "window": (5, 2)}


@pytest.fixture(autouse=True)
def fresh() -> None:
    kept._composed.cache_clear()


def operands(batch: int = 2, length: int = 24, grad: bool = False) -> list[Any]:
    return [torch.randn(batch, 3, length, 8, requires_grad=grad) for _ in range(3)]


def hits() -> int:
    found: int = kept._composed.cache_info().hits
    return found


def test_the_layers_of_a_model_make_it_once() -> None:
    lengths = torch.tensor([24, 7])
    for _ in range(5):
        q, k, v = operands()
        out = attnswitch.attention(q, k, v, key_lengths=lengths, backend="sdpa-flash", **HOW)
        right = attnswitch.attention(q, k, v, key_lengths=lengths, backend="reference", **HOW)
        torch.testing.assert_close(out, right)
    assert kept._composed.cache_info().misses == 1
    assert hits() == 4


def test_lengths_that_are_changed_in_place_are_other_lengths() -> None:
    lengths = torch.tensor([24, 7])
    q, k, v = operands()
    for changed in ([24, 7], [3, 24], [0, 1], [24, 7]):
        lengths.copy_(torch.tensor(changed))
        for given in (lengths, lengths.to(torch.uint8), changed):
            out = attnswitch.attention(q, k, v, key_lengths=given, backend="sdpa-flash")
            torch.testing.assert_close(out, attnswitch.attention(q, k, v, key_lengths=changed, backend="reference"))
    assert hits() > 0


def test_what_inference_mode_made_serves_a_training_step() -> None:
    with torch.inference_mode():
        attnswitch.attention(*operands(), key_lengths=[24, 9], backend="sdpa-flash")
    for _ in range(2):
        given = operands(grad=True)
        out = attnswitch.attention(*given, key_lengths=[24, 9], backend="sdpa-flash")
        found = torch.autograd.grad(out.square().sum(), given)
        again = attnswitch.attention(*given, key_lengths=[24, 9], backend="sdpa-math")
        torch.testing.assert_close(found, torch.autograd.grad(again.square().sum(), given))


@pytest.mark.parametrize("text", ["b1.h1.s300x300.d8.fp32.causal-br", "b2.h1.s24.d8.fp32.mask=bool.lengths"])
def test_large_masks_and_those_of_the_caller_are_not_kept(text: str) -> None:
    problem = Problem.parse(text)

    def compose(inputs: Inputs, *, lifted: bool = False) -> Any:
        raise NotImplementedError

    assert kept.kept(problem, compose) is compose
    small = Problem.parse("b2.h1.s24.d8.fp32.lengths")
    assert kept.kept(small, compose) is not compose
