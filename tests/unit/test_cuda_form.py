"""CUDA calls of any form whose tensors lie alike: what they pass is what the general ones pass, but for addresses."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls_alike import check_known, given, inputs_of, order_of

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Order
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import CONTIGUOUS, Memory

arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")
tensor_maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")
CALLS = "lengths", "query_offsets", "key_offsets", "sinks", "slopes", "table", "tree"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, as_launcher: Callable[[Any], Any]) -> list[Any]:
    """Launches, as they are sent to a GPU whose tensors are here: number -1, as torch has the CPU."""
    sent: list[Any] = []

    def sender(variant: Any, blocks: int, index: int, *, beside: bool = False) -> Any:
        def send(stream: int, *pointers: int) -> None:
            passed = ctypes.string_at(pointers[-1], ctypes.sizeof(arguments.Arguments))
            whole = arguments.Arguments.from_buffer_copy(passed)
            sent.append(((variant, blocks, beside, stream, pointers[:-1]), whole))

        return as_launcher(send)

    blank = run.workspace.Places(4096, 4096, None)
    monkeypatch.setattr(run, "sender", sender)
    monkeypatch.setattr(run.memory, "on_cpu", lambda _: False)
    monkeypatch.setattr(run.workspace, "blank", lambda *_: blank)
    monkeypatch.setattr(tensor_maps.TensorMap, "pointer", property(lambda self: abs(hash(self))))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17 + index, raising=False)
    return sent


def kernel(text: str, device: Device = H200, memory: Memory = CONTIGUOUS) -> Any:
    """That of a problem whose mask lies as ``memory`` says."""
    problem, made = Problem.parse(text).replace(attn_mask=memory), backend.CudaBackend()
    return made.compile(problem, device, next(made.configs(problem, device)))


TEXTS = [
    "b2.h32/8.s1x256.d128.bf16.lengths.page=64.causal-br",
    "b2.h4/2.s5x64.d64.fp16.lengths.page=16.causal-br.sinks.alibi.lse",
    "b2.h32/8.s1x256.d128.bf16.lengths.page=64.causal-br.cache=fp8e4m3",
    "b3.h4/2.s4x64.d64.fp16.lengths.varlen.page=16.causal-br.cache=int8.lse",
    "b2.h16/1.s1x256.d576/512.bf16.lengths.page=64.causal-br",
    "b2.h16/1.s2x256.d576/512.bf16.lengths.page=64.causal-br.splits=2.lse",
    "b3.h4/2.s4x64.d64.bf16.lengths.varlen.page=16.causal-br.tree",
    "b3.h4/2.s4x64.d64.bf16.lengths.varlen.page=16.causal-br.splits=3.lse",
    "b3.h4/2.s40x50.d64.bf16.varlen.causal",
    "b3.h4/2.s40x50.d64.bf16.varlen.causal-br.sinks.alibi.lse",
    "b3.h4/2.s40x50.d64/32.fp32.varlen",
    "b2.h4/2.s130x150.d128.bf16.sinks.alibi.causal",
    "b2.h4/2.s130x150.d128.bf16.sinks.mask=bf16:qk.lse",
    "b2.h4/2.s30x50.d24.fp32.sinks.lengths",
]


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("text", TEXTS)
def test_it_passes_what_the_general_one_passes(text: str, layout: str, gpu: list[Any]) -> None:
    made = kernel(text)
    p, order = made.problem, order_of(made.problem)
    forward = made.prepared_form(inputs_of(p, layout), order)
    for seed in (1, 2):
        inputs = inputs_of(p, layout, seed)
        gpu.clear()
        out, lse = forward(*given(inputs))
        right, right_lse = made.forward(inputs)
        half = len(gpu) // 2
        assert half == len(made.variants())
        assert (out.shape, out.stride(), out.dtype) == (order.of(right).shape, order.of(right).stride(), right.dtype)
        assert (lse is not None) == (p.lse or made._forward.needs_lse)
        if lse is not None:
            expected = order.of(right_lse)
            assert (lse.shape, lse.stride(), lse.dtype) == (expected.shape, expected.stride(), expected.dtype)
        for (how, passed), (expected_how, whole) in zip(gpu[:half], gpu[half:], strict=True):
            assert how == expected_how
            assert (passed.out.at, passed.lse) == (out.data_ptr(), None if lse is None else lse.data_ptr())
            gaps = [a.sums and a.sums - a.parts for a in (passed, whole)]
            assert gaps[0] == gaps[1]
            for name in ("query", "key", "value") if made._forward.variant.family == "hopper" else ():
                setattr(whole, name, getattr(passed, name))  # which maps tell
            whole.out.at, whole.lse, whole.parts, whole.sums = passed.out.at, passed.lse, passed.parts, passed.sums
            assert bytes(passed) == bytes(whole)


def test_maps_and_addresses_are_each_call_s_own(gpu: list[Any]) -> None:
    made = kernel("b3.h4/2.s40x50.d64.bf16.varlen.causal.sinks")
    forward = made.prepared_form(inputs_of(made.problem), order_of(made.problem))
    seen = set()
    for seed in range(3):  # memory of those before may be taken again, for some of the operands
        inputs = inputs_of(made.problem, seed=seed)
        forward(*given(inputs))
        (*_, maps), passed = gpu[-1]
        begin, begin_k, sinks = (x.data_ptr() for x in inputs.flat()[6:9])
        assert (passed.sinks, passed.query_offsets, passed.key_offsets) == (sinks, begin, begin_k)
        seen.add((maps, tuple(x.data_ptr() for x in inputs[:3])))
        forward(*given(inputs))
        assert gpu[-1][0][-1] == maps
    assert len({maps for maps, _ in seen}) == len({at for _, at in seen})


def test_a_value_is_known_to_lie_within_its_key_by_address(gpu: list[Any]) -> None:
    made = kernel("b2.h16/1.s1x256.d576/512.bf16.lengths.page=64.causal-br")
    assert made._forward.variant.kernel == "latent"
    within = inputs_of(made.problem)
    apart = within._replace(value=within.key.clone()[..., :512].as_strided(within.value.shape, within.value.stride()))
    forward = made.prepared_form(within, order_of(made.problem))
    for inputs in (within, apart, within):
        forward(*given(inputs))
        assert gpu[-1][1].values_within == (inputs is within)


def test_another_gpu_is_made_the_current_one(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernel(TEXTS[0])
    devices, entered = iter((1, -1)), []

    class On:
        def __enter__(self) -> None:
            entered.append(self)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: next(devices))
    forward = made.prepared_form(inputs_of(made.problem), order_of(made.problem))
    monkeypatch.setattr(run.memory, "on", lambda _: On())
    out, _ = forward(*given(inputs_of(made.problem)))
    assert (len(entered), len(gpu), gpu[0][1].out.at) == (1, 1, out.data_ptr())


def test_where_nothing_is_launched_or_a_mask_is_copied_it_is_the_general_one(gpu: list[Any]) -> None:
    for text, copies in (("b2.h2.s0x8.d8.bf16.sinks", False), ("b2.h40.s2048x2049.d128.bf16.mask=bf16:qk.sinks", True)):
        made = kernel(text, memory=Memory(align=2) if copies else CONTIGUOUS)
        assert made._copies_mask == copies
        inputs = inputs_of(made.problem, "BHLD")
        forward = made.prepared_form(inputs, Order())
        gpu.clear()
        out, lse = forward(*inputs.flat())
        assert lse.shape == inputs.query.shape[:3]
        assert out.shape == inputs.query.shape
        assert len(gpu) == (0 if made.problem.is_empty else 1)


# -- run, in the emulator ----------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize(
    "text",
    [
        "b2.h4/2.s1x64.d32.bf16.lengths.page=16.causal-br",
        "b2.h4/2.s2x64.d32.fp32.lengths.page=16.causal-br.splits=3.sinks",
        "b2.h4/2.s30x64.d32.fp16.lengths.page=16.causal-br.splits=3.alibi.lse",
        "b3.h4/2.s4x32.d32.bf16.lengths.varlen.page=16.causal-br.tree.sinks.lse",
        "b2.h4/2.s2x64.d32.bf16.lengths.page=16.causal-br.cache=fp8e4m3",
        "b2.h4/2.s20x30.d64.bf16.varlen.causal.sinks",
        "b2.h4/2.s20x30.d24/40.fp32.varlen.alibi.causal-br.lse",
        "b2.h16/1.s1x128.d576/512.bf16.lengths.page=64.causal-br",
        "b2.h16/1.s1x128.d576/512.bf16.lengths.varlen.page=64.causal-br.splits=2.lse",
        "b1.h2.s30x40.d32.fp32.sinks.mask=fp32:qk.causal",
    ],
)
def test_it_comes_to_the_same_bits(text: str, device: str, sending: Callable[[], None], monkeypatch: Any) -> None:
    """Without an lse as well, where nobody asks for one."""
    monkeypatch.setenv(emulator.VARIABLE, "1")
    where = Device.cpu() if device == "cpu" else H200
    made = kernel(text, where)
    p, order = made.problem, order_of(made.problem)
    calls = [inputs_of(p, seed=seed) for seed in range(2)]
    expected = [made.forward(inputs) for inputs in calls]
    sending()
    forward = made.prepared_form(calls[0], order)
    monkeypatch.setattr(type(made), "forward", None)
    for inputs, (out, lse) in zip(calls, expected, strict=True):
        got, sums = forward(*given(inputs))
        assert torch.equal(got, order.of(out))
        assert not p.lse or torch.equal(sums, order.of(lse))


@compiled
@pytest.mark.parametrize("form", ["paged", "packed", "varlen", "sinks"])
def test_the_whole_way_comes_to_the_same_bits(
    form: str, nothing_before: None, sending: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the call to the launch: the third of calls that are alike, and on, are asked of nothing."""
    monkeypatch.setenv(emulator.VARIABLE, "1")
    planner.forget()
    key, value = torch.randn(2, 9, 16, 2, 32).bfloat16().unbind()
    edges = torch.tensor([0, 3, 4], dtype=torch.int32)

    def call() -> Any:
        said: Any = {"backend": "cuda", "return_lse": True}
        query, rows = torch.randn(2, 1, 4, 32).bfloat16(), torch.randn(6, 4, 32).bfloat16()
        table, lengths = torch.randint(9, (2, 4)), torch.randint(1, 64, (2,), dtype=torch.int32)
        packed: Any = {"cu_seqlens_q": edges, "max_seqlen_q": 3}
        if form == "paged":
            return lambda: attnswitch.attention_paged(query, key, value, table, lengths, **said)
        if form == "packed":
            return lambda: attnswitch.attention_paged(rows, key, value, table, lengths, **packed, **said)
        if form == "varlen":
            longest: Any = {"max_seqlen_q": 3, "max_seqlen_k": 3}
            return lambda: attnswitch.attention_varlen(rows, rows[:, 2:], rows[:, :2], edges, edges, **longest, **said)
        queries, sinks = query.expand(2, 5, 4, 32).swapaxes(1, 2).contiguous(), torch.randn(4).bfloat16()
        return lambda: attnswitch.attention(queries, queries[:, 2:], queries[:, :2], sinks=sinks, **said)

    calls = [call() for _ in range(5)]
    expected = [each() for each in calls]
    sending()
    check_known(calls, expected, monkeypatch)
    planner.forget()
