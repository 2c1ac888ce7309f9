"""Tiny problems share generic kernels: which do, how few kernels that makes, and that they honour every feature."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.device import Device
from attnswitch.problem import Memory

arithmetic = importlib.import_module("attnswitch.backends.own.arithmetic")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")

H200 = Device.named("h200")


@pytest.mark.parametrize(
    "text",
    [
        "b1.h2.s64.d64.bf16.mask=bool",
        "b1.h2.s64.d64.fp32.softcap=30.0",
        "b1.h2.s64.d64.fp16.dropout=0.1",
        "b1.h2.s64.d64.fp16.scale=-1.0",
        "b1.h2.s64.d40.bf16.grad",
        "b1.h2.s64.d64.bf16.k=align2",
        "b2.h8.s1x128.d64.bf16.mask=bool:bk",
    ],
)
def test_tiny_problems_with_anything_besides_have_generic_kernels(text: str) -> None:
    assert arithmetic.generic(Problem.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "b1.h2.s64.d64.bf16.causal.grad",
        "b1.h2.s64.d128.fp32.lengths",
        "b1.h2.s513x64.d64.bf16.mask=bool",
        "b8.h32.s128.d64.bf16.mask=bool",
        "b2.h8.s1x512.d64.bf16.mask=bool:bk",
        "b64.h16.s2048.d80.fp16.dropout=0.1.grad",
    ],
)
def test_plain_and_larger_ones_and_decoding_have_their_own(text: str) -> None:
    assert not arithmetic.generic(Problem.parse(text))


UNLIKE = [
    "b1.h2.s64.d{dim}.{dtype}.mask=bool.softcap=30.0.grad",
    "b1.h2.s64.d{dim}.{dtype}.mask=fp64.causal.grad=qkvm",
    "b2.h4/2.s30x99.d{dim}.{dtype}.mask={dtype}:k.lengths.dropout=0.1.lse.grad=v",
    "b1.h1.s500x7.d{dim}.{dtype}.window=3,*.scale=-2.0.grad=k",
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(("dim", "other"), [("64", "33/64"), ("100", "128/72"), ("256", "130")])
def test_whatever_they_have_the_cuda_kernels_are_the_same(dim: str, other: str, dtype: str) -> None:
    pytest.importorskip("cupy")
    kernel = importlib.import_module("attnswitch.backends.cuda.kernel")
    config = importlib.import_module("attnswitch.backends.cuda.config")
    seen = set()
    for text in UNLIKE:
        for size, memory in ((dim, Memory()), (other, Memory(align=8, strided=True))):
            p = Problem.parse(text.format(dim=size, dtype=dtype)).replace(key=memory)
            seen.update(kernel.CudaKernel(p, next(config.configs(p, H200)), H200).variants())
    assert all(variant.generic for variant in seen if variant.rows)
    by_name = [variant.kernel for variant in seen]
    assert sorted(set(by_name)) == [
        "forward",
        "key_gradients",
        "mask_gradient",
        "prepare",
        "prepare_added",
        "query_gradient",
    ]
    assert len(by_name) == 6 + (dim == "256")  # where registers hold one of the gradients of key and value


def test_triton_compiles_them_for_no_strides_and_no_numbers() -> None:
    pytest.importorskip("triton", "3.6")
    kernel = importlib.import_module("attnswitch.backends.triton.kernel")
    config = importlib.import_module("attnswitch.backends.triton.config")
    ahead = importlib.import_module("attnswitch.backends.triton.ahead")
    run = importlib.import_module("attnswitch.backends.triton.run")
    seen: dict[str, set[Any]] = {}
    for text in ("b1.h2.s64.d64.bf16", "b3.h4/2.s17x99.d48.bf16.causal-br", "b1.h1.s1x100.d33/64.bf16.window=3,*"):
        for more in (".softcap=30.0.grad", ".scale=-1.0.grad"):
            p = Problem.parse(text + more)
            chosen = next(config.configs(p, H200))
            made = ahead.launches(lambda make: kernel.TritonKernel(p, H200, chosen, make), ahead.inputs_of(p))  # noqa: B023
            for launch in made:
                key = run._key(launch.kernel, launch.arrays, launch.passed, 0)
                seen.setdefault(launch.kernel.__name__, set()).add(key)
    assert {name: len(keys) for name, keys in seen.items()} == dict.fromkeys(
        ("forward", "prepare", "query_gradient", "key_gradients"), 1
    )


def test_explain_says_that_kernels_are_shared() -> None:
    backend = importlib.import_module("attnswitch.backends.cuda.backend")
    for text in ("b1.h4.s128.d96.bf16.causal", "b1.h2.s64.d64.bf16.mask=bool.grad"):
        (remark,) = backend.CudaBackend().remarks(Problem.parse(text), H200, "")
        assert remark.startswith("forward by generic kernels, which tiny problems share")


def only_generic(launch: Callable[..., None]) -> Callable[..., None]:
    """``launch``, which kernels with tiles may go to only if they are generic."""

    def checked(variant: Any, *rest: Any) -> None:
        assert variant.generic or not variant.rows
        launch(variant, *rest)

    return checked


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("mask", [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, None])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "is_causal": True}, {"dropout_p": 0.3, "seed": 5}], ids=str)
def test_they_honour_every_feature(
    mask: torch.dtype | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "launch", only_generic(emulator.launch))
    torch.manual_seed(0)
    wide = [torch.randn(2, 4, 23, 20), torch.randn(2, 2, 38, 20), torch.randn(2, 2, 38, 36)]
    bias = None if mask is None else torch.randn(2, 4, 23, 38)
    given = {"key_lengths": torch.tensor([38, 9]), **options}
    if bias is not None:
        given["attn_mask"] = bias > -1.0 if mask is torch.bool else bias.to(mask)
    results = []
    for backend, dtype in (("cuda", torch.float32), ("tiled", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in wide]
        more = dict(given)
        if backend == "tiled" and mask is not None and mask.is_floating_point:
            more["attn_mask"] = given["attn_mask"].double()
        if mask is not None and mask.is_floating_point:
            more["attn_mask"] = more["attn_mask"].detach().requires_grad_()
            leaves.append(more["attn_mask"])
        out = attnswitch.attention(*leaves[:3], backend=backend, **more)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        near = 1e-2 if mask in (torch.float16, torch.bfloat16) else 2e-5  # whose own gradient has few bits
        torch.testing.assert_close(got.double(), expected, rtol=near, atol=near)


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("wanted", ["qkv", "k", "v"])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
@pytest.mark.parametrize("dropout", [0.3, 5e-8, 0.0])  # the second drops nothing, and scales what it keeps
def test_they_have_the_gradients_asked_for_in_every_type(
    dropout: float, dtype: torch.dtype, near: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "launch", only_generic(emulator.launch))
    torch.manual_seed(0)
    operands = [torch.randn(2, 4, 23, 80)[..., ::2], torch.randn(2, 2, 38, 41)[..., 1:], torch.randn(2, 2, 38, 36)]
    mask = torch.rand(2, 1, 1, 38) > 0.2
    results = []
    for backend, kind in (("cuda", dtype), ("tiled", torch.float64)):
        leaves = [
            x.to(dtype).to(kind).requires_grad_(letter in wanted) for x, letter in zip(operands, "qkv", strict=True)
        ]
        seed: dict[str, Any] = {"dropout_p": dropout, "seed": 5} if dropout else {}
        out = attnswitch.attention(*leaves, attn_mask=mask, backend=backend, **seed)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x for x in leaves if x.requires_grad])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=near, atol=near)
