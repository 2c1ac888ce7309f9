"""Gradients of CUDA calls of any form whose tensors lie alike: the same bits as by the general way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls_alike import check_known, given, inputs_of, order_of

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Gradients, Inputs, Offsets, Order
from attnswitch.machine.device import Device
from attnswitch.planning import planner

backend = importlib.import_module("attnswitch.backends.cuda.backend")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
memory = importlib.import_module("attnswitch.backends.cuda.launching.memory")
pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")


def kernel(text: str, device: Device) -> Any:
    problem, made = Problem.parse(text), backend.CudaBackend()
    return made.compile(problem, device, next(made.configs(problem, device)))


def as_given(inputs: Inputs) -> Inputs:
    """The same as a caller has them, offsets of keys being those of queries where they are left out."""
    query, key, value, mask, lengths, seed, begin, begin_k, *beside = given(inputs)
    offsets = None if begin is None else Offsets(begin, begin if begin_k is None else begin_k)
    return Inputs(query, key, value, mask, lengths, seed, offsets, *beside)


def in_order(grads: Gradients, order: Order) -> list[Any]:
    return [*(None if grad is None else order.of(grad) for grad in grads[:3]), grads.attn_mask]


@pytest.mark.parametrize("lying", ["plain", "heads before rows", "off 16"])
@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cpu", "b3.h4/2.s4x32.d32.bf16.varlen.causal.lse.grad"),
        ("cpu", "b3.h4/2.s4x5.d24/40.fp32.varlen.sinks.alibi.causal-br.grad"),
        ("cpu", "b3.h4/2.s4x5.d16.fp16.varlen.grad=v"),
        ("cpu", "b2.h4/2.s5x9.d16.fp32.alibi.causal.grad"),
        ("cpu", "b2.h4/2.s5x9.d16.fp32.alibi.mask=fp32:qk.grad=qkvm"),
        ("cpu", "b2.h4/2.s5x9.d16.fp32.sinks.mask=fp32:hk.grad=vm"),
        ("h200", "b2.h2.s70x90.d64.bf16.varlen.causal.grad"),
        ("h200", "b2.h4/2.s20x30.d64.fp16.varlen.lse.grad"),
    ],
)
def test_gradients_come_to_the_same_bits(
    device: str, text: str, lying: str, sending: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However output and upstream gradients lie, call after call."""
    monkeypatch.setenv(emulator.VARIABLE, "1")
    made = kernel(text, Device.cpu() if device == "cpu" else H200)
    p, order = made.problem, order_of(made.problem)
    calls = []
    for seed in range(2):
        inputs = inputs_of(p, seed=seed)
        out, lse = made.forward(inputs)
        upstream = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape) if p.lse else None
        calls.append((inputs, (out, lse, *upstream), made.backward(inputs, out, lse, *upstream)))
    sending()
    backward = made.prepared_form_backward(calls[0][0], order)
    monkeypatch.setattr(type(made), "backward", None)
    for inputs, results, expected in (*calls, *calls):
        there = [None if x is None else order.of(laid(x, lying)) for x in results]
        found = backward(as_given(inputs), *there)
        for got, right in zip(found, in_order(expected, order), strict=True):
            assert (got is None) == (right is None)
            if got is not None:
                assert torch.equal(got, right)
                assert got.stride() == right.stride()


def laid(result: Any, lying: str) -> Any:
    """The same numbers in other memory; those that may lie in any way, otherwise."""
    if lying == "heads before rows" and result.dim() == 4:
        return result.contiguous()
    if lying == "off 16":
        room = result.new_empty(result.numel() + 1)[1:].as_strided(result.shape, result.contiguous().stride())
        return room.copy_(result)
    return result.clone()


def test_on_another_gpu_it_is_the_general_one(monkeypatch: pytest.MonkeyPatch, sending: Callable[[], None]) -> None:
    monkeypatch.setenv(emulator.VARIABLE, "1")
    made = kernel("b3.h2.s4x5.d16.fp32.varlen.grad", Device.cpu())
    inputs, order = inputs_of(made.problem), order_of(made.problem)
    out, lse = made.forward(inputs)
    results = out, lse, torch.randn_like(out), None
    expected = in_order(made.backward(inputs, *results), order)
    sending()
    backward = made.prepared_form_backward(inputs, order)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 5)
    monkeypatch.setattr(memory, "on_cpu", lambda array: bool(array.is_cpu))
    found = backward(as_given(inputs), *(None if x is None else order.of(x) for x in results))
    assert found.attn_mask is expected[3] is None
    assert all(torch.equal(got, right) for got, right in zip(found[:3], expected[:3], strict=True))


@pytest.mark.parametrize("form", ["varlen", "varlen, lse", "sinks", "one projection"])
def test_the_whole_way_comes_to_the_same_bits(
    form: str, nothing_before: None, sending: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a step's call to its launches: the third of steps that are alike, and on, are asked of nothing."""
    monkeypatch.setenv(emulator.VARIABLE, "1")
    planner.forget()
    edges = torch.tensor([0, 3, 4], dtype=torch.int32)

    def made() -> Callable[[], list[Any]]:
        rows, sinks = torch.randn(6, 3, 4, 16), torch.randn(4, requires_grad=True)

        def step() -> list[Any]:
            said: Any = {"backend": "cuda", "return_lse": form == "varlen, lse"}
            leaf = rows.clone().requires_grad_()
            query, key, value = leaf.unbind(1)
            if form != "one projection":
                query, key, value = (x.contiguous() for x in (query, key[:, :2], value[:, :2]))
            if form == "sinks":
                found = attnswitch.attention(
                    *(x[None] for x in (query, key, value)), layout="BLHD", sinks=sinks, **said
                )
            else:
                longest: Any = {"max_seqlen_q": 3, "max_seqlen_k": 3}
                found = attnswitch.attention_varlen(query, key, value, edges, edges, **longest, **said)
            several = found if isinstance(found, tuple) else (found,)
            wanted = (leaf, sinks) if form == "sinks" else (leaf,)
            grads = torch.autograd.grad(several, wanted, [x.detach() + 1 for x in several])
            return [*several, *grads]

        return step

    steps = [made() for _ in range(5)]
    expected = [step() for step in steps]
    sending()
    check_known(steps, expected, monkeypatch)
    planner.forget()
