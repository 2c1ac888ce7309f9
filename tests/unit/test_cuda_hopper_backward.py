"""Hopper's backward: what it takes, how its work is divided, its builds, and its gradients in the emulator."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import nights
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.bench import workload
from attnswitch.machine import registry
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Mask, Memory

sys.path.append(str(Path(__file__).parents[2] / "fixtures"))
usage = importlib.import_module("cubin").usage
sass = importlib.import_module("sass")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")

H200 = Device.named("h200")
PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16.causal.grad")
#: Bytes that a thread spills where a mask is looked at; where threads add to dQ in turn, which have the few registers
#: of the loader; and where these look at a mask. Of sequences one after another, of what has most in registers.
SPILLED = {".mask=bool": 24, ".softcap=30.0": 8}
SPILLED |= {".dropout=0.1": 8, ".mask=bool.dropout=0.1": 24, ".softcap=30.0.dropout=0.1": 32}
SPILLED |= {".deterministic": 32, ".mask=bool.deterministic": 72, ".softcap=30.0.deterministic": 24}
PACKED = {"192/128.varlen": 16, "64.varlen.deterministic": 8, "128.varlen.deterministic": 32}
disassembled = pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        PLAIN.replace(dtype="float16", lse=True, grads="v"),
        PLAIN.replace(alignment="bottom_right", seq_q=300, window=(64, 5), key_lengths=True),
        *(PLAIN.replace(dim_qk=dim, dim_v=dim) for dim in (8, 64, 80)),
        PLAIN.replace(dim_qk=96, softcap=30.0),
        *(PLAIN.replace(seq_q=queries, dim_v=64) for queries in (1, 20)),
        *(PLAIN.replace(dim_qk=dim, dim_v=dim_v) for dim, dim_v in ((192, 128), (136, 8), (64, 256), (200, 192))),
        PLAIN.replace(deterministic=True, mask=Mask("bool")),
        PLAIN.replace(deterministic=True, dim_qk=256, dim_v=256, grads="kv"),
        *(PLAIN.replace(mask=Mask("bool", axes)) for axes in ("", "bk", "q", "bhqk")),
        *(PLAIN.replace(dropout=0.1, softcap=softcap) for softcap in (0.0, 30.0)),
        PLAIN.replace(dropout=0.1, dim_qk=64, dim_v=64, mask=Mask("bfloat16", "bk")),
    ],
    ids=str,
)
def test_it_takes_the_gradients(problem: Problem) -> None:
    assert families.against_hopper_backward(problem, H200) == ()
    assert next(config.configs(problem, H200)).backward is not None


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (PLAIN, "a100", r"compute capability 9\.0"),
        (PLAIN.replace(dtype="float32", softcap=3.0), "h200", "float32"),
        (PLAIN.replace(mask=Mask("float32", "k")), "h200", "attn_mask of float32"),
        (PLAIN.replace(dropout=0.1, deterministic=True), "h200", r"dropout_p=0\.1 with deterministic=True"),
        (PLAIN.replace(dropout=0.1, dim_qk=192), "h200", r"dropout_p=0\.1 with head dimension 192"),
        (PLAIN.replace(deterministic=True, dim_qk=192), "h200", "deterministic=True with head dimension 192"),
        (PLAIN.replace(deterministic=True, dim_v=256, grads="q"), "h200", "deterministic=True with head dimension 256"),
        (PLAIN.replace(dim_qk=20, query=Memory(align=16)), "h200", "dim_qk=20"),
        (PLAIN.replace(scale=-0.5), "h200", "scale="),
        (PLAIN.replace(seq_q=20, dim_v=256), "h200", "20 queries"),
        (PLAIN.replace(seq_q=20, dim_qk=32), "h200", "20 queries"),
        (PLAIN.replace(seq_q=20, deterministic=True), "h200", "20 queries"),
        (PLAIN.replace(seq_k=0), "h200", "nothing to compute"),
        (PLAIN.replace(value=Memory(expanded=True)), "h200", "value is expanded"),
    ],
    ids=str,
)
def test_the_portable_kernels_take_the_rest(problem: Problem, device: str, words: str) -> None:
    where = Device.named(device)
    (reason,) = families.against_hopper_backward(problem, where)
    assert re.search(words, reason)
    assert next(config.configs(problem, where)).backward is None


def test_heads_wider_than_any_tile_have_reasons() -> None:
    wide = PLAIN.replace(dropout=0.1, dim_qk=320)
    assert any("320" in reason for reason in families.against_hopper_backward(wide, H200))
    assert registry.loaded("cuda").extra_bytes(wide, H200) >= 0


def test_explain_says_that_blocks_take_turns() -> None:
    told = str(attnswitch.explain(PLAIN.replace(deterministic=True), device=H200))
    assert "blocks add to dQ in turn" in " ".join(told.split())
    for other in (PLAIN, PLAIN.replace(deterministic=True, grads="kv")):  # dK and dV are sums of one block
        assert "in turn" not in str(attnswitch.explain(other, device=H200))


def test_without_gradients_there_is_no_tile_of_it() -> None:
    assert next(config.configs(PLAIN.replace(grads=""), H200)).backward is None


# -- how the work is divided -------------------------------------------------------------------------------------------


def met(p: Problem, keys: int, queries: int) -> list[int]:
    """The tiles of queries that each tile of keys meets by position, counted one by one."""
    left, right = p.reach
    offset = p.seq_k - p.seq_q if p.bottom_right else 0
    found = []
    for first in range(0, p.seq_k, keys):
        last = min(first + keys, p.seq_k) - 1
        low = 0 if right is None else max(0, first - offset - right)
        high = p.seq_q if left is None else min(p.seq_q, last - offset + left + 1)
        found.append(max(0, -(-high // queries) - low // queries) if high > low else 0)
    return found


@pytest.mark.parametrize(
    ("sizes", "how"),
    list(
        itertools.product(
            [(1000, 1000), (300, 2000), (2000, 300), (64, 128), (777, 1)],
            ["", ".causal", ".causal-br", ".window=100,30", ".causal-br.window=1000,0"],
        )
    ),
)
@pytest.mark.parametrize(("keys", "queries"), [(64, 64), (128, 64), (128, 128)])
def test_tiles_of_queries_are_counted_as_the_kernel_meets_them(
    sizes: tuple[int, int], how: str, keys: int, queries: int
) -> None:
    p = Problem.parse(f"b1.h1.s{sizes[0]}x{sizes[1]}.d64.bf16{how}.grad")
    total, longest = choice._queries(p, tiles.HopperGradients(keys, queries, 2))
    right = met(p, keys, queries)
    assert sum(right) <= total <= sum(right) + 2 * len(right)  # a last tile that is not full may count as full
    assert max(right) <= longest <= max(right) + 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("b4.h16.s4096.d128.bf16.grad", 1),  # 2,048 tiles of keys
        ("b2.h16/4.s1024.d64.bf16.causal.grad", 3),  # 64, for 132 SMs
        ("b1.h8/1.s2048x64.d64.bf16.grad", 16),  # one
        ("b1.h1.s40.d64.bf16.grad", 1),  # and one tile of queries
        ("b2.h16/4.s1024.d192/128.bf16.causal.grad", 4),  # 64
        ("b2.h16/4.s1024.d256.bf16.causal.grad", 3),  # 128, of 64 keys
    ],
)
def test_few_tiles_of_keys_are_shared_by_several_blocks(text: str, parts: int) -> None:
    p = Problem.parse(text)
    assert choice.splits(p, H200, choice.gradients(p)) == parts


@pytest.mark.parametrize(
    ("dims", "compiled"),
    [
        ("8/64", (64, 64)),
        ("64/72", (128, 128)),
        ("136/128", (192, 128)),
        ("160", (256, 256)),
        ("192/8", (192, 128)),
        ("128/136", (256, 256)),
        ("200/64", (256, 256)),
    ],
)
def test_head_dimensions_are_filled_up_to_those_that_are_compiled(dims: str, compiled: tuple[int, int]) -> None:
    p = Problem.parse(f"b2.h4.s1000.d{dims}.bf16.grad")
    made = backward.Backward(p, choice.gradients(p), H200)
    assert [(step.variant.dim, step.variant.dim_v) for step in made.steps] == 3 * [compiled]


def test_memory_is_what_the_launches_need() -> None:
    """base and delta, counts of blocks, sums of dQ, and of dK and dV for each split: linear in the lengths."""
    p = Problem.parse("b2.h16/4.s1000.d80.bf16.causal.grad")
    made = backward.Backward(p, choice.gradients(p), H200)
    rows, counts, parts = 2 * 16 * 1024, 32, max(step.splits for step in made.steps)
    assert parts > 1
    assert made.space == 2 * rows + counts + rows * 128 + 2 * parts * 2 * 4 * 1024 * 128
    assert made.begins == (0, 4 * rows + 4 * counts, 8 * rows + 4 * counts, 8 * rows + 4 * counts + 4 * rows * 128)
    assert [step.blocks for step in made.steps] == [rows // 64, 2 * 4 * 8 * parts, rows // 64 + 2 * 2 * 4 * 16]


@pytest.mark.parametrize("more", ["", ".deterministic", "=kv", ".mask=bf16"])
@pytest.mark.parametrize(
    "problem", ["b1.h32/8.s32768.d128.bf16.causal", "b2.h8.s1000.d80.bf16", "b1.h4.s999x300.d64.bf16"]
)
def test_the_backend_says_how_much_memory_that_is(problem: str, more: str) -> None:
    p = Problem.parse(f"{problem}.grad{more}" if "mask" not in more else f"{problem}{more}.grad")
    made = backward.Backward(p, choice.gradients(p), H200)
    copied = math.prod(p.mask_shape or (0,)) * 2 if tiles.copies_mask(p) else 0
    assert 4 * made.space <= registry.loaded("cuda").extra_bytes(p, H200) <= 4 * made.space + 1.1 * copied


def test_sums_of_keys_are_an_even_number_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "splits", lambda *_: 3)
    p = Problem.parse("b2.h16/4.s1000x150.d256.bf16.grad")
    made = backward.Backward(p, choice.gradients(p), H200)
    rows, counts = 2 * 16 * 1024, 32
    assert made.space == 2 * rows + counts + rows * 256 + 2 * 3 * 2 * 4 * 256 * 256
    assert [step.blocks for step in made.steps] == [rows // 64, 2 * 4 * 3 * 3, rows // 64 + 2 * 2 * 4 * 4]


@pytest.mark.parametrize("dim", [64, 128])
def test_turns_take_memory_of_their_own(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside delta a number for each tile of queries; in shared memory two tiles of sums."""
    monkeypatch.setattr(backward, "splits", lambda *_: 2)
    p = Problem.parse(f"b2.h16/4.s1000.d{dim}.bf16.causal.grad")
    plain, ordered = (backward.Backward(q, choice.gradients(q), H200) for q in (p, p.replace(deterministic=True)))
    numbers = 2 * 16 * 16
    assert ordered.space == plain.space + numbers
    assert ordered.begins == tuple(at + 4 * numbers * (n > 1) for n, at in enumerate(plain.begins))
    shared = ordered.steps[1].variant.shared
    assert shared - tiles.gradients_shared(choice.gradients(p.replace(deterministic=True)), p) == 2 * 4 * 64 * dim
    assert max(shared, plain.steps[1].variant.shared) <= H200.on_chip


