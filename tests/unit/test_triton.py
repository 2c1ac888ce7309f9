"""The Triton backend beside ``verify``: what it refuses, its tiles and splits, its tile lists.

Tests marked ``interpreted`` run in one process for all of them, which has TRITON_INTERPRET=1 before Triton is imported:
this file, run as a script, runs them and prints what each raised.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import interpreting
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Mask, Memory
from attnswitch.problem.philox import keep_mask

pytest.importorskip("triton", "3.6")

ROOT = Path(__file__).parents[2]
arithmetic = importlib.import_module("attnswitch.backends.own.arithmetic")
config = importlib.import_module("attnswitch.backends.triton.config")
backend = importlib.import_module("attnswitch.backends.triton.backend")
VARIABLE = interpreting.VARIABLE
#: What is run in the process that interprets, by the names of the tests.
INTERPRETED: dict[str, Callable[[], None]] = {}


def interpreted(check: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test of what ``check`` raised in the process that interprets."""
    INTERPRETED[check.__name__] = check

    def test(raised: dict[str, str]) -> None:
        assert raised[check.__name__] == "", raised[check.__name__]

    return test


@pytest.fixture(scope="module")
def raised(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each of the interpreted tests of this run raised, "" for nothing; skips where its interpreter fails."""
    here = {item.name for item in request.session.items}
    return interpreting.raised(__file__, *(name for name in INTERPRETED if name in here))


# -- what it refuses ---------------------------------------------------------------------------------------------------

PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16.causal.grad")
PADDED = PLAIN.replace(nonfinite=True, causal=False, key_lengths=True)
ROCM = Device("rocm", "MI300X")


def refusals(problem: Problem, device: Device | str) -> tuple[str, ...]:
    where = Device.named(device) if isinstance(device, str) else device
    found: tuple[str, ...] = backend.TritonBackend().supports(problem, where)
    return found


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (PLAIN, "cpu", "TRITON_INTERPRET=1 interprets it"),
        (PLAIN.replace(dtype="float64"), "h200", "float64"),
        (PLAIN.replace(dim_qk=577), "h200", "dim_qk=577"),
        (PLAIN.replace(dim_v=600), "h200", "dim_v=600"),
        (PLAIN, "t4", "sm_75.*8.0"),
        (PLAIN, "v100", "sm_70.*8.0"),
        (PLAIN, ROCM, "rocm"),
        (PLAIN.replace(query=Memory(negative=True)), "h200", "query runs backwards"),
        (PLAIN.replace(value=Memory(negative=True)), "h200", "value runs backwards"),
        (PLAIN.replace(mask=Mask("bool"), attn_mask=Memory(negative=True)), "h200", "attn_mask runs backwards"),
        (PLAIN.replace(batch=2**20, seq_q=2**9), "h200", r"8589934592 queries of all heads.*split the batch"),
        (PLAIN.replace(key=Memory(align=1)), "h200", "key is aligned to 1 bytes"),
        (PLAIN.replace(nonfinite=True), "h200", "NaN or inf"),
        (PLAIN.replace(nonfinite=True, causal=False, window=(3, None)), "h200", "NaN or inf"),
        (PADDED.replace(mask=Mask("bool")), "h200", "NaN or inf"),
    ],
    ids=lambda value: value.kind if isinstance(value, Device) else str(value),
)
def test_it_says_why_it_does_not_take_a_problem(
    problem: Problem, device: Device | str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (reason,) = refusals(problem, device)
    assert re.search(words, reason)


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "rtx3090"])
@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        PLAIN.replace(dim_qk=256, dim_v=1),
        PLAIN.replace(key=Memory(align=2), value=Memory(strided=True), query=Memory(expanded=True)),
        PLAIN.replace(mask=Mask("bool"), attn_mask=Memory(align=1)),
        PADDED,
        PADDED.replace(key_lengths=False),
        PLAIN.replace(scale=-0.25, softcap=3.0),
    ],
    ids=str,
)
def test_it_takes_a_problem(problem: Problem, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert refusals(problem, device) == ()


def test_interpreted_it_takes_the_processor_and_refuses_what_it_refuses_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert refusals(PLAIN, "cpu") == ()
    assert len(refusals(PLAIN.replace(dtype="float64", dim_v=600), "cpu")) == 2
    monkeypatch.setenv(VARIABLE, "0")
    assert len(refusals(PLAIN, "cpu")) == 1


# -- tiles and splits --------------------------------------------------------------------------------------------------

DEVICES = ("h200", "a100", "rtx3090", "b200", "cpu")
PROBLEMS = [
    Problem.parse(f"{sizes}.d{dim}.{dtype}{more}")
    for sizes, dim, dtype, more in [
        *product(["b4.h16/4.s1024"], [16, 64, 96, 128, 256], ["bf16", "fp16", "fp32"], ["", ".causal.grad"]),
        *product(["b1.h8/1.s1x4096", "b64.h8.s1x48", "b2.h2.s4x130"], [64, 128, 256], ["bf16", "fp32"], [""]),
        *product(["b1.h4.s512"], [64, 256], ["bf16", "fp32"], [".dropout=0.1.grad", ".mask=fp32:qk.grad=qkvm"]),
        ("b1.h1.s16384", 128, "bf16", ".causal.grad"),
        ("b1.h1.s3x5", 1, "fp16", ".grad"),
    ]
]
KERNELS = ("forward", "key_gradients", "query_gradient")


def configs(problem: Problem, device: Device) -> list[Any]:
    return list(config.configs(problem, device))


def tiles(chosen: Any) -> list[Any]:
    return [getattr(chosen, name) for name in KERNELS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_choices_of_tiles(problem: Problem, device: str) -> None:
    where = Device.named(device)
    found = configs(problem, where)
    assert {field.name for field in fields(found[0])} == {*KERNELS, "splits"}
    generic = arithmetic.generic(problem, emulated=device == "cpu")
    assert found[generic] == config._heuristic(problem, where)
    assert found[0].forward.generic == generic
    assert len(set(found)) == len(found)
    assert device != "cpu" or len(found) == 1
    for chosen in found:
        for tile in tiles(chosen):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.queries, tile.keys)), tile
            assert tile.warps in (1, 2, 4, 8)
            assert 1 <= tile.stages <= 4
            assert max(tile.queries, tile.keys) <= 128  # to which rows are padded in the backward
        assert 1 <= chosen.splits <= config.MOST_SPLITS
        # Every split has a tile of keys of its own, so that none is launched for nothing.
        assert chosen.splits == 1 or (chosen.splits - 1) * chosen.forward.keys < problem.seq_k


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_less_shared_memory_gives_tiles_that_fit(problem: Problem) -> None:
    h200 = Device.named("h200")
    roomy = configs(problem, h200)
    small = replace(h200, shared_memory=64 * 1024)
    found = configs(problem, small)
    assert len(found) <= len(roomy)
    for chosen in found:
        for name, tile in zip(KERNELS, tiles(chosen), strict=True):
            kept = {"forward": tile.queries // 2, "key_gradients": tile.keys, "query_gradient": tile.queries}[name]
            moving = tile.queries if name == "key_gradients" else tile.keys
            size = {"float32": 4}.get(problem.dtype, 2)
            width = sum(max(16, 2 ** math.ceil(math.log2(dim))) for dim in (problem.dim_qk, problem.dim_v))
            needed = ((kept + tile.stages * moving) * width + tile.queries * tile.keys) * size
            # Below 32 rows and one stage there is nothing left to take away.
            assert needed <= small.shared_memory or (max(tile.queries, tile.keys) <= 32 and tile.stages == 1), name
    smallest = configs(problem, replace(h200, shared_memory=48 * 1024))[0]
    for least, most in zip(tiles(smallest), tiles(roomy[0]), strict=True):
        assert (least.queries, least.keys, least.stages) <= (most.queries, most.keys, most.stages)


def test_few_queries_are_split_over_the_gpu_and_many_are_not() -> None:
    h200 = Device.named("h200")
    decode = Problem.parse("b1.h8/1.s1x65536.d128.bf16")
    assert configs(decode, h200)[0].splits == 128  # of 132 SMs, as many as are merged
    assert configs(decode, replace(h200, sms=40))[0].splits == 40
    assert configs(decode.replace(seq_k=1024), h200)[0].splits == 8  # two tiles of keys in each
    assert configs(decode.replace(seq_k=512), h200)[0].splits == 1  # which a merge would take as long as
    assert configs(decode.replace(batch=132), h200)[0].splits == 1
    assert configs(Problem.parse("b8.h16.s4096.d128.bf16"), h200)[0].splits == 1
    assert configs(decode.replace(batch=0), h200)[0].splits == 1
    assert config.splits(decode.replace(seq_k=33), Device.cpu(), config.Tile(32, 16, 4, 1)) == 2
    assert config.splits(decode.replace(seq_k=32), Device.cpu(), config.Tile(32, 16, 4, 1)) == 1


def test_the_interpreter_splits_few_queries() -> None:
    (chosen,) = configs(Problem.parse("b1.h1.s1x65.d8.fp32"), Device.cpu())
    assert chosen.splits == 2


# -- dropout -----------------------------------------------------------------------------------------------------------

#: Past several tiles of 16 and 32, and no multiple of one.
LENGTH = 40


def shown(heads: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal weights, dropped: output (2, H, L, L) with V = 1 and dV (2, H, L, L) with dO = 1 show where."""
    q = k = torch.zeros(2, heads, LENGTH, 8)
    v = torch.eye(LENGTH).repeat(2, heads, 1, 1).requires_grad_()
    out = attnswitch.attention(q, k, v, backend="triton", **options)
    (dv,) = torch.autograd.grad(out, v, torch.eye(LENGTH).expand_as(out))
    return out.detach(), dv


def meant(seed: int, p: float, heads: int, rows: int = LENGTH, keys: int = LENGTH) -> torch.Tensor:
    b, h, i = np.ogrid[:2, :heads, :rows]
    return torch.from_numpy(keep_mask(seed, p, b, h, i, 0, keys))


@interpreted
def test_without_a_seed_torch_repeats_the_mask() -> None:
    torch.manual_seed(11)
    first, dv = shown(1, dropout_p=0.5)
    plain = torch.zeros(2, 1, LENGTH, 8), torch.zeros(2, 1, LENGTH, 8), torch.eye(LENGTH).repeat(2, 1, 1, 1)
    second = attnswitch.attention(*plain, backend="triton", dropout_p=0.5)
    torch.manual_seed(11)
    again = attnswitch.attention(*plain, backend="triton", dropout_p=0.5)
    assert torch.equal(first, again)
    assert 0.3 < ((first != 0) != (second != 0)).float().mean() < 0.7  # two draws of a half agree half of the time
    assert torch.equal(first != 0, dv.mT != 0)  # the backward drops what the forward dropped
    assert not torch.equal(first[0], first[1])


@interpreted
def test_a_seed_means_its_mask() -> None:
    for p, seed in ((0.6, 2**63 + 2**31 + 7), (1.0, 3)):
        out, dv = shown(2, dropout_p=p, seed=seed)
        keep = meant(seed, p, 2) if p < 1 else torch.zeros(2, 2, LENGTH, LENGTH, dtype=torch.bool)
        assert torch.equal(out != 0, keep), (p, seed)
        assert torch.equal(dv.mT != 0, keep), (p, seed)
        if p < 1:
            expected = keep / (LENGTH * (1 - p))
            torch.testing.assert_close(out, expected.float())
            torch.testing.assert_close(dv.mT, expected.float())


@pytest.mark.nightly
@interpreted
def test_a_seed_means_its_mask_where_heads_share_keys() -> None:
    for rows in (4, 1):
        q = torch.zeros(2, 4, rows, 8)
        k = torch.zeros(2, 1, LENGTH, 8)
        v = torch.eye(LENGTH).repeat(2, 1, 1, 1).requires_grad_()
        out = attnswitch.attention(q, k, v, backend="triton", dropout_p=0.5, seed=9)
        keep = meant(9, 0.5, 4, rows)
        assert torch.equal(out != 0, keep), rows
        (dv,) = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(dv[..., 0], keep.sum((1, 2))[:, None] / (LENGTH * 0.5))


@interpreted
def test_a_seed_means_its_mask_where_keys_are_split() -> None:
    q, k, v = torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, LENGTH, 8), torch.eye(LENGTH).repeat(2, 2, 1, 1)
    for splits in (2, 3):
        out, lse = split(Inputs(q, k, v, seed=9), splits, dropout=0.5, seeded=True)
        assert torch.equal(out != 0, meant(9, 0.5, 2, 3)), splits
        torch.testing.assert_close(lse, torch.full((2, 2, 3), math.log(LENGTH)))


