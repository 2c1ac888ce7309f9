"""Backends of installed libraries, over stand-ins with their signatures: what is said is honoured, or refused."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import fake_libraries
import pytest
import torch

import attnswitch
from attnswitch.errors import CompileError, Unsupported
from attnswitch.machine import registry
from attnswitch.machine.backend import Config, Inputs, Kernel, Offsets
from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.verify import Case, check

H100, A100, B200 = (Device.named(name) for name in ("h100", "a100", "b200"))
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
INSTALLED = ("torch-varlen", "torch-flex", *FLASH, "xformers", "flashinfer", "sage")


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install(monkeypatch)


def compiled(name: str, problem: Problem, device: Device = H100) -> Kernel:
    backend = registry.loaded(name)
    assert backend.supports(problem, device) == ()
    return backend.compile(problem, device, Config())


def inputs_of(problem: Problem, edges: tuple[list[int], list[int]] | None = None) -> Inputs:
    """Random operands; of sequences with ``edges``, with three rows of NaN past the last."""
    p = problem
    generator = torch.Generator().manual_seed(3)
    batch, queries, keys = (1, edges[0][-1] + 3, edges[1][-1] + 3) if edges else (p.batch, p.seq_q, p.seq_k)
    dtype = getattr(torch, p.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = drawn(batch, p.heads_q, queries, p.dim_qk)
    key = drawn(batch, p.heads_kv, keys, p.dim_qk)
    value = drawn(batch, p.heads_kv, keys, p.dim_v)
    inputs = Inputs(query, key, value)
    if edges:
        for array in inputs[:3]:
            array[:, :, -3:] = math.nan
        inputs = inputs._replace(offsets=Offsets(*(torch.tensor(each) for each in edges)))
    if p.sinks:
        inputs = inputs._replace(sinks=torch.randn(p.heads_q, generator=generator))
    if p.alibi:
        inputs = inputs._replace(alibi_slopes=torch.rand(1, p.heads_q, generator=generator))
    return inputs


def right(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse by the reference, of the same rounded operands in float64."""
    wide = inputs.map(lambda x: x.double() if x.is_floating_point() else x)
    said = problem.replace(dtype="float64", lse=True, grads="")
    arrays = wide.map(lambda x: x.numpy())
    out, lse = registry.loaded("reference").compile(said, Device.cpu(), Config()).forward(arrays)
    return torch.from_numpy(out), torch.from_numpy(lse)


EDGES = ([0, 5, 5, 17, 20], [0, 9, 12, 12, 40])
LONG = "b4.h4.s12x28.d64.bf16.varlen"
CASES = [
    *((name, text, None) for name in FLASH for text in (
        "b2.h4/2.s7x19.d64.bf16.lse",
        "b2.h4/2.s7x19.d64.fp16.causal-br.lse",
        "b2.h4.s19x7.d64.bf16.causal-br.lse",
        "b1.h2.s9.d128.bf16.causal.scale=0.3",
        "b2.h4.s1x9.d64.bf16.causal-br.lse",
        "b1.h4/1.s9x13.d64.bf16.causal-br.window=3,*.softcap=2.0.lse",
        "b1.h2.s9x13.d64.bf16.window=3,2.bottom-right",
        "b1.h2.s9x13.d64.bf16.window=3,*.bottom-right",
        "b1.h2.s9x13.d64.bf16.window=*,2.bottom-right",
    )),
    *((name, text, EDGES) for name in FLASH for text in (
        f"{LONG}.lse", f"{LONG}.causal-br.lse", f"{LONG}.window=2,1.bottom-right.softcap=3.0",
    )),
    *(("torch-varlen", text, EDGES) for text in (
        f"{LONG}.lse", f"{LONG}.causal-br.lse.scale=0.2", f"{LONG}.window=2,1.bottom-right",
        "b4.h4/2.s12x28.d64.bf16.varlen.causal-br.window=5,*.lse",
    )),
    ("flash-attn", "b2.h4.s7x19.d64.bf16.alibi.causal-br", None),
    ("flash-attn", "b2.h4.s7x19.d64.bf16.alibi.bottom-right.lse", None),
    ("flash-attn", "b4.h4.s12x28.d64.bf16.varlen.alibi.bottom-right", EDGES),
    ("flash-attn-4", "b2.h4.s7x19.d64.bf16.sinks.causal-br.lse", None),
    ("flash-attn-4", "b2.h4.s7x19.d192/128.bf16.lse", None),
    ("flash-attn-4", "b4.h4.s12x28.d64.bf16.varlen.sinks.lse", EDGES),
    ("xformers", "b2.h4.s7x19.d40.fp32", None),
    ("flash-attn-4", "b1.h2.s4x0.d64.bf16.sinks.lse", None),
    ("xformers", "b2.h4.s9.d64.bf16.causal", None),
    ("xformers", "b2.h4.s7x19.d64.bf16.causal", None),
    ("xformers", "b2.h4/2.s7x19.d64.bf16.causal-br.scale=0.3", None),
    ("flashinfer", "b1.h4/2.s7x19.d64.bf16.lse", None),
    ("flashinfer", "b1.h4/2.s7x19.d128.fp16.causal-br.softcap=2.0.lse", None),
    ("flashinfer", "b1.h4.s9.d64.fp16.causal.window=3,*", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "edges"), CASES)