# -- builds ------------------------------------------------------------------------------------------------------------


def expected(chosen: Any) -> tuple[int, int, int]:
    """Waits for products, products of 16 columns or rows, and those with a left operand in registers."""
    if chosen.kernel == "backward_wide":  # S, dP, dV and dK at two places each, and two panels of dQ in each role
        return 14, 2 * (256 + 256 + 64 + 64) // 16 + 2 * 4 * 4, 16
    if chosen.kernel == "backward_halved":  # of 32 queries: S at three, the others at two; dQ in five parts
        return 12, (3 * 192 + 2 * (128 + 32 + 32)) // 16 + 5 * 8, 8
    by_columns, own = chosen.dim // 16, chosen.columns // 16  # of S and dP alike; of dV and dK alike
    if chosen.kernel == "backward_ordered":  # S and dQ at two places, dP, dV, and dK at two
        return 6, 3 * by_columns + 3 * own + 2 * 8, 3 * own
    return 6, 2 * by_columns + 2 * own + 2 * 8, 2 * own  # S, dP, dV, dK, and dQ at two places


@disassembled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "more"),
    nights.some(
        [
            *itertools.product(("64", "128"), ("", ".softcap=30.0", ".alibi", *SPILLED)),
            *itertools.product(("192/128", "256"), ("", ".softcap=30.0", ".alibi", ".mask=bool")),
            *itertools.product(("64", "128"), (".mask=bf16:hqk.dropout=0.1", ".mask=bf16:bk.dropout=0.1")),
            *itertools.product(("64", "128", "192/128", "256"), (".varlen",)),
            *itertools.product(("64", "128"), (".varlen.deterministic",)),
        ],
        3,
    ),
)
def test_products_overlap_and_stay_in_registers(dims: str, more: str, tmp_path: Path) -> None:
    """ptxas lets products come one after another where it cannot follow them, and says so in its log alone."""
    p = Problem.parse(f"b4.h16.s4096.d{dims}.bf16{more}.grad")
    chosen = backward._backward(p, choice.gradients(p))
    cubin = nvrtc.cubin(chosen, "sm_90a")
    text = sass.listing(cubin, tmp_path)
    registers, found = sass.overwritten(text)
    assert found == []
    assert (text.count("WARPGROUP.DEPBAR"), text.count("HGMMA.64x"), registers) == expected(chosen)
    assert usage(cubin).local <= PACKED.get(dims + more, SPILLED.get(more, 0))


