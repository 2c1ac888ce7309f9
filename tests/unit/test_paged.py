"""``attention_paged``: the same as attention of each sequence alone, over its keys gathered; and what it refuses."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem, Problem, Unsupported, attention, attention_paged
from attnswitch.bench import deviation, workload
from attnswitch.call import finite
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.machine.pages import Pages
from attnswitch.verify import Case
from attnswitch.verify.judge import examine
from attnswitch.wisdom import classes

rng = np.random.default_rng(20)
LENGTHS = [37, 0, 5]
#: Queries one after another: of a sequence, of one without keys, of one with fewer keys than queries; a row past them.
STARTS, ROWS = [0, 3, 5, 12], 13
BACKENDS = ("tiled", "reference")


class Cache:
    """Keys (P, page, 2, 8) and values (P, page, 2, 6) in permuted pages; NaN and wrong numbers where nobody looks."""

    def __init__(self, page: int, lengths: list[int] = LENGTHS, spare: int = 2) -> None:
        used = [-(-length // page) for length in lengths]
        places = rng.permutation(sum(used) + spare)
        self.page, self.lengths = page, lengths
        self.table = np.resize(np.array([-1, 2**30]), (len(lengths), max(used) + 1))
        self.key, self.value = (np.full((len(places), page, 2, dim), np.nan) for dim in (8, 6))
        for b, length in enumerate(lengths):
            self.table[b, : used[b]], places = places[: used[b]], places[used[b] :]
            for cache in (self.key, self.value):
                for j in range(length):
                    cache[self.table[b, j // page], j % page] = rng.standard_normal(cache.shape[2:])

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.key, self.value, self.table, self.lengths

    def gathered(self, query: Any, starts: list[int] | None = None, **changes: Any) -> tuple[Any, Any]:
        """Output and lse of the formula, each sequence by a call of its own."""
        options: Any = {"is_causal": True, "causal_alignment": "bottom_right", "layout": "BLHD"} | changes
        outs, lses = [], []
        for b, length in enumerate(self.lengths):
            where = [(self.table[b, j // self.page], j % self.page) for j in range(length)]
            key, value = (
                np.array([cache[at] for at in where]).reshape(1, length, *cache.shape[2:])
                for cache in (self.key, self.value)
            )
            own = query[b] if starts is None else query[starts[b] : starts[b + 1]]
            out, lse = attention(own[None], key, value, return_lse=True, backend="reference", **options)
            outs.append(out[0])
            lses.append(lse[0])
        if starts is None:
            return np.stack(outs), np.stack(lses)
        return np.concatenate(outs), np.concatenate(lses, axis=1)


def queries(count: int) -> Any:
    return rng.standard_normal((len(LENGTHS), count, 4, 8))


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_is_attention_of_gathered_keys(page: int, count: int, backend: str) -> None:
    """A decoding step, speculative decoding, and a chunk of the prompt longer than two of the sequences."""
    cache, query = Cache(page), queries(count)
    out, lse = attention_paged(query, *cache.arrays, return_lse=True, backend=backend)
    right, right_lse = cache.gathered(query)
    np.testing.assert_allclose(out, right, atol=1e-12)
    np.testing.assert_allclose(lse, right_lse, atol=1e-12)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("longest", [None, 7, 9])
def test_packed_queries(backend: str, longest: int | None) -> None:
    cache, query = Cache(16), rng.standard_normal((ROWS, 4, 8))
    given: Any = {"cu_seqlens_q": STARTS, "max_seqlen_q": longest, "return_lse": True, "backend": backend}
    out, lse = attention_paged(query, *cache.arrays, **given)
    right, right_lse = cache.gathered(query, STARTS)
    np.testing.assert_allclose(out[:-1], right, atol=1e-12)
    np.testing.assert_allclose(lse[:, :-1], right_lse, atol=1e-12)
    assert not out[-1].any()
    assert (lse[:, -1] == -np.inf).all()


@pytest.mark.parametrize(
    "options", [{"is_causal": False}, {"window": (3, 0)}, {"softcap": 2.0, "scale": -0.5}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    cache, query = Cache(16), queries(4)
    right, _ = cache.gathered(query, **options)
    for backend in BACKENDS:
        out = attention_paged(query, *cache.arrays, backend=backend, **options)
        np.testing.assert_allclose(out, right, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4])
def test_torch(dtype: torch.dtype, count: int) -> None:
    """Every backend of the CPU, those that get gathered keys among them; these need equal head dimensions."""
    cache = Cache(16)
    query, key, value, table = map(torch.from_numpy, (queries(count), cache.key, cache.key * 0.5, cache.table))
    query, key, value = (x.to(dtype) for x in (query, key, value))
    right = attention_paged(query.double(), key.double(), value.double(), table, LENGTHS, backend="reference")
    for backend in (None, *BACKENDS, "sdpa-flash", "sdpa-math"):
        out = attention_paged(query, key, value, table, torch.tensor(LENGTHS), backend=backend)
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), right, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)


def test_strides_and_integers_of_any_kind() -> None:
    cache, query = Cache(3), queries(2)
    right = attention_paged(query, *cache.arrays)
    wide = np.full((3, 2 * cache.table.shape[1]), -9, np.int32)
    wide[:, ::2] = cache.table
    turned = query.swapaxes(1, 2).copy().swapaxes(1, 2)
    key = cache.key.swapaxes(1, 2).copy().swapaxes(1, 2)
    for lengths in (np.array(LENGTHS, np.uint8), np.array(LENGTHS, np.int64)[::-1].copy()[::-1]):
        found = attention_paged(turned, key, cache.value, wide[:, ::2], lengths)
        np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(attention_paged(query, *cache.arrays[:2], cache.table.tolist(), LENGTHS), right)


def test_pages_that_sequences_share() -> None:
    """A prompt of two pages that all begin with, and then a page of each."""
    key, value = (rng.standard_normal((6, 4, 2, dim)) for dim in (8, 6))
    table, lengths, query = [[4, 0, 1], [4, 0, 2], [4, 0, 5]], [9, 12, 11], queries(3)
    found = attention_paged(query, key, value, table, lengths)
    for b in range(3):
        alone = attention_paged(query[b : b + 1], key, value, table[b : b + 1], lengths[b : b + 1])
        np.testing.assert_array_equal(found[b], alone[0])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_value_that_is_part_of_the_key(library: str) -> None:
    """Latent attention: one key head, whose first columns are the value, in the same memory."""
    latent: Any = rng.standard_normal((5, 16, 1, 12))
    query, table, lengths = queries(2).repeat(2, axis=-1)[..., :12], [[3, 1], [0, 0], [2, 4]], [20, 7, 32]
    right = attention_paged(query, latent, latent[..., :8].copy(), table, lengths)
    if library == "torch":
        query, latent = torch.from_numpy(query), torch.from_numpy(latent)
    found = attention_paged(query, latent, latent[..., :8], table, lengths)
    np.testing.assert_array_equal(np.asarray(found), right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_num_splits_fixes_the_bits(backend: str) -> None:
    lengths = [700, 3, 300]
    cache, query = Cache(16, lengths), queries(1)
    query, key, value = (x.astype(np.float32) for x in (query, cache.key, cache.value))
    whole = attention_paged(query, key, value, cache.table, lengths, num_splits=4, backend=backend)
    for b, length in enumerate(lengths):
        table = cache.table[b : b + 1, : -(-length // 16)]
        alone = attention_paged(query[b : b + 1], key, value, table, [length], num_splits=4, backend=backend)
        np.testing.assert_array_equal(whole[b], alone[0])


def test_num_splits_is_refused_by_who_may_divide_otherwise() -> None:
    cache, query = Cache(16), torch.from_numpy(queries(1))
    arrays = query, *map(torch.from_numpy, (cache.key, cache.key, cache.table)), LENGTHS
    with pytest.raises(Unsupported, match="num_splits=2: how it divides"):
        attention_paged(*arrays, num_splits=2, backend="sdpa-flash")
    tiled: Any = registry.loaded("tiled")
    problem = Problem.parse("b3.h4/2.s1x64.d8.fp32.causal-br.lengths.page=16")
    assert len(list(tiled.configs(problem, Device.cpu()))) > 1
    assert len(list(tiled.configs(problem.replace(splits=2), Device.cpu()))) == 1


def test_only_the_tile_at_hand_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no row past a length, nor any twice for a single tile of queries."""
    read: list[tuple[int, int]] = []
    rows = Pages.rows

    def noted(self: Pages, begin: int, end: int) -> Any:
        read.append((begin, end))
        return rows(self, begin, end)

    monkeypatch.setattr(Pages, "rows", noted)
    cache = Cache(16, [150])
    query = rng.standard_normal((1, 1, 4, 8))
    with finite.checking("never"):
        attention_paged(query, *cache.arrays, backend="tiled")
    assert sorted(read) == sorted([(0, 64), (64, 128), (128, 150)] * 2)


