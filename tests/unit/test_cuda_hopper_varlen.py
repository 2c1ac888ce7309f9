"""Hopper's forward of sequences that lie one after another, emulated, where tiles reach into the next one."""

from __future__ import annotations

import ctypes
import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.machine.device import Device

choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
hopper = importlib.import_module("attnswitch.backends.cuda.hopper.forward")
sequences = importlib.import_module("attnswitch.backends.cuda.portable.sequences")

compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")
DIMS = (
    "64",
    *(pytest.param(dims, marks=pytest.mark.slow) for dims in ("72/96", "128")),
    *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("80", "192/128", "136/64", "256")),
)
#: Which of the tiles that are compiled.
WHICH = (0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly))
#: The last sequence of each has neighbours of its own: rows past the end, of queries and of keys.
QUERIES, KEYS = (150, 1, 0, 201, 64), (170, 0, 9, 310, 128)


def tile_of(p: Problem, which: int) -> Any:
    ranked = choice.ranked(p, Device.cpu())
    return ranked[which % len(ranked)]


def ran(
    p: Problem, tile: Any, arrays: Any, where: Offsets, seed: int | None = None, sinks: Any = None
) -> tuple[Any, Any]:
    """Output and lse of (rows, heads, columns), in memory that is NaN before."""
    q, k, v = (array.swapaxes(0, 1)[None] for array in arrays)
    rows, heads = q.shape[2], q.shape[1]
    out = torch.full((1, heads, rows, p.dim_v), torch.nan, dtype=q.dtype)
    lse = torch.full((1, heads, rows), torch.nan)
    launches = hopper.Forward(sequences.launched(p), tile, Device.cpu(), (rows, k.shape[2]))
    launches(Inputs(q, k, v, seed=seed, offsets=where, sinks=sinks), out, lse)
    return out[0].swapaxes(0, 1), lse[0]


def check(
    text: str,
    which: int = 0,
    queries: tuple[int, ...] = QUERIES,
    keys: tuple[int, ...] = KEYS,
    past: tuple[int, int] = (70, 40),
    seed: int | None = None,
    integers: torch.dtype = torch.int32,
    sinks: tuple[float, ...] | None = None,
) -> None:
    """Each sequence has what ``reference`` makes of it alone, whatever its neighbours hold: every other one is NaN."""
    named = Problem.parse(text)
    p = named.replace(batch=len(queries), seq_q=max((32, *queries)), seq_k=max((1, *keys)))
    generator = torch.Generator().manual_seed(len(text))
    heads, of_keys = p.heads_q, p.heads_kv
    rows_q, rows_k = sum(queries) + past[0], sum(keys) + past[1]
    shapes = (rows_q, heads, p.dim_qk), (rows_k, of_keys, p.dim_qk), (rows_k, of_keys, p.dim_v)
    kind = getattr(torch, p.dtype)
    arrays = [torch.randn(shape, generator=generator, dtype=torch.float64).to(kind) for shape in shapes]
    at_q, at_k = ([0, *itertools.accumulate(sizes)] for sizes in (queries, keys))
    where = Offsets(torch.tensor(at_q, dtype=integers), torch.tensor(at_k, dtype=integers))
    call: dict[str, Any] = {"is_causal": p.causal, "causal_alignment": p.alignment, "window": p.window}
    call |= {"softcap": p.softcap, "dropout_p": p.dropout, "seed": seed}
    of_heads = None if sinks is None else torch.tensor(sinks, dtype=torch.float32)
    if of_heads is not None:
        call["sinks"] = of_heads.double()
    exact: list[Any] = [*(array.double() for array in arrays), where.query, where.key]
    right, right_lse = attnswitch.attention_varlen(*exact, return_lse=True, backend="reference", **call)
    unit = 2.0**-8 if p.dtype == "bfloat16" else 2.0**-11
    for parity in (0, 1):
        spoilt = [array.clone() for array in arrays]
        for b in range(len(queries)):
            if b % 2 != parity:
                spoilt[0][at_q[b] : at_q[b + 1]] = torch.nan
                spoilt[1][at_k[b] : at_k[b + 1]] = torch.nan
                spoilt[2][at_k[b] : at_k[b + 1]] = torch.inf
        for array, end in zip(spoilt, (at_q[-1], at_k[-1], at_k[-1]), strict=True):
            array[end:] = torch.nan
        out, lse = ran(p, tile_of(p, which), spoilt, where, seed, of_heads)
        for b in range(parity, len(queries), 2):
            own = slice(at_q[b], at_q[b + 1])
            np.testing.assert_allclose(out[own].double(), right[own], rtol=2 * unit, atol=2 * unit)
            np.testing.assert_allclose(lse[:, own], right_lse[:, own], rtol=1e-4, atol=1e-4)
        assert not out[at_q[-1] :].any()
        assert (lse[:, at_q[-1] :] == -np.inf).all()


