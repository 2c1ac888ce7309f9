"""Hopper's backward of sequences that lie one after another, emulated, where tiles reach into the next one."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine import registry
from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.machine.device import Device

backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
sequences = importlib.import_module("attnswitch.backends.cuda.portable.sequences")

compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
H200 = Device.named("h200")
#: The last sequence of each has neighbours of its own: rows past the end, of queries and of keys.
QUERIES, KEYS = (150, 1, 0, 201, 64), (170, 0, 9, 310, 128)
DIMS = (
    "64",
    "128",
    *(pytest.param(dims, marks=pytest.mark.slow) for dims in ("192/128", "256")),
    *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("40/64", "72/96", "136/64", "200/256")),
)
GRADIENTS = ("query", "key", "value")


def check(
    text: str,
    queries: tuple[int, ...] = QUERIES,
    keys: tuple[int, ...] = KEYS,
    past: tuple[int, int] = (140, 40),
    integers: torch.dtype = torch.int32,
    slopes: bool = False,
) -> None:
    """Each sequence has what ``reference`` makes of it alone, whatever its neighbours hold: every other one is NaN."""
    named = Problem.parse(text)
    p = named.replace(batch=len(queries), seq_q=max((32, *queries)), seq_k=max((1, *keys)))
    generator = torch.Generator().manual_seed(len(text))
    rows_q, rows_k = sum(queries) + past[0], sum(keys) + past[1]
    shapes = [(rows_q, p.heads_q, p.dim_qk), (rows_k, p.heads_kv, p.dim_qk), (rows_k, p.heads_kv, p.dim_v)]
    kind = getattr(torch, p.dtype)
    shapes.append((rows_q, p.heads_q, p.dim_v))
    arrays = [torch.randn(shape, generator=generator, dtype=torch.float64).to(kind) for shape in shapes]
    at_q, at_k = ([0, *itertools.accumulate(sizes)] for sizes in (queries, keys))
    where = Offsets(torch.tensor(at_q, dtype=integers), torch.tensor(at_k, dtype=integers))
    call: dict[str, Any] = {"is_causal": p.causal, "causal_alignment": p.alignment, "window": p.window}
    call |= {"softcap": p.softcap, "dropout_p": p.dropout, "seed": 2**33 + 5 if p.dropout else None}
    by_distance = torch.linspace(0.5, 0.01, p.heads_q)[None] if slopes else None
    if by_distance is not None:
        call["alibi_slopes"] = by_distance[0].double()
    exact: list[Any] = [array.double().requires_grad_() for array in arrays[:3]]
    given: list[Any] = [*exact, where.query, where.key]
    out, lse = attnswitch.attention_varlen(*given, return_lse=True, backend="reference", **call)
    right = torch.autograd.grad(out, exact, arrays[3].double())
    ends = at_q, at_k, at_k
    for parity in (0, 1):
        spoilt = [array.clone() for array in (*arrays, out.detach().to(kind))]
        known = lse.detach().float()
        for array, at in zip(spoilt, (*ends, at_q, at_q), strict=True):
            for b in range(1 - parity, len(queries), 2):
                array[at[b] : at[b + 1]] = torch.nan
            array[at[-1] :] = torch.nan
        for b in range(1 - parity, len(queries), 2):
            known[:, at_q[b] : at_q[b + 1]] = torch.nan
        known[:, at_q[-1] :] = -torch.inf
        q, k, v, grad_out, made = (array.swapaxes(0, 1)[None] for array in spoilt)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # heads lie inside rows
        launches = backward.Backward(
            sequences.launched(p), choice.gradients(p), Device.cpu(), all_rows=(rows_q, rows_k)
        )
        inputs = Inputs(q, k, v, seed=call["seed"], offsets=where, alibi_slopes=by_distance)
        gradients = launches(inputs, made, known[None].contiguous(), grad_out, None)
        for name, gradient, wanted, at in zip(GRADIENTS, gradients, right, ends, strict=False):
            found = gradient[0].swapaxes(0, 1).double()
            for b in range(parity, len(queries), 2):
                own = slice(at[b], at[b + 1])
                scale = max(1.0, float(wanted[own].abs().max())) if at[b + 1] > at[b] else 1.0
                unit = 2.0**-8 if p.dtype == "bfloat16" else 2.0**-10
                np.testing.assert_allclose(found[own], wanted[own], rtol=4 * unit, atol=4 * unit * scale, err_msg=name)
            assert not found[at[-1] :].any(), name


# -- what is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "b4.h16/4.s1024x2048.d128.bf16.causal-br.varlen.grad",
        "b4.h8.s700.d96.fp16.varlen.sinks.alibi.softcap=5.0.grad",
        "b4.h8.s700.d64.fp16.varlen.grad.deterministic",
    ],
)
def test_hoppers_kernels_take_forward_and_backward(text: str) -> None:
    problem = Problem.parse(text)
    assert families.against_hopper(problem, H200) == families.against_hopper_backward(problem, H200) == ()
    assert families.beside_hopper(problem, H200) == 1.0
    chosen = next(config.configs(problem, H200))
    assert chosen.backward == choice.ranked_gradients(problem, H200)[0]


def test_the_grid_has_the_tiles_of_all_rows_and_one_more_for_each_sequence() -> None:
    """However long the longest is, and for the rows past the last one too."""
    p = Problem.parse("b50.h8/2.s8192.d128.bf16.causal.varlen.grad")
    prepares, computes, finishes = backward.Backward(
        sequences.launched(p), choice.gradients(p), H200, all_rows=(10_000, 20_000)
    ).steps
    assert prepares.blocks == 2 * 8 * (10_000 // 128 + 51)
    assert computes.blocks == 2 * (20_000 // 128 + 51) * computes.splits
    assert finishes.awaited == (20_000 // 128 + 51) * computes.splits


@pytest.mark.parametrize("text", ["b50.h8/2.s8192.d128.bf16.varlen.grad", "b3.h4.s700x100.d64.bf16.varlen.grad"])
def test_the_backend_says_how_much_memory_that_is_where_all_are_the_longest(text: str) -> None:
    p = Problem.parse(text)
    rows = p.batch * p.seq_q, p.batch * p.seq_k
    made = backward.Backward(sequences.launched(p), choice.gradients(p), H200, all_rows=rows)
    assert 4 * made.space <= registry.loaded("cuda").extra_bytes(p, H200) <= 6 * made.space


@pytest.mark.parametrize("dims", ["64", "128", "192/128", "256"])
def test_it_says_no_less_than_is_taken_whatever_lengths_are(dims: str) -> None:
    """Of few rows, several blocks share a tile of keys, and each has sums of its own."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        heads_kv, group, batch, length = (int(draw.integers(1, most)) for most in (9, 5, 40, 1000))
        p = Problem.parse(f"b{batch}.h{heads_kv * group}/{heads_kv}.s{max(32, length)}.d{dims}.bf16.varlen.grad")
        rows = int(draw.integers(1, 1 + p.batch * p.seq_q))
        made = backward.Backward(sequences.launched(p), choice.gradients(p), H200, all_rows=(rows, rows))
        assert 4 * made.space <= registry.loaded("cuda").extra_bytes(p, H200), (p, rows)