def test_memory_of_gathered_keys_is_told() -> None:
    problem = Problem.parse("b64.h8/2.s1x4096.d64.fp32.causal-br.lengths.page=16")
    flash = registry.loaded("sdpa-flash")
    alone = one_by_one.asked(flash, problem)
    assert (alone.batch, alone.page, alone.key_lengths) == (1, 0, False)
    gathered = 4096 * 2 * (64 + 64) * 4
    extra = one_by_one.extra_bytes(flash, problem, Device.cpu())
    assert extra == gathered + flash.extra_bytes(alone, Device.cpu())
    assert one_by_one.extra_bytes(registry.loaded("tiled"), problem, Device.cpu()) < gathered


def test_nan_is_looked_for_among_keys_of_sequences_alone() -> None:
    """What nobody's rows hold is nobody's business; in a row that a query does not see it must not leak."""
    cache, query = Cache(16), torch.from_numpy(queries(4))
    key, value, table = map(torch.from_numpy, (cache.key, cache.key * 0.5, cache.table))
    call: Any = {"block_table": table, "cache_lengths": LENGTHS}
    assert not attnswitch.explain(query, key, value, **call).problem.nonfinite
    key[table[0, 36 // 16], 36 % 16] = torch.nan
    plan = attnswitch.explain(query, key, value, **call)
    assert plan.problem.nonfinite
    assert plan.backend in BACKENDS
    out = attention_paged(query, key, value, table, LENGTHS)
    assert out[0, :3].isfinite().all()
    assert out[0, 3].isnan().all()


def test_plans() -> None:
    cache, query = Cache(16), queries(2)
    call: dict[str, Any] = {"block_table": cache.table, "cache_lengths": LENGTHS}
    plan = attnswitch.plan(query, cache.key, cache.value, **call, num_splits=3, softcap=2.0)
    assert str(plan.problem) == "b3.h4/2.s2x64.d8/6.fp64.causal-br.lengths.page=16.splits=3.softcap=2.0"
    found = plan(query, cache.key, cache.value, **call)
    np.testing.assert_array_equal(found, attention_paged(query, *cache.arrays, num_splits=3, softcap=2.0))
    with pytest.raises(InvalidProblem, match=r"the plan is for b3.*and the call is b3.*make a plan"):
        plan(queries(1), cache.key, cache.value, **call)
    with pytest.raises(
        InvalidProblem, match="takes block_table, cache_lengths, and where the problem has them tree_mask, key_scale"
    ):
        plan(query, cache.key, cache.value, **call, seed=1)
    for layout in ("BHLD", "BLHD", "LBHD"):
        with pytest.raises(InvalidProblem, match="no layout"):
            plan(query, cache.key, cache.value, **call, layout=layout)
    with pytest.raises(InvalidProblem, match="takes block_table, cache_lengths"):
        plan(query, cache.key, cache.value)
    packed = attnswitch.plan(query[0], cache.key, cache.value, cu_seqlens_q=[0, 1, 1, 2], **call)
    assert packed.problem.varlen
    assert packed(query[0], cache.key, cache.value, cu_seqlens_q=[0, 1, 1, 2], **call).shape == (2, 4, 6)
    dense = attnswitch.plan(query, query, query)
    with pytest.raises(InvalidProblem, match="not for a cache in pages"):
        dense(query, query, query, block_table=cache.table)
    with pytest.raises(InvalidProblem, match="has no causal_alignment: queries are the newest tokens"):
        attnswitch.explain(query, cache.key, cache.value, **call, causal_alignment="top_left")
    text = str(attnswitch.explain("b2.h4.s1x64.d64.bf16.causal-br.lengths.page=16", device="h100"))
    assert "page=16 on cuda: it takes keys that lie one after another" in text


def test_a_class_of_problems_has_a_representative_of_whole_pages() -> None:
    for text in ("s1x3.d8.fp32.causal-br.lengths.page=3", "s7x320.d8.fp32.causal-br.lengths.page=64.splits=4"):
        problem = Problem.parse(f"b5.h4/2.{text}")
        alike = classes.representative(problem)
        assert classes.speed_class(alike) == classes.speed_class(problem)
        assert alike.seq_k % problem.page == 0
        for other in ({"page": 1}, {"splits": 9}):
            assert classes.speed_class(problem.replace(**other)) != classes.speed_class(problem)
        assert not classes.covers(problem, problem.replace(page=0, splits=0))


@pytest.mark.parametrize(
    "text", ["b3.h4/2.s1x96.d16/8.fp32.causal-br.lengths.page=3.lse", "b3.h4.s5x64.d8.fp32.lengths.varlen.page=16"]
)
def test_the_workload_of_a_problem(text: str) -> None:
    problem = Problem.parse(text)
    work = workload.of(problem, "cpu", (64, 0, 9))
    assert work.key.shape[0] == sum(-(-length // problem.page) for length in (64, 0, 9))
    plan = attnswitch.plan(work.query, work.key, work.value, **work.keywords())
    assert plan.problem == problem.replace(key=plan.problem.key, value=plan.problem.value, query=plan.problem.query)
    result = plan(work.query, work.key, work.value, **work.arrays())
    out = result[0] if problem.lse else result
    assert deviation.make(work).deviation([out]) < 1e-5
    out[-1, -1] += 1.0
    assert deviation.make(work).deviation([out]) > 0.1


Q, CACHE = queries(2), Cache(16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query": Q[0]},
            r"another number of axes; expected query \(B, Lq, Hq, D\), or \(T, Hq, D\) with cu_seqlens_q",
        ),
        ({"cu_seqlens_q": STARTS}, r"another number of axes; expected query \(T, Hq, D\) with cu_seqlens_q"),
        ({"query": Q[:2]}, r"query has 2 batch entries, and block_table 3 rows"),
        ({"query": Q[0, :1], "cu_seqlens_q": [0, 1]}, r"cu_seqlens_q tells 1 sequences apart, and block_table has 3"),
        ({"query": Q[..., :5]}, r"the head dimension of query and key_cache must agree"),
        ({"value_cache": CACHE.value[:-1]}, r"the pages, their rows and the heads of both caches must agree"),
        ({"key_cache": CACHE.key[:, :0], "value_cache": CACHE.value[:, :0]}, r"a page has one row at least"),
        ({"block_table": CACHE.table[:, :2]}, r"cache_lengths holds 37: expected 0 to 2 pages of 16 = 32"),
        (
            {"cache_lengths": [37, 33, 5]},
            r"block_table\[1, 0\] is -1: expected one of the 6 pages, as sequence 1 has 33",
        ),
        ({"block_table": CACHE.table + 5}, r"block_table\[0, \d\] is \d+: expected one of the 6 pages"),
        ({"block_table": CACHE.table.astype(float)}, r"block_table has dtype float64: expected integers \(B, M\)"),
        ({"block_table": CACHE.table[0]}, r"block_table has shape \(4,\): expected integers \(B, M\)"),
        ({"block_table": [[0, 1], [0]]}, r"block_table=\[\[0, 1\], \[0\]\]: expected integers \(B, M\)"),
        ({"block_table": [[True], [False], [True]]}, r"block_table=.*expected integers \(B, M\)"),
        ({"block_table": None}, r"block_table=None: expected integers \(B, M\)"),
        ({"cache_lengths": [37.0, 0, 5]}, r"cache_lengths=\[37.0, 0, 5\]: expected 3 integers"),
        ({"cache_lengths": np.array([37.0, 0, 5])}, r"cache_lengths has dtype float64"),
        ({"cache_lengths": [37, 0]}, r"cache_lengths has shape \(2,\): expected \(3,\)"),
        ({"cache_lengths": [-1, 0, 5]}, r"cache_lengths holds -1"),
        ({"num_splits": 0}, r"num_splits=0: expected into how many parts"),
        ({"num_splits": True}, r"num_splits=True"),
        ({"max_seqlen_q": 2}, r"max_seqlen_q without cu_seqlens_q"),
        ({"attn_mask": None}, r"attention_paged has no attn_mask: a cache in pages takes a tree_mask"),
        ({"key_lengths": [1]}, r"attention_paged has no key_lengths: cache_lengths says"),
        ({"causal_alignment": "top_left"}, r"has no causal_alignment: queries are the newest tokens"),
        ({"block_tables": 1}, r"unexpected keyword 'block_tables'.*did you mean"),
        ({"backend": 3}, r"backend=3: expected the name"),
        ({"backend": "fastest"}, r"backend 'fastest' is not known"),
        ({"key_cache": CACHE.key[:, :, [0, 0, 0]], "value_cache": CACHE.value[:, :, [0, 0, 0]]}, r"multiple of"),
        ({"query": torch.from_numpy(Q)}, r"differ in library"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    names = ("key_cache", "value_cache", "block_table", "cache_lengths")
    asked: dict[str, Any] = {"query": Q, **dict(zip(names, CACHE.arrays, strict=True))} | changes
    with pytest.raises(InvalidProblem, match=message):
        attention_paged(**asked)


def test_tensors_that_require_gradients_are_refused() -> None:
    query, key, value, table = map(torch.from_numpy, (Q, CACHE.key, CACHE.value, CACHE.table))
    query.requires_grad_()
    with pytest.raises(InvalidProblem, match=r"requires a gradient, which a cache has none of.*no_grad"):
        attention_paged(query, key, value, table, LENGTHS)
    with torch.no_grad():
        attention_paged(query, key, value, table, LENGTHS)
    with pytest.raises(InvalidProblem, match="a plan needs tensors with memory"):
        attnswitch.plan(query.detach().to("meta"), key, value, block_table=table, cache_lengths=LENGTHS)


def test_nothing_to_attend() -> None:
    none = np.zeros((0, 16, 2, 8))
    out, lse = attention_paged(Q, none, none, np.zeros((3, 0), int), [0, 0, 0], return_lse=True)
    assert out.shape == (3, 2, 4, 8)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert attention_paged(Q[:0], none, none, np.zeros((0, 3), int), []).shape == (0, 2, 4, 8)
    assert attention_paged(Q[:, :0], CACHE.key, CACHE.value, CACHE.table, LENGTHS).shape == (3, 0, 4, 6)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_arrays_of_jax() -> None:
    import jax.numpy as jnp

    query, key, value = (jnp.asarray(x, jnp.float32) for x in (Q, CACHE.key, CACHE.value))
    out = attention_paged(query, key, value, jnp.asarray(CACHE.table, jnp.int32), LENGTHS)
    assert type(out) is type(query)
    np.testing.assert_allclose(np.asarray(out), attention_paged(Q, *CACHE.arrays), atol=1e-5)


def test_the_forms_in_text() -> None:
    problem = Problem.parse("b16.h32/8.s1x4096.d128.bf16.lengths.causal-br.page=64.splits=8")
    assert Problem.parse(str(problem)) == problem
    assert problem.sees_all
    for text, message in (("splits=2", "only the keys of a paged cache"), ("page=16.lengths.splits=-1", "splits=-1")):
        with pytest.raises(InvalidProblem, match=message):
            Problem.parse(f"b1.h1.s1x64.d8.fp32.{text}")


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_and_slopes_beside_pages(packed: bool) -> None:
    """As of the keys gathered; slopes are each sequence's own."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 7, 4, 2, 8), dtype=np.float32)
    query = rng.standard_normal((2, 3, 4, 8), dtype=np.float32)
    table, lengths = np.array([[3, 1, 5], [0, 6, 2]]), (9, 5)
    sinks, slopes = rng.standard_normal(4), rng.random((2, 4))
    rows: dict[str, Any] = {"query": query.reshape(6, 4, 8), "cu_seqlens_q": [0, 3, 6]} if packed else {"query": query}
    said: dict[str, Any] = {"sinks": sinks, "alibi_slopes": slopes, "return_lse": True, "backend": "tiled"}
    out, lse = attnswitch.attention_paged(
        key_cache=cache[0], value_cache=cache[1], block_table=table, cache_lengths=lengths, **rows, **said
    )
    for b, length in enumerate(lengths):
        key, value = (part[table[b]].reshape(1, -1, 2, 8)[:, :length] for part in cache)
        said["alibi_slopes"] = slopes[b : b + 1]
        bottom: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right", "layout": "BLHD"}
        wanted = attnswitch.attention(query[b : b + 1], key, value, **bottom, **said)
        got = (out[3 * b : 3 * b + 3], lse[:, 3 * b : 3 * b + 3]) if packed else (out[b], lse[b])
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other[0])


@pytest.mark.parametrize(
    "text",
    [
        "b2.h4/2.s3x64.d16.fp32.causal-br.lengths.page=16.sinks",
        "b3.h4/2.s5x64.d16/8.fp32.causal-br.lengths.varlen.page=16.splits=2.sinks.alibi",
    ],
)
def test_the_verifier_passes_them_on(text: str) -> None:
    """``tune`` verifies what it measures: without the sinks every backend was found wrong."""
    case = Case.of(Problem.parse(text)).replace(check="reference")
    assert [outcome.verdict for outcome in examine(case, ["tiled", "reference"])] == ["verified", "verified"]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("page", [1, 8, 100])
def test_rows_are_gathered_a_page_at_a_time(page: int, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one page no more than is asked for: a page may be as long as a sequence, and is asked for tile by tile."""
    held = np.arange(40 * page * 2 * 3.0).reshape(40, 2, page, 3)
    names = np.array([7, 3, 39, 0, 11])
    cache, table = (torch.from_numpy(x) if library == "torch" else x for x in (held, names))
    pages = importlib.import_module("attnswitch.machine.pages")
    gathered = []

    def picked(cache: Any, *beside: Any, plain: Any = pages._picked) -> Any:
        gathered.append(plain(cache, *beside))
        return gathered[-1]

    monkeypatch.setattr(pages, "_picked", picked)
    for begin, end in ((0, 0), (0, page), (page // 2, page), (3 * page // 2, 4 * page), (4 * page, 5 * page)):
        got = np.asarray(Pages(cache, table).rows(begin, end))
        right = [held[names[j // page], :, j % page] for j in range(begin, end)]
        np.testing.assert_array_equal(got, np.array(right).reshape(-1, 2, 3).swapaxes(0, 1)[None])
        rows = gathered[-1].shape[0] * gathered[-1].shape[1]
        assert rows == end - begin or (rows < end - begin + 2 * page and begin // page < (end - 1) // page)
