"""torch's kernel of the CPU on 16-bit operands: raised to float32 where that is faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Device, Problem
from attnswitch.machine import divergences, registry
from attnswitch.planning import planner
from attnswitch.verify import Case, check

BACKEND = "sdpa-flash"
BOTH = ("float16", "bfloat16")


@contextlib.contextmanager
def processor(monkeypatch: pytest.MonkeyPatch, **has: tuple[str, ...]) -> Iterator[None]:
    """One that has these, each of the types that are named."""
    from attnswitch.backends.sdpa import raised  # type: ignore[import-not-found, unused-ignore]

    for what in ("multiplies", "sums", "tiles"):
        monkeypatch.setattr(raised, f"_{what}", has.get(what, ()).__contains__)
    planner.forget()
    yield
    monkeypatch.undo()
    planner.forget()


@pytest.fixture(params=[False, True], ids=["raised", "native"])
def multiplies(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the processor is taken to have products of 16-bit types; scalar products and tiles it has not."""
    has: bool = request.param
    with processor(monkeypatch, multiplies=BOTH * has):
        yield has


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processor is taken to have products of both types, scalar products too, and tiles of bfloat16."""
    with processor(monkeypatch, multiplies=BOTH, sums=BOTH, tiles=("bfloat16",)):
        yield


def is_raised(problem: Problem) -> bool:
    backend = registry.loaded(BACKEND)
    kernel = backend.compile(problem, Device.cpu(), next(iter(backend.configs(problem, Device.cpu()))))
    return type(kernel).__name__ == "RaisedKernel"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("s9.d8.fp16", "raised"),
        ("s9.d8.fp16.grad", "both"),
        ("s9.d8.bf16", "neither"),
        ("s9.d8.bf16.grad", "both"),
        ("s9.d8.fp32", "neither"),
        ("s9.d8.fp32.grad", "neither"),
        # One query.
        ("s1x9.d8.bf16", "both"),
        ("s1x5000.d8.fp16", "both"),
        ("s1x20000.d256.bf16", "neither"),
        ("s1x20000.d256.fp16", "neither"),
        ("s1x9.d8.fp32", "neither"),
        # How much of the last tile of 512 keys is padding.
        ("s9x341.d8.bf16.grad", "both"),
        ("s9x342.d8.bf16.grad", "raised"),
        ("s9x520.d8.bf16.grad", "both"),
        ("s9x1100.d8.bf16.grad", "raised"),
    ],
)
def test_16_bits_are_raised_where_that_is_faster(text: str, where: str, multiplies: bool) -> None:
    problem = Problem.parse(f"b1.h2.{text}")
    backend = registry.loaded(BACKEND)
    wanted = where == "both" or (where == "raised" and not multiplies)
    assert is_raised(problem) is wanted
    extra, wide = (backend.extra_bytes(p, Device.cpu()) for p in (problem, problem.replace(dtype="float32")))
    copies = 8 if problem.grads else 4  # query, key, value and output, and their gradients
    rows = 2 * (problem.seq_q + problem.seq_k)
    assert extra - wide == (rows * copies // 2 * 8 * 4 if wanted else 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s1x9.d8.bf16", False),
        ("s1x5000.d64.bf16", False),
        ("s1x9.d8.fp16", False),
        ("s9.d8.bf16", False),
        ("s9.d8.fp16", False),
        ("s9x312.d64.bf16.grad", True),
        ("s9x313.d64.bf16.grad", False),
        ("s9x1100.d16.bf16.grad", True),
        ("s9x5000.d256.fp16.grad", True),
    ],
)
@pytest.mark.usefixtures("tiles")
def test_a_processor_with_scalar_products_and_tiles_in_bfloat16(text: str, wanted: bool) -> None:
    assert is_raised(Problem.parse(f"b1.h2.{text}")) is wanted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(heads_kv=2, group=3, seq_q=70, seq_k=33, causal=True, grads="qkv"),
        Case(batch=3, seq_q=20, seq_k=40, lengths=(0, 17, 40), grads="qkv", library="numpy"),
        Case(seq_q=1, seq_k=300, window=(100, 0), alignment="bottom_right", lse=True),
        Case(seq_q=17, seq_k=17, layout="BLHD", causal=True, grads="qkv"),
    ],
    ids=str,
)
def test_what_is_raised_is_right(case: Case, dtype: str, multiplies: bool) -> None:
    case = case.replace(dtype=dtype)
    for reason in divergences.refused(registry.loaded(BACKEND), case.problem(), Device.cpu()):  # of an earlier torch
        pytest.skip(reason)
    outcome = check(case, BACKEND)
    assert (outcome.verdict, outcome.failure) == ("verified", None)


def test_a_step_leaves_gradients_of_the_operands_types(multiplies: bool) -> None:
    operands = [torch.randn(2, 2, 10, 8, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    for _ in range(3):  # the last as it was prepared
        out = attnswitch.attention(*operands, is_causal=True, backend=BACKEND)
        out.sum().backward()
    assert out.dtype == torch.float16
    assert [x.grad.dtype for x in operands if x.grad is not None] == [torch.float16] * 3