# -- gradients, emulated -----------------------------------------------------------------------------------------------

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
#: Of dropout, of more than 32 bits.
SEED = 2**40 + 9


def arrays(p: Problem, seed: int = 0) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(seed)
    shapes = (
        (p.batch, p.heads_q, p.seq_q, p.dim_qk),
        (p.batch, p.heads_kv, p.seq_k, p.dim_qk),
        (p.batch, p.heads_kv, p.seq_k, p.dim_v),
        (p.batch, p.heads_q, p.seq_q, p.dim_v),
    )
    found = [rng.standard_normal(shape).astype(TYPES[p.dtype]) for shape in shapes]
    return found, rng.standard_normal(shapes[0][:3]).astype(np.float32)


def compare(
    text: str,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    mask: Any = None,
    lengths: Any = None,
    made: Callable[[Problem], tuple[list[Any], Any]] = arrays,
) -> None:
    """Gradients beside ``reference``; what lies past the lengths is NaN."""
    monkeypatch.setattr(backward, "splits", lambda *_: parts)
    p = Problem.parse(text)
    (q, k, v, grad), grad_lse = made(p)
    exact = [array.astype(np.float64) for array in (q, k, v)]
    call = {"is_causal": p.causal, "window": p.window, "softcap": p.softcap, "attn_mask": mask, "key_lengths": lengths}
    call |= {"backend": "reference", "causal_alignment": p.alignment, "dropout_p": p.dropout}
    call |= {"seed": SEED if p.dropout else None}
    out, lse = attnswitch.attention(*exact, return_lse=True, **call)
    right = attnswitch.attention_backward(
        grad.astype(np.float64), *exact, out=out, lse=lse, grad_lse=grad_lse.astype(np.float64), **call
    )
    for b, length in enumerate(lengths or ()):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    launch = backward.Backward(p, choice.gradients(p), Device.cpu())
    inputs = Inputs(q, k, v, mask, None if lengths is None else np.array(lengths), call["seed"])
    got = launch(inputs, out.astype(q.dtype), lse.astype(np.float32), grad, grad_lse)
    unit = 2.0**-8 if p.dtype == "bfloat16" else 2.0**-11
    units = 2 if max(p.dim_qk, p.dim_v) <= 128 else 3  # of sums of more terms
    for name, mine, wanted in zip("qkv", got[:3], right[:3], strict=True):
        want: Any = wanted
        worst = np.abs(mine.astype(np.float64) - want).max()
        assert worst <= units * unit * np.abs(want).max(), name


