"""``tree_mask``: bits that say which of the newest keys each query sees, held against the bool mask they stand for."""

# mypy: disable-error-code="arg-type, call-arg"

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem, Problem, Unsupported, attention, attention_paged
from attnswitch.bench import deviation, workload
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.machine.trees import as_mask
from attnswitch.verify import Case
from attnswitch.verify.drawing import data
from attnswitch.verify.drawing.trees import TREE_KINDS
from attnswitch.verify.judge import examine
from attnswitch.wisdom import classes

PAGE, LENGTHS = 16, (40, 11, 5)
TABLE = np.array([[7, 2, 5], [1, -1, -1], [8, 2**30, -1]])
ON_THE_CPU = (None, "tiled", "reference", "sdpa-math", "sdpa-flash")
TEXT = "b3.h4/2.s11x48.d8.fp64.causal-br.lengths.page=16.tree"


def packed(seen: Any) -> Any:
    return np.packbits(seen, axis=-1, bitorder="little")


def call(count: int = 11, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Query (B, Lq, 4, 8), the caches, and which of the newest keys each query sees, (B, Lq, Lq)."""
    rng = np.random.default_rng(seed)
    caches = rng.standard_normal((2, 10, PAGE, 2, 8))
    return rng.standard_normal((len(LENGTHS), count, 4, 8)), *caches, rng.random((len(LENGTHS), count, count)) < 0.6


def gathered(query: Any, keys: Any, values: Any, seen: Any, b: int, **said: Any) -> Any:
    """Output (Lq, Hq, D) of the formula for one sequence, with the mask written out key by key."""
    queries, length = len(query[b]), LENGTHS[b]
    mask = np.ones((queries, length), bool)
    for i in range(queries):
        for t in range(queries):
            if (j := length - queries + t) >= 0:
                mask[i, j] = seen[b][i, t]
    key, value = (cache[TABLE[b, : -(-length // PAGE)]].reshape(-1, 2, 8)[None, :length] for cache in (keys, values))
    said = {"is_causal": True, "causal_alignment": "bottom_right", "layout": "BLHD", "backend": "reference"} | said
    return attention(query[b][None], key, value, attn_mask=mask, **said)[0]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("said", [{}, {"is_causal": False}, {"window": (4, 2), "is_causal": False, "scale": 0.5}])
def test_it_is_the_mask_that_its_bits_stand_for(library: str, backend: str | None, said: dict[str, Any]) -> None:
    query, keys, values, seen = call()
    as_caller = torch.from_numpy if library == "torch" else np.asarray
    arrays = [as_caller(x) for x in (query, keys, values)]
    given: Any = {"tree_mask": as_caller(packed(seen)), "backend": backend} | said
    out = attention_paged(*arrays, TABLE.tolist(), LENGTHS, **given)
    for b in range(len(LENGTHS)):
        np.testing.assert_allclose(out[b], gathered(query, keys, values, seen, b, **said), atol=1e-12)


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_packed_queries_have_rows_of_their_own(backend: str | None) -> None:
    """Trees of 3, 0 and 9 queries, in bytes of which the last queries use one bit; a row lies past the last."""
    query, keys, values, seen = call(9)
    counts = (3, 0, 9)
    own = [seen[b, :n, :n] for b, n in enumerate(counts)]
    bits = np.full((13, 3), 255, np.uint8)
    begin = 0
    for part in own:
        bits[begin : begin + len(part), : -(-len(part) // 8)] = packed(part)
        begin += len(part)
    rows = np.concatenate([query[b, :n] for b, n in enumerate(counts)] + [query[0, :1]])
    given: Any = {"tree_mask": bits, "cu_seqlens_q": [0, 3, 3, 12], "backend": backend}
    out = attention_paged(rows, keys, values, TABLE, LENGTHS, **given)
    alone = [query[b, :n] for b, n in enumerate(counts)]
    for b, begin in ((0, 0), (2, 3)):
        right = gathered(alone, keys, values, own, b)
        np.testing.assert_allclose(out[begin : begin + counts[b]], right, atol=1e-12)
    assert not out[12:].any()


@pytest.mark.parametrize("kind", ["sliced", "reversed", "wider"])
def test_bits_lie_as_they_may(kind: str) -> None:
    query, keys, values, seen = call()
    bits = packed(seen)
    right = attention_paged(query, keys, values, TABLE, LENGTHS, tree_mask=bits)
    other = {
        "sliced": np.concatenate([bits, 255 - bits], axis=-1)[..., :2],
        "reversed": np.ascontiguousarray(bits[:, ::-1])[:, ::-1],
        "wider": np.concatenate([bits, 255 - bits], axis=-1),  # bits of queries that there are not
    }[kind]
    assert np.array_equal(attention_paged(query, keys, values, TABLE, LENGTHS, tree_mask=other), right)


def test_a_tree_of_all_earlier_queries_is_causal() -> None:
    query, keys, values, _ = call()
    chain = packed(np.broadcast_to(np.tri(11, dtype=bool), (3, 11, 11)))
    plain = attention_paged(query, keys, values, TABLE, LENGTHS, backend="reference")
    for causal in (True, False):
        given: Any = {"is_causal": causal, "tree_mask": chain, "backend": "reference"}
        np.testing.assert_allclose(attention_paged(query, keys, values, TABLE, LENGTHS, **given), plain, atol=1e-12)


def test_an_output_has_a_row_of_zeros_where_nothing_is_seen() -> None:
    query, keys, values, seen = call()
    given: Any = {"tree_mask": packed(np.zeros_like(seen)), "return_lse": True}
    out, lse = attention_paged(query, keys, values, TABLE, LENGTHS, **given)
    assert not out[1].any()  # as many queries as keys
    assert (lse[1] == -np.inf).all()
    assert np.isfinite(lse[0]).all()


def test_nan_of_a_hidden_query_does_not_leak() -> None:
    query, keys, values, seen = call()
    given: Any = {"tree_mask": packed(seen & ~np.eye(11, dtype=bool)[None, 10])}  # nobody sees the last query's key
    right = attention_paged(query, keys, values, TABLE, LENGTHS, **given)
    for cache in (keys, values):
        cache[TABLE[0, 39 // PAGE], 39 % PAGE] = np.nan
    np.testing.assert_allclose(attention_paged(query, keys, values, TABLE, LENGTHS, **given), right, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_with_num_splits_a_sequence_has_the_same_bits_alone() -> None:
    query, keys, values, seen = call()
    given: Any = {"num_splits": 3, "backend": "cuda"}
    whole = attention_paged(query, keys, values, TABLE, LENGTHS, tree_mask=packed(seen), **given)
    alone = attention_paged(query[:1], keys, values, TABLE[:1], LENGTHS[:1], tree_mask=packed(seen[:1]), **given)
    assert np.array_equal(whole[:1], alone)


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_the_text_form() -> None:
    problem = Problem.parse(TEXT)
    assert problem.tree
    assert str(problem) == TEXT
    assert Problem.parse(TEXT.replace("causal-br.", "")).bottom_right  # whose queries are the newest keys
    with pytest.raises(InvalidProblem, match="tree: only queries of a cache in pages"):
        Problem.parse("b3.h4.s8.d8.fp32.tree")
    plain = problem.replace(tree=False)
    assert classes.speed_class(problem) != classes.speed_class(plain)
    assert classes.doublings(classes.traits(plain), classes.traits(problem)) == math.inf  # no time serves both


def test_plan_and_explain() -> None:
    query, keys, values, seen = call()
    given: Any = {"block_table": TABLE, "cache_lengths": LENGTHS, "tree_mask": packed(seen)}
    plan = attnswitch.plan(query, keys, values, is_causal=True, **given)
    assert str(plan.problem).startswith(TEXT)
    assert np.array_equal(plan(query, keys, values, **given), attention_paged(query, keys, values, **given))
    del given["tree_mask"]
    with pytest.raises(InvalidProblem, match="the plan is for"):
        plan(query, keys, values, **given)
    with pytest.raises(InvalidProblem, match="tree_mask"):
        attnswitch.plan(query, query, query)(query, query, query, tree_mask=packed(seen))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda bits: bits.astype(np.int32), "dtype int32"),
        (lambda bits: bits.astype(bool), "dtype bool"),
        (lambda bits: bits[..., :1], r"shape \(3, 11, 1\): expected bytes \(uint8\) of shape \(3, 11, 2 or more\)"),
        (lambda bits: bits[:2], r"shape \(2, 11, 2\)"),
        (lambda bits: bits[0], r"shape \(11, 2\)"),
        (lambda bits: bits.tolist(), "expected bytes"),
        (lambda bits: 7, "tree_mask=7: expected bytes"),
        (lambda bits: torch.from_numpy(bits), "tree_mask"),
    ],
)
def test_what_is_no_tree_is_refused(wrong: Any, told: str) -> None:
    query, keys, values, seen = call()
    with pytest.raises(InvalidProblem, match=told):
        attention_paged(query, keys, values, TABLE, LENGTHS, tree_mask=wrong(packed(seen)))


def test_the_mask_of_a_tree_counts_as_memory() -> None:
    problem = Problem.parse("b4.h8.s4096x65536.d64.fp32.causal-br.lengths.page=16.tree")
    for name in ("tiled", "sdpa-math"):
        backend = registry.load(name)
        assert not isinstance(backend, registry.Missing)
        more, plain = (one_by_one.extra_bytes(backend, p, Device.cpu()) for p in (problem, problem.replace(tree=False)))
        assert more - plain >= 4096 * 65536


def test_without_a_table_the_message_names_it() -> None:
    query, keys, values, seen = call()
    with pytest.raises(InvalidProblem, match=r"tree_mask, .* are for a cache in pages: pass block_table"):
        attnswitch.plan(query, keys, values, tree_mask=packed(seen))


def test_rows_of_bits_may_be_shared_or_of_a_wider_buffer() -> None:
    query, keys, values, _ = (torch.from_numpy(x) for x in call())
    shared = torch.from_numpy(packed(np.tri(11, dtype=bool))).expand(3, 11, 2)
    wide = torch.zeros(3, 11, 8, dtype=torch.uint8)
    wide[..., :2] = shared
    arrays: Any = query, keys, values, TABLE.tolist(), LENGTHS
    for bits in (shared, wide[..., :2]):
        torch.testing.assert_close(attention_paged(*arrays, tree_mask=bits), attention_paged(*arrays))


def test_a_mask_is_told_of_trees() -> None:
    query, keys, values, _ = call()
    with pytest.raises(InvalidProblem, match=r"attention_paged has no attn_mask: .*tree_mask"):
        attention_paged(query, keys, values, TABLE, LENGTHS, attn_mask=np.ones((11, 40), bool))


def test_who_reads_no_bits_says_so() -> None:
    problem, device = Problem.parse(TEXT.replace("fp64", "bf16")), Device.parse("h200")
    assert attnswitch.plan(problem, device=device).backend in ("cuda", "triton")
    with pytest.raises(Unsupported, match="tree_mask: its kernels read no mask beside pages"):
        attnswitch.plan(problem, device=device, backend="flashinfer")


# -- in a graph of torch's ---------------------------------------------------------------------------------------------


def test_it_is_in_the_graph() -> None:
    query, keys, values, seen = (torch.from_numpy(x) for x in call())
    bits, table = torch.from_numpy(packed(seen.numpy())), torch.from_numpy(TABLE)

    def step(query: torch.Tensor, bits: torch.Tensor) -> Any:
        return attention_paged(query, keys, values, table, torch.tensor(LENGTHS), tree_mask=bits, return_lse=True)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (11, 5):
        few = bits[:, :count]
        for got, right in zip(compiled(query[:, :count], few), step(query[:, :count], few), strict=True):
            torch.testing.assert_close(got, right)
    with pytest.raises(Exception, match="expected a tensor of bytes"):
        torch.compile(step, fullgraph=True, backend="eager")(query, [[1]])


# -- how it is verified ------------------------------------------------------------------------------------------------


def test_as_mask_in_both_libraries() -> None:
    bits = np.random.default_rng(1).integers(0, 256, (1, 11, 2), dtype=np.uint8)
    for keys in (40, 11, 5, 0):
        mask = as_mask(bits, keys)
        assert mask.shape == (1, 1, 11, keys)
        assert np.array_equal(mask, as_mask(torch.from_numpy(bits), keys).numpy())
        for i in range(11):
            for j in range(keys):
                t = j - (keys - 11)
                assert mask[0, 0, i, j] == (t < 0 or bits[0, i, t // 8] >> t % 8 & 1)


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("counts", [None, (11, 0, 4)])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_case_with_a_tree_is_judged(kind: str, counts: tuple[int, ...] | None, library: str) -> None:
    case = Case.of(Problem.parse(TEXT)).replace(
        lengths=LENGTHS, query_lengths=counts, tree=kind, library=library, lse=True, check="batch"
    )
    outcomes = examine(case, ["tiled", "reference"])
    assert [outcome.verdict for outcome in outcomes] == ["verified"] * 2, outcomes
    assert Case.from_json(case.to_json()) == case


def test_a_drawn_tree_has_its_ancestors() -> None:
    case = Case.of(Problem.parse(TEXT)).replace(lengths=(48, 48, 20))
    mask = data.operands(case)["attn_mask"]
    for b, length in enumerate((48, 48, 20)):
        own = mask[b, 0, :, length - 11 : length]
        assert mask[b, 0, :, : length - 11].all()
        assert np.array_equal(np.diag(own), np.ones(11))
        assert not np.triu(own, 1).any()
        for i, j in zip(*np.nonzero(own), strict=True):  # who sees a query sees all that it sees
            assert (own[i] >= own[j]).all()


@pytest.mark.parametrize("varlen", ["", ".varlen"])
def test_a_benchmark_has_a_tree(varlen: str) -> None:
    problem = Problem.parse(TEXT.replace("fp64", "fp32") + varlen)
    work = workload.of(problem, "cpu", (40, 48, 11))
    out = work.function(work.query, work.key, work.value, **work.keywords())
    assert deviation.make(work).wrong([out]) == ""
    keywords = work.keywords() | {"tree_mask": None}
    assert deviation.make(work).deviation([work.function(work.query, work.key, work.value, **keywords)]) > 0.1