def test_a_library_is_called_so_that_its_answer_is_right(name: str, text: str, edges: Any) -> None:
    problem = Problem.parse(text)
    inputs = inputs_of(problem, edges)
    before = inputs.map(torch.clone)
    out, lse = compiled(name, problem, H100).forward(inputs)
    expected, statistics = right(problem, inputs)
    assert out.dtype == inputs.query.dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
    assert (lse is None) is not problem.lse
    if lse is not None:
        torch.testing.assert_close(lse.double(), statistics, rtol=1e-4, atol=1e-4)
    for one, other in zip(inputs[:3], before[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "text", "edges"),
    [
        *((name, "b2.h4/2.s7x19.d64.bf16.causal-br.grad", None) for name in FLASH),
        *((name, "b4.h4.s12x28.d64.bf16.varlen.causal-br.grad", EDGES) for name in (*FLASH, "torch-varlen")),
        ("xformers", "b2.h4.s7x19.d64.bf16.causal.grad", None),
    ],
)
def test_gradients_are_the_librarys(name: str, text: str, edges: Any) -> None:
    problem = Problem.parse(text)
    inputs = inputs_of(problem, edges)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    kernel = compiled(name, problem)
    out, _ = kernel.forward(inputs._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    found = torch.autograd.grad(out, leaves, grad_out)
    plain = inputs.map(lambda x: x.double() if x.is_floating_point() else x).map(lambda x: x.numpy())
    wide = problem.replace(dtype="float64", lse=True)
    reference = registry.loaded("reference").compile(wide, Device.cpu(), Config())
    expected = reference.backward(plain, *reference.forward(plain), grad_out.double().numpy(), None)
    for grad, other in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(grad.double(), torch.from_numpy(other), rtol=0.03, atol=0.03)
    again = kernel.backward(inputs, None, None, grad_out, None)
    for grad, other in zip(found, again[:3], strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=0)


def test_out_and_lse_are_taken_where_they_are_its_own() -> None:
    problem = Problem.parse("b1.h2.s7x19.d64.bf16.causal-br.grad")
    inputs, kernel = inputs_of(problem), compiled("flash-attn", problem)
    out, lse = kernel.results(inputs)
    grad = torch.ones_like(out)
    kernel.backward(inputs, out, lse, grad, None)
    with pytest.raises(Unsupported, match="those of other keys"):
        kernel.backward(inputs, out, lse + 0.5, grad, None)
    with pytest.raises(Unsupported, match="has no gradient"):
        kernel.backward(inputs, out, lse, grad, lse)


def test_a_paged_cache_is_read_by_its_table() -> None:
    problem = Problem.parse("b3.h4/2.s1x32.d64.fp16.page=8.lengths.lse")
    kernel = compiled("flashinfer", problem)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(9, 2, 8, 64, generator=generator).half() for _ in range(2))
    query = torch.randn(3, 4, 1, 64, generator=generator).half()
    table = torch.tensor([[3, 1, 99, 99], [99, 99, 99, 99], [8, 0, 5, 2]])
    lengths = torch.tensor([11, 0, 32])
    out, lse = kernel.forward(Inputs(query, key, value, key_lengths=lengths, block_table=table))
    assert lse is not None
    for b, used in enumerate(([3, 1], [], [8, 0, 5, 2])):
        keys, values = (x[used].transpose(0, 1).flatten(1, 2)[:, : lengths[b]][None] for x in (key, value))
        if not used:
            assert not out[b].any()
            assert (lse[b] == -math.inf).all()
            continue
        alone = Problem.parse(f"b1.h4/2.s1x{lengths[b]}.d64.fp16")
        expected, statistics = right(alone, Inputs(query[b : b + 1], keys, values))
        torch.testing.assert_close(out[b : b + 1].double(), expected, rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse[b : b + 1].double(), statistics, rtol=1e-4, atol=1e-4)