# -- split keys --------------------------------------------------------------------------------------------------------


def split(inputs: Inputs, splits: int, **facts: Any) -> Any:
    """Output and lse of a call whose keys are split, whatever the choice for the CPU says."""
    (b, hq, lq, d), (_, hkv, lk, _) = inputs.query.shape, inputs.key.shape
    dtype = str(inputs.query.dtype).removeprefix("torch.")
    problem = Problem(b, hq, hkv, lq, lk, d, inputs.value.shape[3], dtype, **facts)
    triton, cpu = backend.TritonBackend(), Device.cpu()
    chosen = config._heuristic(problem, cpu)
    return triton.compile(problem, cpu, replace(chosen, splits=splits)).forward(inputs)


@interpreted
def test_a_mean_in_parts_is_exact() -> None:
    """64 equal weights in parts of 48 and 16, whose logarithms no float holds: their sums do add up."""
    values = np.random.default_rng(0).integers(-1, 2, (1, 1, 65, 64)).astype(np.float32)
    q, k, v = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 65, 8), torch.from_numpy(values)
    for splits in (1, 2, 3, 5):
        out, lse = split(Inputs(q, k, v, None, torch.tensor([64])), splits, key_lengths=True)
        np.testing.assert_array_equal(out.numpy(), values[:, :, :64].mean(2, keepdims=True))
        np.testing.assert_allclose(lse.numpy(), math.log(64), rtol=1e-6)


