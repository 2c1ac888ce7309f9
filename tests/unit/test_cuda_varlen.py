"""Sequences that lie one after another, by the portable CUDA kernels in the emulator, beside ``reference``."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.call import attend, finite
from attnswitch.machine.device import Device
from attnswitch.planning import planner

arithmetic = importlib.import_module("attnswitch.backends.own.arithmetic")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
classes = importlib.import_module("attnswitch.backends.cuda.classes")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
sequences = importlib.import_module("attnswitch.backends.cuda.portable.sequences")
splits = importlib.import_module("attnswitch.backends.cuda.portable.splits")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
pytestmark = pytest.mark.slow
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

#: How near results are to those of the same operands in float64.
NEAR = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}
QUERIES, KEYS = (37, 5, 0, 20, 33), (53, 9, 7, 0, 33)
BOTTOM: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No plan of an emulated backend is left."""
    planner.forget()
    attend.forget()
    yield
    planner.forget()
    attend.forget()


def edges(sizes: Any) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def operands(
    queries: Any = QUERIES,
    keys: Any = KEYS,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (24, 40),
    past: tuple[int, int] = (0, 0),
) -> list[torch.Tensor]:
    """Query, key, value and upstream gradients in float64, with so many rows past the last query and key."""
    generator = torch.Generator().manual_seed(1)
    rows_q, rows_k = sum(queries) + past[0], sum(keys) + past[1]
    shapes = (
        (rows_q, heads[0], dims[0]),
        (rows_k, heads[1], dims[0]),
        (rows_k, heads[1], dims[1]),
        (rows_q, heads[0], dims[1]),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def offsets(queries: Any = QUERIES, keys: Any = KEYS, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    return [torch.tensor(edges(sizes), dtype=dtype) for sizes in (queries, keys)]


def results(name: str, arrays: Any, where: Any, **options: Any) -> list[torch.Tensor]:
    """Output, lse and gradients of torch tensors, by autograd."""
    *given, upstream = arrays
    leaves = [array.detach().requires_grad_() for array in given]
    out, lse = attnswitch.attention_varlen(*leaves, *where, return_lse=True, backend=name, **options)
    alive = torch.isfinite(lse)
    total = (out * upstream.to(out.dtype)).sum() + (torch.where(alive, lse, 0) ** 2).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def compare(arrays: Any, where: Any, dtype: str = "float32", **options: Any) -> list[torch.Tensor]:
    """What ``cuda`` makes of the arrays in ``dtype``, near to what ``reference`` makes of them in float64."""
    rounded = [array.to(getattr(torch, dtype)) for array in arrays]
    found = results("cuda", rounded, where, **options)
    expected = results("reference", [array.double() for array in rounded], where, **options)
    for got, right in zip(found, expected, strict=True):
        assert got.is_contiguous()
        known = torch.isfinite(right)
        assert torch.equal(torch.isfinite(got), known)
        got, right = torch.where(known, got.double(), 0), torch.where(known, right, 0)
        size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(got, right, rtol=0, atol=NEAR[dtype] * size)
    assert found[0].dtype == rounded[0].dtype
    assert found[1].dtype == (torch.float64 if dtype == "float64" else torch.float32)
    return found


# -- what is taken -----------------------------------------------------------------------------------------------------

PROBLEM = Problem.parse("b4.h16/4.s1024x2048.d128.bf16.causal-br.varlen.grad")


@pytest.mark.parametrize("device", ["a100", "b200", "rtx3090", "h200"])
@pytest.mark.parametrize(
    "more", [{}, {"dtype": "float64", "dim_v": 1}, {"dropout": 0.1, "seeded": True, "softcap": 3.0}], ids=str
)
def test_it_takes_such_problems_on_a_hopper_by_its_own_kernels(device: str, more: dict[str, Any]) -> None:
    cuda, where, problem = backend.CudaBackend(), Device.named(device), PROBLEM.replace(**more)
    assert cuda.varlen
    assert cuda.supports(problem, where) == ()
    hopper = device == "h200" and problem.dtype == "bfloat16"
    assert isinstance(next(cuda.configs(problem, where)).forward, tiles.Tile) != hopper
    assert (next(cuda.configs(problem, where)).backward is not None) == hopper
    for chosen in cuda.configs(problem, where):
        assert hopper or isinstance(chosen.forward, tiles.Tile)
        assert hopper or chosen.backward is None
    kernel = cuda.compile(problem, where, next(cuda.configs(problem, where)))
    names = [variant.kernel for variant in kernel.variants()]
    assert names[:2] == ["forward", "prepare"]
    assert set(names[2:]) == ({"backward", "finish"} if hopper else {"query_gradient", "key_gradients"})
    assert all(variant.varlen for variant in kernel.variants())


def test_lengths_of_a_class_do_not_mix_with_those_of_batch_entries() -> None:
    kinds = [classes._results(problem) for problem in (PROBLEM, PROBLEM.replace(varlen=False))]
    assert kinds[0] is not kinds[1]


@pytest.mark.parametrize("text", ["b0.h1.s0.d8.fp32.varlen", "b3.h2.s0x9.d8.fp32.varlen.grad"])
def test_the_grid_has_an_entry_more_and_a_tile_for_rows_past_the_end(text: str) -> None:
    p = Problem.parse(text)
    wide = sequences.launched(p)
    assert (wide.batch, wide.seq_q) == (p.batch + 1, 1)
    assert sequences.launched(p.replace(varlen=False)) == p.replace(varlen=False)


def test_what_the_backward_keeps_has_room_for_every_sequence() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        lengths = draw.integers(0, 300, draw.integers(1, 9))
        past = int(draw.integers(0, 200))
        begins = [begin // 128 + b for b, begin in enumerate(edges(lengths.tolist()))]
        for b, length in enumerate(lengths):
            assert begins[b] + -(-length // 128) <= begins[b + 1]
        assert 128 * begins[-1] <= sequences.saved_rows(int(lengths.sum()) + past, len(lengths))
        assert sequences.saved_rows(int(lengths.sum()) + past, len(lengths)) <= lengths.sum() + past + 128 * len(
            lengths
        )
    assert sequences.saved_rows(500, 0) == 0


# -- what is computed --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": BOTTOM,
    "window": {"window": (10, 3)},
    "bottom-right-window": {**BOTTOM, "window": (6, None)},
    "softcap": {"softcap": 2.0, "scale": -0.3},
    "dropout": {"dropout_p": 0.3, "seed": 2**40 + 7},
    "causal-dropout": {"is_causal": True, "dropout_p": 0.3, "seed": 5},
    "all-dropped": {"dropout_p": 1.0, "seed": 3},
    "deterministic": {"is_causal": True, "deterministic": True},
}


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("generic", [False, True], ids=["own", "generic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_are_those_of_the_reference(
    options: dict[str, Any], dtype: str, generic: bool, variants: list[Any]
) -> None:
    longest = 64 if generic else 53  # of even numbers generic kernels take all, emulated
    compare(operands(past=(3, 2)), offsets(), dtype, max_seqlen_k=longest, **options)
    assert variants
    assert all(variant.varlen for variant in variants)
    hoppers = dtype == "bfloat16" and not generic  # all of them
    portable = {variant.generic for variant in variants if variant.rows and variant.family == "portable"}
    assert portable == (set() if hoppers else {generic})
    assert ("hopper" in {variant.family for variant in variants}) == (dtype == "bfloat16")  # 37 queries are odd


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((0, 4, 9), (5, 0, 9)),
        ((4, 0, 9), (0, 5, 8)),
        ((4, 9, 0), (8, 5, 0)),
        ((0, 0, 0), (3, 0, 5)),
        ((3, 0, 5), (0, 0, 0)),
        ((0, 0), (0, 0)),
        ((), ()),
        ((130, 128, 1, 129), (128, 130, 257, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("past", [(0, 0), (5, 130)], ids=str)
def test_sequences_may_be_empty(queries: Any, keys: Any, past: tuple[int, int]) -> None:
    compare(operands(queries, keys, past=past), offsets(queries, keys), **BOTTOM)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", [{}, BOTTOM], ids=["plain", "bottom-right"])
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(
    ("queries", "split"), [((1, 1, 1, 1), 2), ((8, 1, 0, 3), 2), ((40, 1, 0, 3), 1)], ids=["decoding", "few", "parts"]
)
def test_keys_are_split(queries: Any, split: int, dtype: str, options: Any, variants: list[Any]) -> None:
    """Sequences shorter than what a split has, and rows past the end, which the launch that merges has to know."""
    keys = (53, 9, 101, 0)
    heads = (4, 2) if split == 2 else (2, 2)
    compare(operands(queries, keys, heads, past=(3, 2)), offsets(queries, keys), dtype, **options)
    forwards = [dict(variant.flags)["SPLIT"] for variant in variants if variant.kernel == "forward"]
    assert forwards == [split]
    assert ("merge" in [variant.kernel for variant in variants]) == (split == 1)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(("warps", "stages", "rows"), [(4, 3, 64), (1, 3, 16)])
def test_tiles_change_nothing_but_rounding(
    dtype: str, warps: int, stages: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile, turned = tiles.Tile(rows, 32, warps, stages), tiles.Tile(32, rows, warps, stages)
    chosen = config.CudaConfig(tile, turned, tile, replace(tile, stages=1))
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    compare(operands(past=(70, 40)), offsets(), dtype, is_causal=True, dropout_p=0.25, seed=9)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("parts", "most"), [(1, 24), (3, 24), (3, 2)], ids=["whole", "merged", "parts"])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "alike"])
def test_warps_apart_with_rows_in_several_tiles(
    heads: tuple[int, int], parts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiles.Tile(32, 32, 1, 1)
    chosen = config.CudaConfig(tiles.Tile(16, 16, 3, 2, apart=True), other, other, other, splits=parts)
    monkeypatch.setattr(config, "_emulated", lambda *_: chosen)
    monkeypatch.setattr(splits, "_MOST_MERGED", most)
    queries, keys = (30, 5, 0, 20), (53, 9, 7, 0)
    compare(operands(queries, keys, heads, past=(9, 2)), offsets(queries, keys), **BOTTOM)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("longest", [53, 64], ids=["own", "generic"])
@pytest.mark.parametrize("options", [{}, BOTTOM, {"window": (4, 4)}], ids=["plain", "bottom-right", "window"])
@pytest.mark.parametrize("dtype", ["float32"])
def test_nothing_leaks_from_other_sequences_nor_from_rows_past_the_end(
    dtype: str, options: dict[str, Any], longest: int
) -> None:
    """NaN there changes no bit of a sequence's results; what lies past the end has results of its own."""
    where = offsets()
    clean = [array.to(getattr(torch, dtype)) for array in operands(past=(7, 5))]
    spoilt = [array.clone() for array in clean]
    kept = 3 if dtype == "float32" else 0  # a sequence
    for array, sizes in zip(spoilt, (QUERIES, KEYS, KEYS, QUERIES), strict=True):
        begins = edges(sizes)
        array[: begins[kept]] = torch.nan
        array[begins[kept + 1] :] = torch.nan
    with finite.checking("never"):
        found = results("cuda", spoilt, where, max_seqlen_k=longest, **options)
        expected = results("cuda", clean, where, max_seqlen_k=longest, **options)
    for number, (got, right, by_query) in enumerate(zip(found, expected, (1, 1, 1, 0, 0), strict=True)):
        begins = edges(QUERIES if by_query else KEYS)
        got, right = (array.T if number == 1 else array for array in (got, right))  # lse
        mine = slice(begins[kept], begins[kept + 1])
        assert torch.equal(got[mine], right[mine])
        past = got[begins[-1] :]
        assert len(past) == (7 if by_query else 5)
        assert torch.all(past == (-torch.inf if number == 1 else 0))


@compiled
@pytest.mark.usefixtures("emulated")
def test_a_sequence_alone_has_the_same_bits() -> None:
    """Whatever lies beside it: positions and the dropout mask are its own."""
    arrays = [array.float() for array in operands()]
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 4, **BOTTOM}
    found = results("cuda", arrays, offsets(), max_seqlen_q=40, max_seqlen_k=53, **options)
    first = [array[:size] for array, size in zip(arrays, (37, 53, 53, 37), strict=True)]
    alone = results("cuda", first, ([0, 37], [0, 53]), max_seqlen_q=40, max_seqlen_k=53, **options)
    for got, right, size in zip(found, alone, (37, 4, 37, 53, 53), strict=True):
        assert torch.equal(got[..., :37] if size == 4 else got[:size], right)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float16"])
@pytest.mark.parametrize("kind", ["int32", "int64", "unlike", "list"])
def test_offsets_of_either_width(kind: str, dtype: str) -> None:
    where: Any = offsets(dtype=torch.int64 if kind == "int64" else torch.int32)
    if kind == "unlike":
        where[1] = where[1].long()
    elif kind == "list":
        where = [array.tolist() for array in where]
    compare(operands(), where, dtype, is_causal=True)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("change", ["turned", "sliced", "expanded", "offset", "heads outside"])
def test_any_strides(change: str, dtype: str) -> None:
    arrays = [array.to(getattr(torch, dtype)) for array in operands(past=(3, 2))]
    plain = results("cuda", arrays, offsets(), is_causal=True)

    def lying(array: torch.Tensor) -> torch.Tensor:
        if change == "turned":
            return array.mT.contiguous().mT
        if change == "heads outside":
            return array.transpose(0, 1).contiguous().transpose(0, 1)
        if change == "sliced":
            room = torch.full((*array.shape[:2], 2 * array.shape[2]), torch.nan, dtype=array.dtype)
            room[..., ::2] = array
            return room[..., ::2]
        room = torch.full((array.numel() + 1,), torch.nan, dtype=array.dtype)
        room[1:] = array.flatten()
        return room[1:].view(array.shape)

    if change == "expanded":
        arrays[1] = arrays[1][:, :1].expand(-1, 2, -1)
        plain = results("cuda", [array.contiguous() for array in arrays], offsets(), is_causal=True)
    else:
        arrays = [lying(array) for array in arrays]
    found = results("cuda", arrays, offsets(), is_causal=True)
    for got, right in zip(found, plain, strict=True):
        assert torch.equal(got, right)
    if change == "heads outside":
        assert found[0].transpose(0, 1).is_contiguous()
        assert found[2].transpose(0, 1).is_contiguous()


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("longest", [53, 64], ids=["own", "generic"])
@pytest.mark.parametrize("given", [True, False], ids=["out", "again"])
def test_numpy_arrays(longest: int, given: bool) -> None:
    q, k, v, upstream = (array.numpy() for array in operands(past=(3, 2)))
    where = [array.numpy() for array in offsets()]
    options: dict[str, Any] = {**BOTTOM, "dropout_p": 0.2, "seed": 8, "max_seqlen_k": longest}
    upstream_lse = np.random.default_rng(0).standard_normal((4, len(q)))
    found = []
    for name in ("cuda", "reference"):
        out, lse = attnswitch.attention_varlen(q, k, v, *where, return_lse=True, backend=name, **options)
        saved = {"out": out, "lse": lse} if given else {}
        alive = np.where(np.isfinite(lse), upstream_lse, 0)
        grads = attnswitch.attention_varlen_backward(
            upstream, q, k, v, where[0], where[1], grad_lse=alive, backend=name, **saved, **options
        )
        found.append([out, lse, *grads[:3]])
    for got, right in zip(*found, strict=True):
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-13)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("longest", [53, 64], ids=["own", "generic"])
def test_only_the_gradients_that_are_asked_for(longest: int, wanted: str, variants: list[Any]) -> None:
    *arrays, upstream = (array.float() for array in operands(past=(3, 2)))
    every = results("cuda", [*arrays, upstream], offsets(), max_seqlen_k=longest)[2:]
    variants.clear()
    leaves = [array.requires_grad_(letter in wanted) for letter, array in zip("qkv", arrays, strict=True)]
    out, lse = attnswitch.attention_varlen(*leaves, *offsets(), max_seqlen_k=longest, return_lse=True, backend="cuda")
    total = (out * upstream).sum() + (torch.where(torch.isfinite(lse), lse, 0) ** 2).sum()
    found = torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad])
    for got, right in zip(found, [every["qkv".index(letter)] for letter in wanted], strict=True):
        assert torch.equal(got, right)
    names = [variant.kernel for variant in variants]
    assert ("query_gradient" in names) == ("q" in wanted)
    assert ("key_gradients" in names) == bool({"k", "v"} & set(wanted))


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "text", ["b5.h4/2.s37x53.d24/40.fp32.causal.varlen.lse.grad", "b5.h4/2.s37x64.d24/40.bf16.varlen.lse.grad"]
)
def test_what_is_launched_was_listed(text: str, variants: list[Any]) -> None:
    p = Problem.parse(text)
    cuda, cpu = backend.CudaBackend(), Device.cpu()
    kernel = cuda.compile(p, cpu, next(cuda.configs(p, cpu)))
    arrays = [array.to(getattr(torch, p.dtype)) for array in operands()]
    results("cuda", arrays, offsets(), is_causal=p.causal, max_seqlen_q=p.seq_q, max_seqlen_k=p.seq_k)
    assert set(variants) == set(kernel.variants())