def test_operands_that_would_be_misread_are_copied() -> None:
    problem = Problem.parse("b1.h2.s7x19.d64.bf16")
    inputs = inputs_of(problem)
    odd = inputs.map(lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x))
    kernel = compiled("flash-attn", problem)
    out, _ = kernel.forward(odd)
    torch.testing.assert_close(out, kernel.forward(inputs)[0], rtol=0, atol=0)
    for operand in fake_libraries.calls[0][1]:
        assert operand.data_ptr() % 16 == 0


def test_both_signatures_of_flash_attention_3_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse("b1.h2.s7x19.d64.bf16.lse")
    expected = compiled("flash-attn-3", problem).forward(inputs_of(problem))
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_func", fake_libraries.flash_3_of_before)
    for one, other in zip(compiled("flash-attn-3", problem).forward(inputs_of(problem)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_library_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(CompileError, match="flash_attn cannot be used here: ModuleNotFoundError"):
        compiled("flash-attn", Problem.parse("b1.h2.s7x19.d64.bf16"))


@pytest.mark.parametrize(
    ("name", "text", "device", "reason"),
    [
        ("torch-varlen", "b2.h4.s8.d64.bf16", H100, "a dense batch"),
        ("torch-varlen", "b2.h4.s8.d64.bf16.varlen.causal", H100, "'top_left'"),
        ("torch-varlen", "b2.h4.s8.d64.bf16.varlen.softcap=2.0", H100, "softcap=2.0"),
        ("torch-varlen", "b2.h4.s8.d64.bf16.varlen.scale=0.0", H100, "scale=0.0"),
        ("torch-varlen", "b2.h4.s8.d36.bf16.varlen", H100, "dim_qk=36: a multiple of 8"),
        ("torch-varlen", "b2.h4.s8.d64.bf16.varlen.grad.lse", H100, "not differentiable"),
        ("torch-varlen", "b2.h4.s40x9.d64.bf16.varlen.window=2,*.bottom-right", H100, "window=(2, None) with 40"),
        ("torch-varlen", "b2.h4.s8.d64.bf16.varlen.grad.deterministic", H100, "deterministic=True"),
        ("flash-attn", "b2.h4.s8.d64.fp32", H100, "dtype float32"),
        ("flash-attn", "b2.h4.s8.d264.bf16", H100, "dim_qk=264: head dimensions up to 256"),
        ("flash-attn", "b2.h4.s8.d64/32.bf16", H100, "value heads as wide"),
        ("flash-attn", "b2.h4.s8x9.d64.bf16.causal", H100, "'top_left'"),
        ("flash-attn", "b2.h4.s8.d64.bf16.mask=bool", H100, "attn_mask (bool)"),
        ("flash-attn", "b2.h4.s8.d64.bf16.lengths", H100, "key_lengths"),
        ("flash-attn", "b2.h4.s8.d64.bf16.dropout=0.1.seeded", H100, "a dropout seed"),
        ("flash-attn", "b2.h4.s8.d64.bf16.dropout=0.1.softcap=2.0", H100, "one or the other"),
        ("flash-attn", "b2.h4.s8.d64.bf16.dropout=1.0", H100, "less than 1"),
        ("flash-attn", "b2.h4.s7x19.d64.bf16.alibi.causal-br.lse", H100, "off by slope times position"),
        ("flash-attn", "b2.h4.s8.d64.bf16.nonfinite", H100, "0 * NaN"),
        ("flash-attn", "b2.h4.s8.d64.bf16.k=negative", H100, "key runs backwards"),
        ("flash-attn", "b2.h4.s40x9.d64.bf16.window=2,12.bottom-right", H100, "window=(2, 12) with 40 queries"),
        ("flash-attn", "b2.h4.s8.d64.bf16", B200, "compute capability 8.x and 9.x"),
        ("flash-attn", "b2.h4.s8.d64.bf16", Device.cpu(), "NVIDIA GPUs"),
        ("flash-attn-3", "b2.h4.s8.d64.bf16", A100, "needs compute capability 9.0"),
        ("flash-attn-3", "b2.h4.s8.d64.bf16.dropout=0.1", H100, "dropout_p=0.1"),
        ("flash-attn-3", "b2.h4.s8.d64.bf16.grad.deterministic", H100, "deterministic=True"),
        ("flash-attn-4", "b2.h4.s8.d192.bf16", B200, "dim_qk=192, dim_v=192 on"),
        ("flash-attn-4", "b2.h4.s8.d64.bf16.sinks.grad", H100, "sinks with gradients"),
        ("xformers", "b2.h4.s8.d64.bf16.lse", H100, "return_lse"),
        ("xformers", "b2.h4/2.s8.d64.bf16.grad", H100, "gradients of 2 key heads"),
        ("xformers", "b2.h4.s9x8.d64.bf16.causal-br", H100, "9 queries, 8 keys"),
        ("xformers", "b2.h4.s8.d64.bf16.window=2,0", H100, "window=(2, 0)"),
        ("flashinfer", "b2.h4.s8.d64.bf16", H100, "batch 2"),
        ("flashinfer", "b1.h4.s8.d72.bf16", H100, "dim_qk=72: single_prefill_with_kv_cache has kernels for 64"),
        ("flashinfer", "b1.h4.s8.d64.bf16.grad", H100, "has none"),
        ("flashinfer", "b1.h4.s8.d64.bf16.window=2,3", H100, "window=(2, 3)"),
        ("flashinfer", "b2.h4.s2x32.d64.bf16.page=8.lengths", H100, "2 queries over a paged cache"),
        ("sage", "b1.h4.s8x9.d64.bf16.causal", H100, "8 queries, 9 keys"),
        ("sage", "b1.h4.s8.d80.bf16", H100, "dim_qk=80"),
        ("sage", "b1.h4.s8.d64.bf16.grad", H100, "has none"),
        ("torch-flex", "b1.h4.s8.d64.fp64", H100, "dtype float64"),
        ("torch-flex", "b1.h4.s8.d8.bf16", H100, "16 at least"),
        ("torch-flex", "b1.h4.s8.d64.bf16.grad", Device.cpu(), "none on the CPU"),
        ("torch-flex", "b1.h4.s8.d64.fp32.lse", Device.cpu(), "returns none on the CPU"),
        ("torch-flex", "b1.h4.s8.d64.bf16.mask=bf16.grad=qkvm", H100, "a gradient of attn_mask"),
        ("torch-flex", "b1.h4.s8.d64.fp32.mask=fp64", H100, "attn_mask is float64"),
        ("torch-flex", "b1.h4.s8.d64.bf16.dropout=0.1", H100, "dropout_p=0.1"),
    ],
)  # fmt: skip
def test_what_a_library_does_not_do_is_refused(name: str, text: str, device: Device, reason: str) -> None:
    told = registry.loaded(name).supports(Problem.parse(text), device)
    assert any(reason in each for each in told), told


def test_key_heads_are_shared_by_varlen_attn_from_torch_2_12_on() -> None:
    problem = Problem.parse("b2.h4/2.s8.d64.bf16.varlen")
    backend = registry.loaded("torch-varlen")
    earlier = Device("cuda", "H100", (9, 0), versions=(("torch", "2.11.0"),))
    assert backend.supports(problem, earlier) == (
        "4 query heads, 2 key heads: varlen_attn shares them from torch 2.12 on",
    )
    assert backend.supports(problem, H100) == ()


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in ("torch-varlen", "torch-flex")])
def test_what_is_missing_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = registry.loaded(name)
    package = sys.modules[type(backend.package).__module__]
    monkeypatch.setattr(package, "_version", lambda distribution: None)
    assert backend.unavailable() == f"{backend.package.distribution} is not installed: {backend.package.install}"
    assert "pip install" in backend.package.install
    assert backend.toolchain(H100) == {}
    monkeypatch.setattr(package, "_version", lambda distribution: "0.0.1")
    assert "0.0.1 is installed, and its calls are known from" in backend.unavailable()
    monkeypatch.setattr(package, "_version", lambda distribution: f"{backend.package.least}+cu130")
    assert "installed" not in (backend.unavailable() or "")
    assert backend.toolchain(H100) == {backend.package.distribution: f"{backend.package.least}+cu130"}