# -- what is computed --------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dims", DIMS)
def test_tiles_that_reach_into_the_next_sequence_leave_it_out(dims: str) -> None:
    for how in ("", ".causal", ".causal-br", ".window=40,9"):
        check(f"b1.h2/1.s1.d{dims}.fp16{how}.varlen.grad")


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dims", ["64", "128"])
def test_blocks_that_add_in_turn(dims: str) -> None:
    for how in ("", ".causal", ".window=40,9"):
        check(f"b1.h4/2.s1.d{dims}.bf16{how}.varlen.grad.deterministic")


@compiled
@pytest.mark.parametrize(
    ("dims", "parts"),
    [
        ("64", 3),
        *(pytest.param(dims, 3, marks=pytest.mark.slow) for dims in ("128", "256")),
        *(pytest.param(dims, 1, marks=pytest.mark.slow) for dims in ("64", "128", "192/128", "256")),
    ],
)
def test_blocks_that_share_the_queries_of_the_same_keys_or_have_them_all(
    dims: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block for all heads of a group has as many last tiles."""
    monkeypatch.setattr(backward, "splits", lambda *_: parts)
    check(f"b1.h4/1.s1.d{dims}.fp16.causal.varlen.grad")
    check(f"b1.h4/1.s1.d{dims}.fp16.varlen.grad", (1,), (31,), (0, 0))
    check(f"b1.h2.s1.d{dims}.fp16.varlen.grad", (64, 64, 1), (64, 65, 200))


@compiled
@pytest.mark.slow
def test_keys_may_follow_others_in_a_block() -> None:
    tile = choice.ranked_gradients(Problem.parse("b1.h1.s2x5.d64.fp16.varlen.grad"), Device.cpu())
    assert tile[0].continued
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "gradients", lambda _: tile[0])
        check("b1.h2.s1.d64.fp16.causal.varlen.grad")


@compiled
@pytest.mark.parametrize(
    ("queries", "keys", "past"),
    [
        ((0, 40, 9), (5, 0, 9), (0, 0)),
        ((300, 0), (1, 1), (0, 200)),
        ((1,) * 9, tuple(range(9)), (130, 0)),
        ((0, 0), (7, 130), (0, 1)),
        ((128, 128), (256, 128), (0, 0)),
    ],
)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_sequences_may_be_empty(queries: Any, keys: Any, past: tuple[int, int], integers: torch.dtype) -> None:
    check("b1.h3/1.s1.d64.bf16.causal-br.varlen.grad", queries, keys, past, integers=integers)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dims", ["64", "128"])
def test_dropout_counts_from_the_first_row_of_a_sequence(dims: str) -> None:
    check(f"b1.h4/2.s1.d{dims}.fp16.causal.varlen.dropout=0.3.grad")


@compiled
@pytest.mark.slow
def test_slopes_and_softcaps() -> None:
    check("b1.h4/2.s1.d64.fp16.causal.varlen.alibi.grad", slopes=True)
    check("b1.h2/1.s1.d128.bf16.varlen.softcap=5.0.grad")
