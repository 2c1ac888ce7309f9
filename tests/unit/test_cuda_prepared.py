"""CUDA calls of tensors that lie alike: what they pass is what the general ones pass, but for addresses."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.call import autograd
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
prepared = importlib.import_module("attnswitch.backends.cuda.launching.prepared")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")
splits = importlib.import_module("attnswitch.backends.cuda.portable.splits")
tensor_maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")
VARIABLE = emulator.VARIABLE
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, as_launcher: Callable[[Any], Any]) -> list[Any]:
    """Launches, as they are sent to a GPU whose tensors are here: number -1, as torch has the CPU."""
    sent: list[Any] = []

    def sender(variant: Any, blocks: int, index: int, *, beside: bool = False) -> Any:
        def send(stream: int, *pointers: int) -> None:
            passed = arguments.Arguments.from_buffer_copy(
                ctypes.string_at(pointers[-1], ctypes.sizeof(arguments.Arguments))
            )
            sent.append(((variant, beside), variant, blocks, stream, pointers[:-1], passed))

        return as_launcher(send)

    monkeypatch.setattr(run, "sender", sender)
    monkeypatch.setattr(run.memory, "on_cpu", lambda _: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17 + index, raising=False)
    return sent


def operands(p: Problem, turned: bool = False) -> Inputs:
    def made(heads: int, length: int, dim: int) -> torch.Tensor:
        if turned:
            return torch.randn(p.batch, length, heads, dim).to(getattr(torch, p.dtype)).swapaxes(1, 2)
        return torch.randn(p.batch, heads, length, dim).to(getattr(torch, p.dtype))

    query = made(p.heads_q, p.seq_q, p.dim_qk)
    key, value = (made(p.heads_kv, p.seq_k, dim) for dim in (p.dim_qk, p.dim_v))
    mask = None
    if p.mask is not None and p.mask_shape is not None:
        mask = torch.randn(p.mask_shape)
        mask = mask > -0.5 if p.mask.is_bool else mask.to(getattr(torch, p.mask.dtype))
    return Inputs(query, key, value, mask)


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
    maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")
    monkeypatch.setattr(maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    made, p = kernel("b2.h4.s72.d64.bf16"), Problem.parse("b2.h4.s72.d64.bf16")
    assert made._forward.variant.family == "hopper"
    forward = made.prepared(operands(p))
    for _ in range(3):
        inputs = operands(p)
        for _ in range(2):
            forward(*inputs[:3])
            assert gpu[-1][4] == tuple(operand.data_ptr() + 1 for operand in inputs[:3])


def test_a_step_like_one_before_is_short(gpu: list[Any], monkeypatch: pytest.MonkeyPatch, entered: Any) -> None:
    """Functions of ours entered from torch's autograd to the driver: in its engine's thread each is a microsecond."""
    monkeypatch.setattr(tensor_maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    p = Problem.parse("b2.h4.s72.d64.bf16.grad")
    made, inputs = kernel(str(p)), operands(p)
    q, k, v = (operand.requires_grad_() for operand in inputs[:3])
    attend = autograd.prepared(p, made, made.prepared(inputs))

    def forward() -> None:
        results.append(attend(q, k, v)[0])

    results, ones = list[torch.Tensor](), torch.ones_like(q)
    for _ in range(3):
        forward()
        torch.autograd.grad(results[-1], (q, k, v), ones)

    def ours(call: Callable[[], object]) -> list[str]:
        names = [name for module, name in entered(call) if module.startswith("attnswitch")]
        return [name for name in names if name != "<lambda>"]  # that of torch's allocator, which a GPU has in C++

    assert ours(forward) == ["attend", "forward", "attend", "alone", "__call__"]
    assert ours(lambda: torch.autograd.grad(results[-1], (q, k, v), ones)) == ["backward", "differentiate"]


@pytest.mark.parametrize("mask", ["", ".mask=bool:qk", ".mask=bool:bk"])
def test_hopper_passes_what_the_general_one_passes(mask: str, gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than SMs, which are counted, and a mask that is looked at before."""
    maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")
    monkeypatch.setattr(maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    asked: list[Any] = []

    def blank(size: int, like: Any, stream: int) -> Any:
        asked.append((size, stream))
        return run.workspace.Places(4096, size, None)

    monkeypatch.setattr(run.workspace, "blank", blank)
    p = Problem.parse(f"b2.h40.s200.d64.bf16{mask}")
    made, inputs = kernel(str(p)), operands(p)
    out, lse = made.prepared(inputs)(*inputs[: 4 if mask else 3])
    half = len(gpu)
    assert half == (2 if mask else 1)
    made.forward(inputs)
    for one, other in zip(gpu[:half], gpu[half:], strict=True):
        assert one[:5] == other[:5]
        names = ("mask", "mask_batch", "mask_heads", "mask_rows", "section", "keys", "batch", "factor")
        assert all(bytes_of(one[5], name) == bytes_of(other[5], name) for name in names)
        gaps = [
            passed.mask_bits and (passed.mask_sets - passed.counter, passed.mask_bits - passed.counter)
            for passed in (one[5], other[5])
        ]
        assert gaps[0] == gaps[1]
    passed = gpu[half - 1][5]
    assert (passed.out.at, passed.lse) == (out.data_ptr(), None)
    assert lse is None
    assert asked == ([] if mask else [(4, 16), (4, 16)])
    assert mask or passed.counter == 4096


def bytes_of(passed: Any, name: str) -> bytes:
    field = getattr(arguments.Arguments, name)
    return bytes(passed)[field.offset : field.offset + field.size]


def test_on_another_gpu_the_general_one_takes_over(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = iter((-1, 1))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: next(devices))
    made = kernel("b1.h1.s8.d64.bf16")
    forward = prepared.forward(made.problem, made._forward, operands(made.problem), lambda *_: "general")
    assert isinstance(forward(*operands(made.problem)[:3])[0], torch.Tensor)
    assert forward(*operands(made.problem)[:3]) == "general"
    assert len(gpu) == 1


def test_nothing_to_launch_is_for_the_general_one(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    general = importlib.import_module("attnswitch.backends.cuda.kernel").CudaKernel
    monkeypatch.setattr(general, "forward", lambda _, inputs: inputs)
    made, p = kernel("b1.h1.s0x8.d8.bf16"), Problem.parse("b1.h1.s0x8.d8.bf16")
    inputs = operands(p)
    given = made.prepared(inputs)(*inputs[:3])
    assert all(one is other for one, other in zip(given[:3], inputs[:3], strict=True))
    assert made.prepared_backward(inputs) == made.backward
    assert not gpu


@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        "b3.h2.s40.d8.fp16.lengths.dropout=0.5.seeded.grad",
        "b3.h2.s200.d64.bf16.lengths.lse",
        "b3.h2.s1x91.d8.fp32.lengths",
    ],
)
def test_lengths_and_seeds_are_passed_as_by_the_general_one(
    text: str, kind: str, step: int, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has its own, through one prepared launch; forward and backward."""
    maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")
    monkeypatch.setattr(maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    places = run.workspace.Places(4096, 4096, None)
    monkeypatch.setattr(run.workspace, "blank", lambda *_: places)
    made, p = kernel(text), Problem.parse(text)
    names = ("lengths", "length_stride", "length_bytes", "seed_low", "seed_high")
    forward = backward = None
    for turn in range(3):
        lengths = torch.tensor([turn, 9, 40] * 2, dtype=getattr(torch, kind))[::step][:3]
        seed = 2**40 + turn if p.seeded else None
        inputs = operands(p)._replace(key_lengths=lengths, seed=seed)
        forward = forward or made.prepared(inputs)
        gpu.clear()
        out, lse = forward(*inputs[:6])
        made.forward(inputs)
        half = len(gpu) // 2
        assert half
        for one, other in zip(gpu[:half], gpu[half:], strict=True):
            assert [bytes_of(one[5], name) for name in names] == [bytes_of(other[5], name) for name in names]
        if not p.grads:
            continue
        backward = backward or made.prepared_backward(inputs)
        gpu.clear()
        given = inputs, out, lse, torch.randn_like(out), None
        backward(*given)
        made.backward(*given)
        half = len(gpu) // 2
        for one, other in zip(gpu[:half], gpu[half:], strict=True):
            assert [bytes_of(one[5], name) for name in names] == [bytes_of(other[5], name) for name in names]


@compiled
@pytest.mark.parametrize("text", ["b1.h2.s20.d16.fp32.causal", "b2.h8/2.s1x9.d64.fp16", "b2.h2.s9x20.d32/8.fp64"])
def test_without_an_lse_the_output_is_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    made = kernel(text, Device.cpu())
    inputs, p = operands(made.problem), made.problem
    expected, written = made.forward(inputs)
    out = torch.full_like(expected, torch.nan)
    a = arguments.of_call(made._forward.constants, inputs)
    arguments.put(a, arguments.Arguments.out.offset, out)
    emulator.launch(made._forward.variant, made._forward.blocks, a)
    assert torch.equal(out, expected)
    assert written.shape == (p.batch, p.heads_q, p.seq_q)
    assert written.isfinite().all()


# -- run, in the emulator ----------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("b2.h2.s66x53.d24/40.fp16.mask=bool:bk", "WHOLE"),
        ("b2.h2.s20.d16.fp32.mask=fp32:hqk.causal.lse", "WHOLE"),
        ("b1.h8/2.s1x91.d64.fp16", "MERGED"),
        ("b1.h8/2.s2x91.d64.bf16.mask=bf16:bqk.lse", "MERGED"),
        ("b2.h2.s30x91.d24.fp32", "PARTS"),
        ("b1.h2.s30x91.d8.fp64.mask=bool:q.lse", "PARTS"),
    ],
)
def test_masks_and_splits_come_to_the_same_bits(
    text: str, split: str, turned: bool, sending: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel(text, Device.cpu())
    p = made.problem
    assert splits.how(made._config.forward, made._config.splits) == getattr(splits, split)
    expected = []
    calls = [operands(p, turned) for _ in range(2)]
    monkeypatch.setenv(VARIABLE, "1")
    for inputs in calls:
        expected.append(made.forward(inputs))
    sending()
    forward = made.prepared(calls[0])
    monkeypatch.setattr(type(made), "forward", None)
    for inputs, (out, lse) in zip(calls, expected, strict=True):
        got, sums = forward(*(array for array in inputs[:4] if array is not None))
        assert torch.equal(got, out)
        assert got.stride() == out.stride()
        if p.lse:
            assert torch.equal(sums, lse)


@compiled
@pytest.mark.parametrize("lying", ["plain", "turned", "expanded", "offset"])
@pytest.mark.parametrize(
    "text",
    [
        "b2.h4/2.s37x53.d24/40.fp16.grad",
        "b1.h2.s70x53.d64.bf16.causal.mask=bool:qk.lse.grad",
        "b1.h2.s70x53.d64.bf16.mask=bf16:hqk.lse.grad",
        "b1.h2.s70x53.d64.fp16.mask=fp16:k.grad",
        "b1.h2.s20.d16.fp32.causal.lse.grad",
        "b2.h2.s20x9.d16.bf16.mask=bool:bk.grad",
        "b2.h2.s9x20.d8.fp32.mask=fp32:hk.grad=qkvm",
        "b1.h2.s9x20.d72.fp64.mask=fp64.grad=vm",
        "b1.h2.s9.d80.bf16.grad=q",
    ],
)
def test_gradients_come_to_the_same_bits(
    text: str, lying: str, sending: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the gradient of the output lies; also of an lse in any memory, and with a gradient of it."""
    made = kernel(text, Device.cpu())
    p = made.problem
    inputs = operands(p, turned=lying == "turned")
    grad_out = torch.randn(p.batch, p.heads_q, p.seq_q, p.dim_v).to(getattr(torch, p.dtype))
    if lying == "turned":
        grad_out = grad_out.mT.contiguous().mT
    elif lying == "expanded":
        grad_out = grad_out[:, :, :1, :1].expand(grad_out.shape)
    elif lying == "offset":
        room = torch.empty(grad_out.numel() + 1, dtype=grad_out.dtype)
        grad_out = room[1:].view(grad_out.shape).copy_(grad_out)
    out, lse = made.forward(inputs)
    if lying == "turned":
        lse = lse.swapaxes(1, 2).contiguous().swapaxes(1, 2)
    grad_lse = torch.randn(lse.shape, dtype=lse.dtype) if p.lse else None
    expected = made.backward(inputs, out, lse, grad_out, grad_lse)
    sending()
    backward = made.prepared_backward(inputs)
    monkeypatch.setattr(type(made), "backward", None)
    for _ in range(2):
        for got, right in zip(backward(inputs, out, lse, grad_out, grad_lse), expected, strict=True):
            assert (got is None) == (right is None)
            assert got is None or torch.equal(got, right)
            assert got is None or got.stride() == right.stride()


def test_the_backward_is_laid_out_once_when_it_first_runs(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, made = kernel("b1.h1.s8.d32.bf16.grad"), kernel("b1.h1.s8.d32.bf16.grad")
    inputs = operands(made.problem)
    first.prepared(inputs)  # which has the kernels of its class compiled
    prepared_backward, asked = made.prepared_backward, []

    def noted(inputs: Inputs) -> Any:
        asked.append(inputs)
        return prepared_backward(inputs)

    monkeypatch.setattr(made, "prepared_backward", noted)
    attend = autograd.prepared(made.problem, made, made.prepared(inputs))
    leaves = [operand.requires_grad_() for operand in inputs[:3]]
    outs = [attend(*leaves)[0] for _ in range(2)]
    assert "_backward" not in vars(made)
    for out in outs:
        out.sum().backward()
    assert len(asked) == 1
    gpu[:] = [gpu[0], *gpu[2:5]]
    assert [variant.kernel for _, variant, *_ in gpu] == ["forward", "prepare", "query_gradient", "key_gradients"]


@compiled
@pytest.mark.parametrize("text", ["b2.h4/2.s20x40.d16.fp32.grad", "b1.h2.s9x33.d8.fp64.mask=fp64:qk.grad=qkvm"])
def test_a_part_of_the_keys_has_its_part_of_the_gradients(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and lse are those that are given, here of all keys: what parts come to adds up to the whole."""
    monkeypatch.setenv(VARIABLE, "1")
    made = kernel(text, Device.cpu())
    p, inputs = made.problem, operands(made.problem)
    out, lse = made.forward(inputs)
    grad_out, grad_lse = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)
    whole = made.backward(inputs, out, lse, grad_out, grad_lse)
    parts = []
    for keys in (slice(0, 12), slice(12, p.seq_k)):
        mask = None if inputs.attn_mask is None else inputs.attn_mask[..., keys].contiguous()
        key, value = (array[:, :, keys].contiguous() for array in inputs[1:3])
        shard = Inputs(inputs.query, key, value, mask)
        part = kernel(str(p.replace(seq_k=shard.key.shape[2])), Device.cpu())
        parts.append(part.backward(shard, out, lse, grad_out, grad_lse))
    torch.testing.assert_close(parts[0].query + parts[1].query, whole.query)
    for name, axis in (("key", 2), ("value", 2), ("attn_mask", 3)):
        got = [getattr(part, name) for part in parts]
        if getattr(whole, name) is not None:
            torch.testing.assert_close(torch.cat(got, axis), getattr(whole, name))


@pytest.mark.parametrize("text", ["b8.h8.s80x2000.d64.bf16.causal.grad", "b8.h8.s20x2000.d64.bf16.causal.grad"])
def test_gradients_of_keys_that_no_query_sees_are_filled_in(
    text: str, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_maps.TensorMap, "pointer", property(lambda self: self.address + 1))
    made, p = kernel(text), Problem.parse(text)
    inputs, out = operands(p), torch.randn(8, 8, p.seq_q, 64, dtype=torch.bfloat16)
    given = inputs, out, torch.zeros(8, 8, p.seq_q), torch.randn_like(out), None
    for backward in (made.prepared_backward(inputs), made.backward):
        gpu.clear()
        _, of_key, of_value, _ = backward(*given)
        assert not of_key.any()  # nothing was launched
        assert not of_value.any()
        (blocks,) = {blocks for _, variant, blocks, *_ in gpu if variant.kernel in ("backward", "key_gradients")}
        assert blocks < 8 * 8 * 2000 // 128


def test_a_launch_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = importlib.import_module("attnswitch.backends.cuda.launching.driver")
    seen: list[Any] = []

    def refused(*given: Any) -> int:
        seen.append(given)
        return 1 if given[1] == 7 else 0

    library = SimpleNamespace(cuLaunchKernelEx=refused, cuGetErrorName=lambda *_: 0)
    monkeypatch.setattr(driver, "_library", lambda: library)
    monkeypatch.setattr(driver, "_STREAMS", 2)
    with pytest.raises(driver.DriverError, match="cuLaunchKernelEx: 1"):
        driver.Launcher(7, 1, 32, 0)(17, 4096)
    launcher = driver.Launcher(8, 3, 64, 0)
    for stream in (0, 1, 2, 0):
        launcher(stream, 4096)
        config = driver._Config.from_address(seen[-1][0])
        assert (list(config.grid), list(config.block), config.stream or 0) == ([3, 1, 1], [64, 1, 1], stream)
        assert len(launcher) <= 2
