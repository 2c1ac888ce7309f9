"""Dropout whose forward is made again: without gradients at first, then with them, from one state of the generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnswitch
from attnswitch import Device, Problem
from attnswitch.planning import planner
from attnswitch.planning.choice import Basis
from attnswitch.planning.policy import Policy

DROPOUT = [
    f"b{b}.h8.s{s}.d{d}.{dtype}.dropout=0.1{rest}"
    for b, s, d, dtype in ((3, 33, 80, "fp16"), (8, 777, 64, "fp16"), (5, 128, 32, "bf16"), (2, 2048, 128, "fp32"))
    for rest in ("", ".causal", ".mask=bool:bk")
]


@pytest.mark.parametrize("policy", [Policy.ESTIMATE, Policy.LEARN])
@pytest.mark.parametrize("device", ["h200", "h100", "cpu"])
@pytest.mark.parametrize("text", DROPOUT)
def test_both_forwards_have_one_backend(text: str, device: str, policy: Policy) -> None:
    problem, where = Problem.parse(text), Device.named(device)
    alone = planner.make_plan(problem, where, None, policy)
    training = planner.make_plan(problem.replace(grads="qkv"), where, None, policy)
    assert alone.backend == training.backend == planner.choose(problem, where, None, policy).backend
    assert alone.basis is Basis.ALONG
    assert not alone.open, "what is measured of the forward alone changes no choice"


def test_a_seed_says_the_mask_whoever_makes_it() -> None:
    problem = Problem.parse("b8.h8.s777.d64.fp16.dropout=0.1.seeded")
    assert planner.make_plan(problem, Device.named("h200")).basis is not Basis.ALONG


def test_a_backend_that_is_named_is_taken() -> None:
    plan = planner.make_plan(Problem.parse("b8.h8.s777.d64.fp16.dropout=0.1"), Device.named("h200"), "triton")
    assert (plan.backend, plan.basis) == ("triton", Basis.FORCED)


def test_the_reason_is_told() -> None:
    plan = attnswitch.explain("b8.h8.s777.d64.fp16.dropout=0.1", device="h200")
    assert "as with gradients" in plan.why
    others = [plan.why_not(each) for each in plan.candidates if each.fits and each is not plan.chosen]
    assert others
    assert all(f"goes to {plan.backend}" in reasons[0] for reasons in others)


def places() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("way", ["reentrant", "saved tensors", "compiled"])
@pytest.mark.parametrize("device", places())
@pytest.mark.parametrize("rows", [64, 256])
def test_gradients_have_the_mask_of_the_output(way: str, device: str, rows: int) -> None:
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}

    def attend(*operands: torch.Tensor) -> Any:
        return attnswitch.attention(*operands, dropout_p=0.3, is_causal=True)

    def call(*operands: torch.Tensor) -> Any:
        return checkpoint(attend, *operands, use_reentrant=way == "reentrant")

    run = torch.compile(call, backend="aot_eager") if way == "compiled" else call
    for _ in range(2):
        query, key, value = (torch.randn(2, 4, rows, 64, **kind, requires_grad=True) for _ in range(3))
        upstream = torch.randn(2, 4, rows, 64, **kind)
        out = run(query, key, value)
        out.backward(upstream)
        assert value.grad is not None
        # The output is linear in the values: <out, upstream> = <value, gradient> where both have one mask.
        left, right = ((x.double() * y.double()).sum().item() for x, y in ((out, upstream), (value, value.grad)))
        assert left == pytest.approx(right, abs=1.0)