@compiled
@pytest.mark.parametrize(
    ("text", "parts"),
    nights.some(
        [
            ("b1.h2.s150x200.d64.bf16.grad", 1),
            ("b1.h4/2.s150x200.d64.fp16.causal.grad", 3),
            ("b1.h2.s200x150.d128.bf16.causal-br.grad", 1),
            ("b2.h2.s70x300.d72.bf16.window=40,3.grad", 1),
            ("b2.h2.s300x400.d64.bf16.window=150,20.grad", 1),
            ("b1.h2.s300x200.d64.bf16.causal-br.grad", 2),
            ("b1.h2.s100.d96/64.fp16.softcap=3.0.grad", 2),
            ("b1.h2.s150x200.d64.fp16.causal.softcap=3.0.grad", 1),
            ("b1.h4/2.s150x200.d64.fp16.causal.dropout=0.3.grad", 3),
            ("b2.h2.s70x301.d128.bf16.window=40,3.dropout=0.1.grad", 1),
            ("b1.h2.s150x200.d96.bf16.softcap=3.0.dropout=0.5.grad", 1),
            ("b1.h4/2.s150x200.d64.fp16.causal.grad.deterministic", 3),
            ("b1.h2.s200x150.d128.bf16.causal-br.grad.deterministic", 1),
            ("b2.h2.s70x300.d72.bf16.window=40,3.grad.deterministic", 1),
            ("b1.h2.s150x200.d64.fp16.causal.softcap=3.0.grad.deterministic", 1),
            ("b1.h2.s150x200.d256.bf16.grad", 1),
            ("b1.h4/2.s150x200.d256.fp16.causal.grad", 3),
            ("b2.h2.s70x300.d224.bf16.window=40,3.grad", 1),
            ("b1.h2.s100.d256/64.fp16.softcap=3.0.causal.grad", 2),
            ("b1.h2.s150x200.d192/128.bf16.causal.grad", 1),
            ("b1.h2.s200x150.d160/96.bf16.causal-br.grad", 3),
            ("b2.h2.s70x300.d192/64.fp16.window=40,3.grad", 1),
            ("b1.h2.s100.d192/128.fp16.softcap=3.0.causal.grad", 1),
        ],
        3,
    ),
)
def test_gradients_are_right(text: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(text, parts, monkeypatch)


@compiled
@pytest.mark.parametrize(
    ("dims", "queries", "how"),
    [
        *((dims, queries, how) for dims, queries in (("64", 200), ("128", 100)) for how in ("", ".deterministic")),
        ("192/128", 100, ""),
        ("256", 100, ""),
    ],
)
def test_what_lies_past_the_lengths_does_not_leak(
    dims: str, queries: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(f"b3.h2.s{queries}x300.d{dims}.bf16.lengths.causal-br.grad{how}", 2, monkeypatch, lengths=[130, 0, 300])


@compiled
@pytest.mark.parametrize(
    ("dims", "axes", "how"),
    [
        *(("64", axes, how) for axes in ("qk", "bk", "bhk") for how in ("", ".deterministic")),
        *((dims, axes, "") for dims in ("192/128", "256") for axes in ("hqk", "bk")),
        *((dims, "qk", ".dropout=0.2") for dims in ("64", "128")),
    ],
)
def test_masks_hide_whole_tiles_and_parts_of_them(
    dims: str, axes: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    shape = tuple(n if letter in axes else 1 for letter, n in zip("bhqk", (2, 4, 150, 300), strict=True))
    mask = rng.random(shape) < 0.5
    mask[..., : 64 if "q" in axes else None, :140] = False  # a whole tile of keys, from these queries
    mask[..., 200:] = True
    compare(f"b2.h4/2.s150x300.d{dims}.bf16.mask=bool:{axes}.grad{how}", 1, monkeypatch, mask)


def overflowing(p: Problem) -> tuple[list[Any], Any]:
    """Arrays of which dP is infinite for the last key, and every query but the last."""
    (q, k, v, grad), grad_lse = arrays(p)
    v[:], v[..., -1, :] = v * 1e-30, 1e30
    grad[:], grad[..., -1, :] = grad * 1e30, 0
    return [q, k, v, grad], grad_lse


@compiled
@pytest.mark.parametrize("how", [".causal", ".mask=bool:qk"])
@pytest.mark.parametrize("dims", ["64", "128", "192/128", "256"])
def test_what_is_hidden_may_overflow(dims: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.tri(150, dtype=bool)[None, None] if "mask" in how else None
    compare(f"b1.h2.s150.d{dims}.bf16{how}.grad", 1, monkeypatch, mask, made=overflowing)


# -- bits, on a GPU ----------------------------------------------------------------------------------------------------

#: Calls of one problem that are to give the same bits.
CALLS = 100
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of capability 9.0"
)


def repeated(p: Problem, calls: int) -> None:
    """Asserts that all calls give the bits of the first, whatever runs beside them."""
    work = workload.of(p, "cuda")
    out = attnswitch.attention(work.query, work.key, work.value, backend="cuda", **work.keywords())
    first = torch.autograd.grad(out, work.leaves, work.grad_out, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in first)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for call in range(calls - 1):
        with torch.cuda.stream(beside):  # takes SMs from it, more or fewer, and lets go at another time
            size = 256 * (1 + call % 16)
            torch.ones(size, size, device="cuda").matmul(torch.ones(size, size, device="cuda"))
        again = torch.autograd.grad(out, work.leaves, work.grad_out, retain_graph=True)
        for name, mine, other in zip("qkv", first, again, strict=True):
            assert torch.equal(mine, other), f"grad {name} of call {call + 2} differs"


@hopper
@pytest.mark.parametrize(
    "text",
    [
        *(f"b4.h16.s4096.d{dim}.bf16{how}.grad" for dim in (64, 128) for how in ("", ".causal")),
        "b1.h16.s16384.d128.bf16.causal.grad",
        "b1.h2.s16384.d128.bf16.grad",  # all blocks of a head at once
        "b2.h16/4.s1000x1777.d64.fp16.causal-br.grad",
        "b1.h8/1.s2048.d128.bf16.causal.grad",  # splits
        "b2.h4.s5000x300.d64.bf16.grad",
        "b2.h8.s4000.d128.fp16.causal.window=700,0.grad",
        "b4.h8.s3000.d96.bf16.lengths.causal-br.softcap=20.0.grad",
        "b2.h8/2.s1500x2100.d128.bf16.mask=bool:bhqk.grad",
    ],
)
def test_a_hundred_calls_give_the_same_bits(text: str) -> None:
    repeated(Problem.parse(text).replace(deterministic=True), CALLS)
