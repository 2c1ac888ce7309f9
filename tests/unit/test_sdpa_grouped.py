"""Decoding with shared key heads on the CPU: the query heads of a key head are its queries."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Device, Problem
from attnswitch.machine import divergences, registry
from attnswitch.verify import Case, MaskRecipe, check

grouped = importlib.import_module("attnswitch.backends.sdpa.grouped").grouped

PLAIN = Case(batch=2, heads_kv=3, group=4, seq_q=1, seq_k=70, dim_qk=16, dim_v=16)
CASES = {
    "plain": PLAIN,
    "lse": PLAIN.replace(lse=True, layout="BLHD", seq_k=600),
    "lengths": PLAIN.replace(lengths=(70, 0), lse=True),
    "bottom-right": PLAIN.replace(causal=True, alignment="bottom_right", lengths=(70, 31)),
    "mask": PLAIN.replace(mask=MaskRecipe("bool", "bk", 4, "random")),
    "mask-of-rows": PLAIN.replace(mask=MaskRecipe("float32", "bqk", 4, "random"), lse=True),
    "dead-rows": PLAIN.replace(mask=MaskRecipe("bool", "bqk", 4, "none"), lse=True),
    "numpy": PLAIN.replace(library="numpy"),
    "unequal": PLAIN.replace(dim_v=24),
    "large": PLAIN.replace(data="large", scale=2.0),
}
#: What is another problem for each query head, or needs gradients.
OTHERS = {
    "heads": PLAIN.replace(mask=MaskRecipe("bool", "bhk", 4, "random")),
    "window": PLAIN.replace(window=(9, 0), alignment="bottom_right"),
    "top-left": PLAIN.replace(causal=True),
    "gradients": PLAIN.replace(grads="qkv"),
    "two": PLAIN.replace(seq_q=2),
    "alone": PLAIN.replace(group=1),
    "nothing": PLAIN.replace(seq_k=0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_it_is_right(name: str, backend: str, dtype: str) -> None:
    case = (CASES | OTHERS)[name].replace(dtype=dtype)
    for reason in divergences.refused(registry.loaded(backend), case.problem(), Device.cpu()):  # of an earlier torch
        pytest.skip(reason)
    outcome = check(case, backend)
    assert outcome.failure is None
    lacks = name == "unequal" if backend == "sdpa-flash" else case.lse
    assert outcome.verdict == ("refused" if lacks else "verified")


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_it_is_so_where_nothing_tells_the_heads_apart(name: str) -> None:
    problem = (CASES | OTHERS)[name].problem()
    found = grouped(problem, Device.cpu())
    assert (found is not None) is (name in CASES)
    if found is not None:
        assert (found.heads_q, found.heads_kv, found.seq_q) == (3, 3, 4)
    assert grouped(problem, Device.named("h200")) is None


def test_queries_are_not_copied_and_keys_not_repeated() -> None:
    problem = Problem.parse("b1.h32/2.s1x4000.d64.fp32")
    backend = registry.loaded("sdpa-flash")
    kernel: Any = backend.compile(problem, Device.cpu(), next(iter(backend.configs(problem, Device.cpu()))))
    query = torch.randn(1, 1, 32, 64).transpose(1, 2)
    key = torch.randn(1, 2, 4000, 64)
    given = kernel.operands(query, key, key)
    assert given[0].data_ptr() == query.data_ptr()
    assert given[1] is given[2] is key
    assert (kernel.kernel.problem.heads_q, kernel.kernel.problem.heads_kv) == (2, 2)


def test_prepared_calls_and_others_have_the_same_bits() -> None:
    query, key = torch.randn(2, 12, 1, 16), torch.randn(2, 3, 70, 16)
    outs = [attnswitch.attention(query, key, key, backend="sdpa-flash") for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert outs[0].shape == query.shape
