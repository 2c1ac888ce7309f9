"""The CUDA forward of tensors that lie alike: what it passes is what the general one passes, but for addresses."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

arguments = importlib.import_module("attnswitch.backends.cuda.arguments")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
emulator = importlib.import_module("attnswitch.backends.cuda.emulator")
prepared = importlib.import_module("attnswitch.backends.cuda.prepared")
run = importlib.import_module("attnswitch.backends.cuda.run")
VARIABLE = emulator.VARIABLE
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches, as they are sent to a GPU whose tensors are here: number -1, as torch has the CPU."""
    sent: list[Any] = []

    def send(function: Any, variant: Any, blocks: int, stream: int, *pointers: int) -> None:
        passed = arguments.Arguments.from_buffer_copy(
            ctypes.string_at(pointers[-1], ctypes.sizeof(arguments.Arguments))
        )
        sent.append((function, variant, blocks, stream, pointers[:-1], passed))

    monkeypatch.setattr(run, "send", send)
    monkeypatch.setattr(run, "loaded", lambda *which: which)
    monkeypatch.setattr(run.memory, "on_cpu", lambda _: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17 + index, raising=False)
    return sent


def operands(p: Problem, turned: bool = False) -> Inputs:
    def made(heads: int, length: int, dim: int) -> torch.Tensor:
        if turned:
            return torch.randn(p.batch, length, heads, dim).to(getattr(torch, p.dtype)).swapaxes(1, 2)
        return torch.randn(p.batch, heads, length, dim).to(getattr(torch, p.dtype))

    return Inputs(
        made(p.heads_q, p.seq_q, p.dim_qk), made(p.heads_kv, p.seq_k, p.dim_qk), made(p.heads_kv, p.seq_k, p.dim_v)
    )


def kernel(text: str, device: Device = H200) -> Any:
    problem, made = Problem.parse(text), backend.CudaBackend()
    return made.compile(problem, device, next(made.configs(problem, device)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "text",
    ["b1.h1.s8.d64.bf16.lse", "b2.h4/2.s37x53.d24/40.fp32.causal.lse", "b2.h4.s9.d64.fp64", "b1.h2.s8.d64.fp16.grad"],
)
def test_it_passes_what_the_general_one_passes(text: str, turned: bool, gpu: list[Any]) -> None:
    made, p = kernel(text), Problem.parse(text)
    forward = made.prepared(operands(p, turned))
    for _ in range(2):
        inputs = operands(p, turned)
        gpu.clear()
        out, lse = forward(*inputs[:3])
        expected_out, expected_lse = made.forward(inputs)
        (*how, passed), (*expected_how, expected) = gpu
        assert how[1:] == [expected_how[1], expected_how[2], 16, ()]
        assert out.stride() == expected_out.stride()
        assert (out.shape, out.dtype) == (expected_out.shape, expected_out.dtype)
        assert passed.out.at == out.data_ptr()
        assert passed.lse == (None if lse is None else lse.data_ptr())
        assert (p.lse or p.grads != "") is (lse is not None)
        if lse is not None:
            assert (lse.shape, lse.stride(), lse.dtype) == (
                expected_lse.shape,
                expected_lse.stride(),
                expected_lse.dtype,
            )
        expected.out.at, expected.lse = passed.out.at, passed.lse
        assert bytes(passed) == bytes(expected)


def test_maps_are_found_by_addresses(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    maps = importlib.import_module("attnswitch.backends.cuda.tensor_maps")
    monkeypatch.setattr(prepared, "_MOST", 2)
    monkeypatch.setattr(maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    made, p = kernel("b2.h4.s64.d64.bf16"), Problem.parse("b2.h4.s64.d64.bf16")
    assert made._forward.alone.variant.family == "hopper"
    forward = made.prepared(operands(p))
    for _ in range(3):
        inputs = operands(p)
        for _ in range(2):
            forward(*inputs[:3])
            assert gpu[-1][4] == tuple(operand.data_ptr() + 1 for operand in inputs[:3])


def test_on_another_gpu_the_general_one_takes_over(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = iter((-1, 1))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: next(devices))
    made = kernel("b1.h1.s8.d64.bf16")
    forward = prepared.forward(made.problem, made._forward.alone, operands(made.problem), lambda *_: "general")
    assert isinstance(forward(*operands(made.problem)[:3])[0], torch.Tensor)
    assert forward(*operands(made.problem)[:3]) == "general"
    assert len(gpu) == 1


@pytest.mark.parametrize(
    "text",
    ["b1.h1.s0x8.d8.bf16", "b1.h1.s8.d64.bf16.mask=bool:qk", "b1.h8/1.s1x65536.d64.fp32", "b64.h16.s1024.d64.bf16"],
)
def test_what_is_more_than_a_launch_is_for_the_general_one(
    text: str, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    general = importlib.import_module("attnswitch.backends.cuda.kernel").CudaKernel
    monkeypatch.setattr(general, "forward", lambda _, inputs: inputs)
    made, p = kernel(text), Problem.parse(text)
    query, key, value = (torch.zeros(()).expand(shape) for shape in shapes(p))
    inputs = Inputs(query, key, value, torch.zeros(1, 1, 1, 1) if p.mask else None)
    given = made.prepared(inputs)(*inputs[: 3 if p.mask is None else 4])
    assert all(one is other for one, other in zip(given, inputs, strict=True))


def shapes(p: Problem) -> list[tuple[int, ...]]:
    keys = p.batch, p.heads_kv, p.seq_k
    return [(p.batch, p.heads_q, p.seq_q, p.dim_qk), (*keys, p.dim_qk), (*keys, p.dim_v)]


@compiled
@pytest.mark.parametrize("text", ["b1.h2.s20.d16.fp32.causal", "b2.h8/2.s1x9.d64.fp16", "b2.h2.s9x20.d32/8.fp64"])
def test_without_an_lse_the_output_is_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    made = kernel(text, Device.cpu())
    inputs, p = operands(made.problem), made.problem
    expected, written = made.forward(inputs)
    out = torch.full_like(expected, torch.nan)
    variant, blocks, constants, _ = made._forward.alone
    a = arguments.of_call(constants, inputs)
    arguments.put(a, arguments.Arguments.out.offset, out)
    emulator.launch(variant, blocks, a)
    assert torch.equal(out, expected)
    assert written.shape == (p.batch, p.heads_q, p.seq_q)
    assert written.isfinite().all()
