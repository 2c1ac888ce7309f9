"""Few queries beside many keys under a causal mask from the top left: keys that none sees are not read."""

from __future__ import annotations

import importlib

import pytest
import torch

import attnswitch
from attnswitch import Device, Problem
from attnswitch.call.finite import checking
from attnswitch.machine import divergences, registry
from attnswitch.verify import Case, MaskRecipe, check

trimmed = importlib.import_module("attnswitch.backends.sdpa.trimmed").trimmed
PLAIN = Case(batch=2, heads_kv=2, group=2, seq_q=9, seq_k=600, dim_qk=16, dim_v=16, causal=True)
OTHERS = {
    "square": PLAIN.replace(seq_q=600, dim_qk=8, dim_v=8),
    "bottom-right": PLAIN.replace(alignment="bottom_right"),
    "window": PLAIN.replace(window=(4, 3)),
    "mask": PLAIN.replace(mask=MaskRecipe("bool", "bk", 4, "random")),
    "lengths": PLAIN.replace(lengths=(600, 3)),
    "gradients": PLAIN.replace(grads="qkv"),
    "all": PLAIN.replace(causal=False),
}


@pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seq_q", [1, 9])
def test_it_is_right(seq_q: int, dtype: str, backend: str) -> None:
    for case in (PLAIN, PLAIN.replace(lse=True, layout="BLHD"), PLAIN.replace(library="numpy", check="causality")):
        case = case.replace(seq_q=seq_q, dtype=dtype)
        assert trimmed(case.problem(), Device.cpu()).seq_k == seq_q
        if any(True for _ in divergences.refused(registry.loaded(backend), case.problem(), Device.cpu())):
            continue  # of an earlier torch
        outcome = check(case, backend)
        assert outcome.failure is None
        assert outcome.verdict == ("refused" if case.lse and backend == "sdpa-math" else "verified")


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_loses_keys(name: str) -> None:
    assert trimmed(OTHERS[name].problem(), Device.cpu()) is None
    assert trimmed(PLAIN.problem(), Device.named("h200")) is None


def test_prepared_calls_do_not_read_them_either() -> None:
    query, key = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 600, 16)
    outs = [attnswitch.attention(query, key, key, is_causal=True, backend="sdpa-flash") for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    key[:, :, 9:] = float("nan")
    with checking("never"):
        outs = [attnswitch.attention(query, key, key, is_causal=True, backend="sdpa-flash") for _ in range(4)]
    assert all(torch.equal(out, outs[0]) and out.isfinite().all() for out in outs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_memory_is_of_the_keys_that_are_seen(dtype: str) -> None:
    backend = registry.loaded("sdpa-flash")
    many, few = (Problem.parse(f"b1.h8.s9x{keys}.d64.{dtype}.causal") for keys in (40_000, 9))
    assert backend.extra_bytes(many, Device.cpu()) == backend.extra_bytes(few, Device.cpu())
    kernel = backend.compile(many, Device.cpu(), next(iter(backend.configs(many, Device.cpu()))))
    assert type(kernel).__name__ == "TrimmedKernel"
    assert backend.precision(many, Device.cpu()) == backend.precision(few, Device.cpu())
