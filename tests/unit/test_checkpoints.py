"""Dropout whose forward is made again: without gradients at first, then with them, from one state of the generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnswitch
from attnswitch import Device, Problem
from attnswitch.planning import planner, waiting
from attnswitch.planning.choice import Basis
from attnswitch.planning.policy import Policy
from attnswitch.tune.problems import distinct
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time, Verdict
from attnswitch.wisdom.signature import Signature, sign

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
    assert "as for b8.h8.s777.d64.fp16.dropout=0.1.grad" in plan.why
    others = [plan.why_not(each) for each in plan.candidates if each.trusted and each is not plan.chosen]
    assert others
    assert all(f"goes to {plan.backend}" in reasons[0] for reasons in others)


def measured(backend: str, ms: float, text: str, device: Device) -> Time:
    signature = sign(backend, device)
    assert isinstance(signature, Signature)
    return Time(Problem.parse(text), backend, "", ms, ms, ms, 30, 2, signature, "2026-11-20T10:00:00")


def test_whatever_has_a_gradient_the_backend_is_one() -> None:
    """Of a mask that is learned the first forward says nothing."""
    device, text = Device.named("h200"), "b8.h8.s777.d64.fp16.dropout=0.1.mask=fp16:hqk"
    learned = str(Problem.parse(text).replace(grads="qkvm"))
    times, backends = {f"{text}.grad": (1.0, 2.0, 9.0), learned: (3.0, 2.0, 9.0)}, ("sdpa-efficient", "cuda", "triton")
    view.remember(
        [measured(b, ms, of, device) for of, each in times.items() for b, ms in zip(backends, each, strict=True)]
    )
    plans = {g: planner.make_plan(Problem.parse(text).replace(grads=g), device) for g in ("", "q", "qkv", "qkvm")}
    assert {plan.backend for plan in plans.values()} == {"cuda"}


def test_a_fault_is_told_all_the_same() -> None:
    device, text = Device.named("h200"), "b8.h8.s777.d64.fp16.dropout=0.1"
    signature = sign("triton", device)
    assert isinstance(signature, Signature)
    problem, date = Problem.parse(text), "2026-11-20T10:00:00"
    view.remember([Verdict(problem, "triton", False, "a-case.json", "reference: out", signature, date)])
    plan = planner.make_plan(problem, device)
    (reasons,) = (plan.why_not(each) for each in plan.candidates if each.backend == "triton")
    assert "it was wrong on this machine" in reasons[0]


def test_explain_tells_that_the_class_it_goes_along_with_waits() -> None:
    problem, device = Problem.parse("b2.h4.s32.d32.fp32.dropout=0.1"), Device.cpu()
    waiting.add(problem.replace(grads="qkv"), device)
    try:
        plan = planner.make_plan(problem, device, None, Policy.LEARN)
        assert plan.news == waiting.news(problem.replace(grads="qkv"), device) != ""
    finally:
        waiting.forget()


def test_tune_measures_what_the_choice_goes_by() -> None:
    asked = [Problem.parse(f"b2.h4.s256.d64.fp16.dropout=0.1{rest}") for rest in ("", ".grad", ".causal")]
    assert [str(each) for each in distinct(asked)] == [
        "b2.h4.s256.d64.fp16.dropout=0.1.grad",
        "b2.h4.s256.d64.fp16.causal.dropout=0.1.grad",
    ]


def places() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("way", ["reentrant", "saved tensors", "compiled", "reentrant, of compiled"])
@pytest.mark.parametrize("device", places())
@pytest.mark.parametrize("rows", [64, 256])
def test_gradients_have_the_mask_of_the_output(way: str, device: str, rows: int) -> None:
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}

    def attend(*operands: torch.Tensor) -> Any:
        return attnswitch.attention(*operands, dropout_p=0.3, is_causal=True)

    def call(*operands: torch.Tensor) -> Any:
        return checkpoint(layer, *operands, use_reentrant="reentrant" in way)

    layer = torch.compile(attend, backend="aot_eager") if way == "reentrant, of compiled" else attend
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


@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_a_graph_has_one_mask_with_gradients_and_without(form: str) -> None:
    def attend(x: torch.Tensor) -> Any:
        if form == "dense":
            return attnswitch.attention(x, x, x, dropout_p=0.5)
        edges = torch.tensor([0, 20, 64], dtype=torch.int32)
        rows = x[0].transpose(0, 1)
        return attnswitch.attention_varlen(rows, rows, rows, edges, edges, dropout_p=0.5)

    call = torch.compile(attend, backend="aot_eager")
    x = torch.randn(1, 2, 64, 32)
    torch.manual_seed(1)
    alone = call(x)
    torch.manual_seed(1)
    torch.testing.assert_close(call(x.requires_grad_()), alone)