def test_no_library_is_imported_for_a_plan() -> None:
    script = """
import sys, attnswitch
attnswitch.backends()
for device in ("cpu", "h100"):
    attnswitch.explain("b1.h2.s64.d64.bf16.causal", device=device)
names = ("flash_attn", "flash_attn_interface", "flash_attn_3", "xformers", "flashinfer", "sageattention",
         "torch.nn.attention.varlen", "torch.nn.attention.flex_attention", "torch._inductor")
print([name for name in names if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr


def test_an_approximate_backend_is_never_chosen_and_gets_no_verdict() -> None:
    problem = Problem.parse("b1.h2.s16.d64.bf16")
    out, lse = compiled("sage", problem).forward(inputs := inputs_of(problem))
    assert lse is None
    torch.testing.assert_close(out.double(), right(problem, inputs)[0], rtol=0.02, atol=0.02)
    plan = attnswitch.explain(problem, device="h100")
    candidate = next(candidate for candidate in plan.candidates if candidate.backend == "sage")
    assert candidate.fits
    assert not candidate.trusted
    assert not candidate.open
    assert "approximate, and runs only with backend='sage'" in str(plan)
    outcome = check(Case(), "sage")
    assert outcome.verdict == "refused"
    assert outcome.reasons[0].startswith("approximate")
