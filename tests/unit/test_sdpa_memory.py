"""What torch's backends and ``reference`` say that they hold, against peaks of the resident set as once measured."""

from __future__ import annotations

import pytest

from attnswitch import Problem
from attnswitch.machine import registry
from attnswitch.machine.device import Device

#: Bytes for each of the scores, B * Hq * Lq * Lk, beside operands and results.
MEASURED = [
    ("sdpa-flash", "b1.h8.s2048.d16.fp32", 0.0),
    ("sdpa-flash", "b1.h8.s2048.d16.fp32.causal", 0.0),
    ("sdpa-flash", "b1.h8.s2048.d16.fp32.mask=bool:hqk", 4.0),
    ("sdpa-flash", "b1.h8.s2048.d16.bf16.mask=bool:hqk", 2.0),
    ("sdpa-flash", "b1.h8.s2048.d16.bf16.mask=fp32:hqk", 0.0),
    ("sdpa-flash", "b1.h1.s6144.d16.fp32.window=100,0", 5.0),
    ("sdpa-flash", "b1.h1.s6144.d16.bf16.window=100,0", 3.0),
    ("sdpa-flash", "b2.h1.s1024x8192.d16.fp32.causal-br.lengths", 5.0),
    ("sdpa-flash", "b1.h8.s2048.d16.fp32.mask=bool:hqk.grad", 4.1),
    ("sdpa-math", "b1.h8.s2048.d16.fp32", 9.0),
    ("sdpa-math", "b1.h8.s2048.d16.bf16", 9.1),
    ("sdpa-math", "b1.h8.s2048.d16.fp32.causal", 9.5),
    ("sdpa-math", "b1.h8.s2048.d16.fp32.mask=bool:hqk", 13.0),
    ("sdpa-math", "b1.h8.s2048.d16.bf16.mask=fp32:hqk", 9.1),
    ("sdpa-math", "b1.h8.s2048.d16.fp32.grad", 12.0),
    ("sdpa-math", "b1.h8.s2048.d16.fp32.mask=bool:hqk.grad", 12.9),
    ("reference", "b1.h1.s2048.d16.fp32", 48.1),
    ("reference", "b1.h1.s2048.d16.fp32.grad", 57.0),
]


@pytest.mark.parametrize(("backend", "text", "measured"), MEASURED)
def test_it_says_what_a_call_holds(backend: str, text: str, measured: float) -> None:
    problem = Problem.parse(text)
    said = registry.loaded(backend).extra_bytes(problem, Device.of("cpu", 0))
    each = said / (problem.batch * problem.heads_q * problem.seq_q * problem.seq_k)
    assert 0.9 * measured - 0.05 <= each <= 1.3 * measured + 0.1


@pytest.mark.parametrize("backend", ["sdpa-efficient", "sdpa-cudnn"])
def test_a_bias_on_a_gpu_is_no_larger_than_the_mask_spans(backend: str) -> None:
    device = Device.named("h200")
    extra = registry.load(backend).extra_bytes  # type: ignore[union-attr]
    plain = extra(Problem.parse("b4.h8.s77.d64.bf16"), device)
    masked = extra(Problem.parse("b4.h8.s77.d64.bf16.mask=bool:qk"), device)
    assert masked - plain == 77 * 80 * 2


def test_cudnn_writes_out_what_key_heads_share_in_a_backward() -> None:
    """Once measured on an H200: 5 times the keys of all query heads and 4 bytes for each number of the queries."""
    extra = registry.load("sdpa-cudnn").extra_bytes  # type: ignore[union-attr]
    said = extra(Problem.parse("b1.h16/4.s32768.d128.bf16.causal.grad"), Device.named("h200"))
    numbers = 16 * 32768 * 128
    assert 0.8 * (5 * 2 + 4) * numbers <= said <= (5 * 2 + 4) * numbers
    alone = extra(Problem.parse("b1.h16.s32768.d128.bf16.causal.grad"), Device.named("h200"))
    assert 4 * numbers <= alone <= 4.1 * numbers