@interpreted
def test_parts_give_what_the_whole_gives() -> None:
    """Even where a part sees nothing, of some rows or of all."""
    q, k, v = operands((2, 2, 3, 8), (2, 1, 65, 8), (2, 1, 65, 5))
    for splits in (2, 6):
        for lengths, options in (
            ([65, 20], {}),
            ([1, 0], {}),
            ([65, 64], {"is_causal": True, "causal_alignment": "bottom_right", "window": (20, None)}),
            ([65, 64], {"is_causal": True}),
        ):
            facts = {"causal" if name == "is_causal" else name: value for name, value in options.items()}
            facts = {"alignment" if name == "causal_alignment" else name: value for name, value in facts.items()}
            got = split(Inputs(q, k, v, None, torch.tensor(lengths)), splits, key_lengths=True, **facts)
            wanted: Any = attnswitch.attention(
                q, k, v, key_lengths=lengths, return_lse=True, backend="reference", **options
            )
            torch.testing.assert_close(got, wanted, msg=lambda text: f"{splits} {lengths} {options}: {text}")  # noqa: B023


@interpreted
def test_gradients_of_shards_of_the_keys_add_up_to_those_of_the_whole() -> None:
    """Where the backward is given the output and lse of all keys, by the general way and by the prepared one."""
    q, k, v = operands((1, 2, 20, 16), (1, 2, 48, 16), (1, 2, 48, 16))
    grad_out, grad_lse = operands((1, 2, 20, 16), (1, 2, 20))
    triton, cpu = backend.TritonBackend(), Device.cpu()

    def made(keys: int) -> Any:
        problem = Problem(1, 2, 2, 20, keys, 16, 16, "float32", lse=True, grads="qkv")
        return triton.compile(problem, cpu, next(triton.configs(problem, cpu)))

    whole = Inputs(q, k, v)
    out, lse = made(48).forward(whole)
    wanted = made(48).backward(whole, out, lse, grad_out, grad_lse)
    for way in ("backward", "prepared_backward"):
        parts = []
        for at in (slice(0, 32), slice(32, 48)):
            part = Inputs(q, k[:, :, at].contiguous(), v[:, :, at].contiguous())
            kernel = made(part.key.shape[2])
            backward = kernel.backward if way == "backward" else kernel.prepared_backward(part)
            # The upstream gradient of lse counts once: each part's weights add up to less than 1.
            parts.append(backward(part, out, lse, grad_out, grad_lse))
        torch.testing.assert_close(parts[0].query + parts[1].query, wanted.query)
        torch.testing.assert_close(torch.cat([part.key for part in parts], 2), wanted.key)
        torch.testing.assert_close(torch.cat([part.value for part in parts], 2), wanted.value)