# -- what is taken -----------------------------------------------------------------------------------------------------


def test_pages_beside_are_refused() -> None:
    problem = Problem.parse("b4.h16.s1024.d128.bf16.lengths.page=64")
    assert families.against_hopper(problem.replace(varlen=True), H200)


def test_tiles_that_are_continued_come_last() -> None:
    ranked = choice.ranked(Problem.parse("b4.h16.s2048.d128.bf16.varlen"), H200)
    continued = [tile.continued for tile in ranked]
    assert continued == sorted(continued)


# -- what is computed --------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("dims", DIMS)
def test_tiles_that_reach_into_the_next_sequence_leave_it_out(dims: str, which: int) -> None:
    for how in ("", ".causal", ".causal-br", ".window=40,9"):
        check(f"b1.h2/1.s1.d{dims}.fp16{how}.varlen", which)


@compiled
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((0, 40, 9), (5, 0, 9)),
        ((0, 0, 0), (3, 0, 5)),
        ((40, 0, 5), (0, 0, 0)),
        ((), ()),
        ((128, 192, 384), (128, 1, 256)),
        ((1,) * 9, tuple(range(9))),
    ],
    ids=str,
)
@pytest.mark.parametrize("past", [(0, 0), (5, 130), (300, 0)], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_sequences_may_be_empty(queries: Any, keys: Any, past: tuple[int, int], integers: torch.dtype) -> None:
    check("b1.h3/1.s1.d64.bf16.causal-br.varlen", 1, queries, keys, past, integers=integers)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dims", ["64", "128", "256"])
def test_dropout_is_that_of_the_seed_and_softcaps_bend(dims: str) -> None:
    check(f"b1.h2/1.s1.d{dims}.fp16.causal.varlen.dropout=0.4", seed=2**33 + 5)
    check(f"b1.h2/1.s1.d{dims}.bf16.varlen.softcap=5.0")


@compiled
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("dims", DIMS)
def test_every_row_of_a_sequence_has_its_sink_and_those_past_the_last_have_none(dims: str, which: int) -> None:
    check(f"b1.h4/2.s1.d{dims}.fp16.causal-br.window=40,0.varlen.sinks", which, sinks=(-np.inf, 1e4, 0.5, -1e4))


@compiled
@pytest.mark.parametrize("which", range(3))
def test_every_tile_is_taken_once_however_many_blocks_take_turns(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are of no tile are passed over, and the counter is blank again."""
    launched = []
    launch = emulator.launch

    def noting(variant: Any, blocks: int, arguments: Any, maps: Any) -> None:
        launch(variant, blocks, arguments, maps)
        counter = ctypes.c_uint32.from_address(arguments.counter) if arguments.counter else None
        launched.append((blocks, counter and counter.value))

    monkeypatch.setattr(hopper, "SMS", 3)
    monkeypatch.setattr(emulator, "launch", noting)
    rng = np.random.default_rng(which)
    queries, keys = (tuple(map(int, rng.integers(0, 300, 7))) for _ in range(2))
    check("b1.h2/1.s1.d64.fp16.causal.varlen", which, queries, keys)
    assert launched == [(3, 2**32 - 1)] * 2
