"""The kernel that makes one bias of all that hides, held against the same by torch's operations.

Triton interprets it in a process of its own: this file, run as a script, prints what went wrong.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine import registry
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

pytest.importorskip("triton", "3.6")

ROOT = Path(__file__).parents[2]
masks = importlib.import_module("attnswitch.backends.sdpa.masks")
compose = importlib.import_module("attnswitch.backends.sdpa.compose")
GPU = Device.named("h200")

#: Options of problems with two batch entries, two heads, 5 queries and 13 keys or 1,030.
OPTIONS = [
    "mask=bool:qk",
    "mask=bool:bk",
    "mask=bool:hq",
    "mask=bool:bhqk",
    "mask=bf16:qk",
    "mask=bf16:bhqk",
    "mask=bf16:k.causal",
    "mask=bool:k.causal-br.lengths",
    "mask=bf16:qk.window=3,2",
    "window=3,2",
    "window=2,*.lengths",
    "causal-br",
    "causal-br.lengths",
    "lengths",
]


def test_it_makes_what_torch_makes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    if ran.stdout.startswith("the interpreter of"):
        pytest.skip(ran.stdout)
    assert ran.stdout.splitlines()[-1] == f"{2 * len(OPTIONS)} alike, and the gradient"


@pytest.mark.parametrize(
    ("kind", "mask", "lengths", "lift"),
    [(1, "*u8", "i32", "i32"), (2, "*bf16", "*i64", "*fp32"), (0, "i32", "*i32", "*fp32")],
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_it_compiles_for_a_gpu_that_is_not_here(kind: int, mask: str, lengths: str, lift: str) -> None:
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    kernel = importlib.import_module("attnswitch.backends.sdpa.kernel")._compose
    flags = {"KIND": kind, "LENGTHS": lengths != "i32", "LEFT": True, "RIGHT": True, "BOTTOM": True, "FAR": 1024.0}
    flags |= {"BLOCK": 128, "LIFT": lift != "i32"}
    types = {"mask": mask, "lengths": lengths, "bias": "*bf16", "dead": "*u8", "lift": lift}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in flags else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): flag for name, flag in flags.items()}
    made = triton.compile(compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target)
    assert ".target sm_90" in made.asm["ptx"]


def drawn(problem: Problem, draw: random.Random) -> Inputs:
    p = problem
    query, key = (torch.zeros(p.batch, p.heads_q, n, 8, dtype=torch.bfloat16) for n in (p.seq_q, p.seq_k))
    mask: Any = None
    if p.mask and p.mask_shape:
        b, h, q, k = p.mask_shape
        mask = torch.randn(b, h, k, q).transpose(2, 3)  # in an order of its own
        mask = mask > 0 if p.mask.is_bool else mask.to(torch.bfloat16)
        hidden = False if p.mask.is_bool else -torch.inf
        mask[..., draw.randrange(q), :] = hidden
        mask[..., draw.randrange(k)] = hidden
        if not p.mask.is_bool:
            mask[0, 0, draw.randrange(q)] = -3.0e5
            mask[-1, -1, -1, draw.randrange(k)] = torch.nan
    lengths = torch.tensor([draw.randrange(p.seq_k + 1), 0]) if p.key_lengths else None
    return Inputs(query, key, key, mask, lengths)


def alike(problem: Problem, inputs: Inputs) -> None:
    wanted = masks.compose(problem, inputs, lifted=True)
    bias = masks.additive(wanted.mask, torch.bfloat16).expand(
        problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    )
    for _ in range(2):
        got = compose.Composer(problem, GPU)(inputs, lifted=True)
        assert got.mask.dtype is torch.bfloat16
        assert got.mask.stride(3) == 1
        assert all(step % 8 == 0 for step in got.mask.stride()[:3])
        nan = wanted.mask.isnan().any(-1, keepdim=True).expand(*bias.shape[:3], 1)
        torch.testing.assert_close(got.mask.masked_fill(nan, 0.0), bias.masked_fill(nan, 0.0), rtol=0, atol=0)
        assert torch.equal(got.mask.isnan().any(-1, keepdim=True), nan)
        rows = bias.shape[:3]
        assert torch.equal(got.dead.expand(*rows, 1), wanted.dead.expand(*rows, 1))
        lifts = (x.expand(rows).masked_fill(nan[..., 0], 0.0) for x in (got.lift, wanted.lift))
        torch.testing.assert_close(*lifts, rtol=0, atol=0)


def gradient() -> None:
    """That of a broadcast mask, summed over what it is broadcast to."""
    problem = Problem.parse("b2.h2.s5x13.d8.bf16.mask=bf16:qk.grad=qkvm")
    mask = torch.randn(1, 1, 5, 13, dtype=torch.bfloat16, requires_grad=True)
    query = torch.zeros(2, 2, 5, 8, dtype=torch.bfloat16)
    hiding = compose.Composer(problem, GPU)(Inputs(query, query, query, mask))
    upstream = torch.randn(2, 2, 5, 13, dtype=torch.bfloat16)
    (got,) = torch.autograd.grad(hiding.mask, mask, upstream)
    torch.testing.assert_close(got, upstream.sum((0, 1), keepdim=True))


def main() -> None:
    draw, count = random.Random(0), 0
    torch.manual_seed(0)
    for options in OPTIONS:
        for keys in (13, 1030):
            problem = Problem.parse(f"b2.h2.s5x{keys}.d8.bf16.{options}")
            alike(problem, drawn(problem, draw))
            count += 1
    gradient()
    print(f"{count} alike, and the gradient")


if __name__ == "__main__":
    if absence := registry.loaded("triton").unavailable():
        print(absence)
    else:
        main()