# -- tile lists --------------------------------------------------------------------------------------------------------


def visible(problem: Problem, mask: Any, lengths: list[int] | None) -> tuple[Any, Any]:
    """Which positions are seen, and which of them the mask does not change, (B, H, Lq, Lk)."""
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)
    seen = np.broadcast_to(mask if mask.dtype == bool else mask != -np.inf, shape).copy()
    i, j = np.arange(problem.seq_q)[:, None], np.arange(problem.seq_k)[None, :]
    left, right = problem.window or (None, None)
    for b in range(problem.batch):
        end = problem.seq_k if lengths is None else lengths[b]
        place = i + (end - problem.seq_q if problem.bottom_right else 0)
        seen[b] &= j < end
        if problem.causal:
            seen[b] &= j <= place
        if left is not None:
            seen[b] &= j >= place - left
        if right is not None:
            seen[b] &= j <= place + right
    return seen, seen & (True if mask.dtype == bool else np.broadcast_to(mask == 0, shape))


def kinds(seen: Any, plain: Any, block_q: int, block_k: int) -> Any:
    """0, 1, 2: nothing, something or all of a tile (tiles_q, tiles_k) is visible. Keys past the last are not there."""
    rows, keys = seen.shape
    ends = [(i, j) for i in range(0, rows, block_q) for j in range(0, keys, block_k)]
    found = []
    for i, j in ends:
        whole = plain[i : i + block_q, j : j + block_k]
        full = j + block_k <= keys and whole.all()
        found.append(2 if full else int(seen[i : i + block_q, j : j + block_k].any()))
    return np.array(found).reshape(-(-rows // block_q), -(-keys // block_k))


def longest(full: Any) -> int:
    return max((len(run) for run in "".join("x" if one else " " for one in full).split()), default=0)


def hold(
    problem: Problem,
    mask: Any,
    lengths: list[int] | None,
    block_q: int,
    block_k: int,
    by: tuple[bool, ...] = (False, True),
) -> set[int]:
    """Compare every list, by queries and by keys, with what NumPy says; the kinds of tiles that there are.

    3 stands for a tile that a run is stretched by.
    """
    lists = importlib.import_module("attnswitch.backends.triton.tiles")
    stretches = lengths is None and problem.seq_k % block_k == 0
    run = importlib.import_module("attnswitch.backends.triton.run")
    assert lists.pays(problem, Device.cpu())
    there_are = None if lengths is None else torch.tensor(lengths)
    seen, plain = visible(problem, mask, lengths)
    there = set()
    for by_keys in by:
        listing = lists.Listing(run.Launch, problem, Device.cpu(), block_q, block_k, by_keys)
        step_b, step_h, step_t = listing.visits
        named, counts = (found.flatten(0, 2).tolist() for found in listing(torch.from_numpy(mask), there_are))
        for b, h in np.ndindex(problem.batch, problem.heads_q):
            grid = kinds(seen[b, h], plain[b, h], block_q, block_k)
            there |= set(grid.flatten().tolist())
            for tile, row in enumerate(grid.T if by_keys else grid):
                at = b * step_b + h * step_h + tile * step_t
                count, first, end, first_key, end_key = counts[at]
                told = f"{problem}, by {'keys' if by_keys else 'queries'}, ({b}, {h}, {tile}): {row}, {counts[at]}"
                assert (row[first:end] == 2).all(), told
                assert end - first == longest(row == 2), told
                near = range(first, end)
                if not by_keys:
                    rows = slice(tile * block_q, (tile + 1) * block_q)
                    assert plain[b, h, rows, first_key:end_key].all(), told
                    near = range(first_key // block_k, -(-end_key // block_k))
                    around = seen[b, h, rows, near.start * block_k : near.stop * block_k].copy()
                    around[:, first_key - near.start * block_k : end_key - near.start * block_k] = False
                    assert not around.any(), told
                    there |= {3} if len(near) > end - first else set()
                    if stretches and end < len(row) and end_key == end * block_k:  # what comes next is no padding
                        then = seen[b, h, rows, end_key : end_key + block_k]
                        assert not (then[:, 0].all() and (then == then[0]).all() and np.diff(then[0]).sum() == 1), told
                outside = [t for t in np.flatnonzero(row).tolist() if t not in near]
                assert named[at][:count] == outside, told
    return there


def masks(problem: Problem) -> dict[str, Any]:
    """Masks by name, of every kind of broadcasting."""
    draw = np.random.default_rng(1)
    b, h, q, k = problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    lengths = np.array([k - 21, 33])[:b, None, None, None]
    blocks = np.kron(draw.random((b, h, -(-q // 16), -(-k // 16))) < 0.6, np.ones((16, 16))) > 0
    rare = draw.random((1, 1, q, k)) < 0.997
    return {
        "padding": np.arange(k) < lengths,
        "padding of every query": np.broadcast_to(np.arange(k) < lengths, (b, 1, q, k)).copy(),
        "padding on the left": np.arange(k) >= k - lengths,
        "blocks": blocks[:, :, :q, :k].copy(),
        "empty": np.zeros((1, 1, q, k), bool),
        "all": np.ones((b, 1, q, k), bool),
        "nothing": np.ones((1, 1, 1, 1), bool),
        "random": draw.random((1, h, q, k)) < 0.5,
        "rare": rare,
        "of rows": draw.random((1, 1, q, 1)) < 0.8,
        "float": np.where(rare, 0.0, -np.inf).astype(np.float16),
        "ramp": np.where(np.arange(k) < 64, 0.0, -0.5).astype(np.float16)[None, None, None],
    }


SPANS = Problem.parse("b2.h2.s70x84.d8.fp32")


@pytest.mark.nightly
@interpreted
def test_lists_name_what_is_not_empty() -> None:
    there = hold_all(SPANS) | hold_all(SPANS.replace(seq_k=96))  # whose last tile is whole
    assert there == {0, 1, 2, 3}


def hold_all(spans: Problem) -> set[int]:
    there = set()
    for name, mask in masks(spans).items():
        for facts, lengths in (
            ({}, None),
            ({"causal": True}, None),
            ({"key_lengths": True}, [84, 37]),
            ({"causal": True, "alignment": "bottom_right", "key_lengths": True}, [74, 0]),
            ({"window": (40, 9)}, None),
        ):
            if (name == "blocks") != bool(facts):  # one with everything, and the others alone
                continue
            axes = "".join(axis for axis, size in zip("bhqk", mask.shape, strict=True) if size > 1)
            problem = spans.replace(mask=Mask(str(mask.dtype), axes), **facts)
            there |= hold(problem, mask, lengths, 32, 16)
    return there


@interpreted
def test_lists_of_more_tiles_than_are_looked_at_at_once() -> None:
    """The longest run lies over the 256th tile, or before it, or after."""
    all_runs: list[list[tuple[int, int]]] = [
        [(3, 40), (230, 290)], [(3, 100), (230, 290)], [(3, 4), (200, 256)], [(256, 300)], [(0, 300)], [],
    ]  # fmt: skip
    mask = np.zeros((len(all_runs), 1, 16, 4800), bool)
    mask[..., 150 * 16 : 290 * 16 : 7 * 16] = True
    for rows, runs in zip(mask, all_runs, strict=True):
        for first, end in runs:
            rows[..., first * 16 : end * 16] = True
    problem = Problem.parse(f"b{len(all_runs)}.h1.s16x4800.d8.fp32")
    for axes, of_queries in (("bqk", mask), ("bk", mask[:, :, :1])):
        assert hold(problem.replace(mask=Mask("bool", axes)), of_queries, None, 16, 16, (False,)) >= {0, 1, 2}


# -- beside the reference ----------------------------------------------------------------------------------------------


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def both(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[torch.Tensor], ...]:
    """Output, lse and gradients of ``triton`` and of ``reference``."""
    results = []
    for name in ("triton", "reference"):
        leaves = [x.requires_grad_() for x in operands(*shapes, dtype=dtype)]
        out, lse = attnswitch.attention(*leaves, return_lse=True, backend=name, **options)
        upstream = operands(out.shape, lse.shape)
        grads = torch.autograd.grad(
            (out, lse.masked_fill(lse == -torch.inf, 0.0)), leaves, (upstream[0].to(dtype), upstream[1])
        )
        results.append([out.detach(), lse.detach(), *grads])
    return tuple(results)


def agree(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, atol: float = 1e-5, **options: Any
) -> list[torch.Tensor]:
    got, wanted = both(shapes, dtype, **options)
    for what, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        assert one.dtype == other.dtype, what
        torch.testing.assert_close(one, other, rtol=atol, atol=atol, msg=lambda text: f"{shapes} {what}: {text}")  # noqa: B023
    return got


@interpreted
def test_empty_sizes() -> None:
    variants: list[dict[str, Any]] = [{}, {"is_causal": True}, {"dropout_p": 0.5, "seed": 1}]
    for options in variants:
        assert agree((0, 2, 3, 8), (0, 2, 5, 8), (0, 2, 5, 4), **options)[0].shape == (0, 2, 3, 4)
        assert agree((2, 2, 0, 8), (2, 2, 5, 8), (2, 2, 5, 4), **options)[0].shape == (2, 2, 0, 4)
        out, lse, *_ = agree((2, 2, 3, 8), (2, 2, 0, 8), (2, 2, 0, 4), **options)
        assert not out.any()
        assert (lse == -torch.inf).all()
    mask = torch.zeros(3, 0)
    agree((2, 2, 3, 8), (2, 2, 0, 8), (2, 2, 0, 4), attn_mask=mask)


@interpreted
def test_rows_that_see_nothing() -> None:
    mask = torch.ones(1, 1, 40, 50, dtype=torch.bool)
    mask[..., 33:36, :] = False
    hidden = torch.zeros(1, 1, 40, 50).masked_fill(~mask, -torch.inf)
    shapes = (1, 2, 40, 8), (1, 2, 50, 8), (1, 2, 50, 8)
    for options in ({"attn_mask": mask}, {"attn_mask": hidden}, {"attn_mask": mask, "is_causal": True}):
        out, lse, dq, *_ = agree(*shapes, **options)
        for result in (out[:, :, 33:36], dq[:, :, 33:36]):
            assert not result.any()
        assert (lse[:, :, 33:36] == -torch.inf).all()
        assert lse[:, :, :33].isfinite().all()
    bottom: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    assert (agree(*shapes, key_lengths=[10], **bottom)[1][:, :, :30] == -torch.inf).all()
    assert not agree(*shapes, key_lengths=[0])[0].any()
    assert not agree(*shapes, attn_mask=torch.zeros(50, dtype=torch.bool))[0].any()


@pytest.mark.nightly
@interpreted
def test_lengths_of_any_strides() -> None:
    shapes = (3, 2, 4, 8), (3, 2, 40, 8), (3, 2, 40, 8)
    for lengths in (torch.tensor([40, 0, 7, 0, 21])[::2], torch.tensor(9).expand(3)):
        agree(*shapes, key_lengths=lengths)
        agree(*shapes, key_lengths=lengths, attn_mask=torch.ones(40, dtype=torch.bool))


@pytest.mark.nightly
@interpreted
def test_few_queries_of_heads_that_share_keys() -> None:
    mask = torch.rand(2, 6, 5, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    variants: list[dict[str, Any]] = [
        {},
        {"is_causal": True, "causal_alignment": "bottom_right", "key_lengths": [40, 4]},
        {"attn_mask": mask},
        {"attn_mask": mask[:1, :, :1], "dropout_p": 0.3, "seed": 2},
    ]
    for options in variants:
        agree((2, 6, 5, 8), (2, 2, 40, 8), (2, 2, 40, 8), **options)


@interpreted
def test_small_head_dimensions() -> None:
    for dim_qk, dim_v in ((1, 3), (3, 1), (17, 33)):
        for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 1e-1)):
            shapes = (1, 2, 34, dim_qk), (1, 1, 35, dim_qk), (1, 1, 35, dim_v)
            agree(*shapes, dtype=dtype, atol=atol, is_causal=True)


@interpreted
def test_one_query_and_many_keys() -> None:
    last = {"window": (100, 0), "is_causal": True, "causal_alignment": "bottom_right"}
    variants: list[dict[str, Any]] = [{"softcap": 2.0}, {"key_lengths": [300, 1]}, last]
    for options in variants:
        agree((2, 2, 1, 16), (2, 1, 301, 16), (2, 1, 301, 16), **options)


@interpreted
def test_the_output_lies_as_query_does() -> None:
    shapes = (2, 40, 3, 8), (2, 50, 3, 8), (2, 50, 3, 4)
    out = agree(*shapes, layout="BLHD", is_causal=True)[0]
    assert (tuple(out.shape), out.stride()) == ((2, 40, 3, 4), (480, 12, 4, 1))
    q, k, v = operands((2, 3, 40, 8), (2, 3, 50, 8), (2, 3, 50, 4))
    assert attnswitch.attention(q, k, v, backend="triton").is_contiguous()
    q, k, v = (x.transpose(1, 2) for x in operands(*shapes))
    assert attnswitch.attention(q, k, v, backend="triton").stride() == (480, 4, 12, 1)


@interpreted
def test_gradients_lie_as_operands_do() -> None:
    plain = operands((2, 4, 40, 8), (2, 2, 50, 8), (2, 2, 50, 4))
    for turned in ("", "q", "k", "qv", "qkv"):
        check_gradients_lie(turned, plain)


def check_gradients_lie(turned: str, plain: Any) -> None:
    grad = torch.randn(2, 4, 40, 4)
    given = [
        x.swapaxes(1, 2).contiguous().swapaxes(1, 2) if n in turned else x for n, x in zip("qkv", plain, strict=True)
    ]
    expected = attnswitch.attention_backward(grad, *plain, is_causal=True, backend="reference")
    found = attnswitch.attention_backward(grad, *given, is_causal=True, backend="triton")
    for name, ours, theirs in zip("qkv", found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours is not None
        assert (ours.swapaxes(1, 2) if name in turned else ours).is_contiguous()


# -- the process that interprets ---------------------------------------------------------------------------------------


def test_an_interpreter_that_fails_is_said_to() -> None:
    """As that of Triton 3.6 does with NumPy 2.4, which makes no number of an array of one."""
    program = """
from attnswitch.machine import registry
from attnswitch.backends.triton.kernels import probe
def fails(*_):
    raise TypeError("no number")
probe._count = {(1,): fails}
print(registry.loaded("triton").unavailable())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, VARIABLE: "1"}, cwd=ROOT, capture_output=True, text=True
    )
    assert re.match(
        r"the interpreter of Triton \S+ with NumPy \S+ fails \(TypeError: no number\); install", ran.stdout
    ), ran


if __name__ == "__main__":
    interpreting.tell(INTERPRETED)
