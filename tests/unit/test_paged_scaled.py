"""Caches of 8 bits: attention of what elements stand for, to the rounding of query's dtype; and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem, Problem, attention_paged
from attnswitch.bench import deviation, workload
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import CACHES, cost
from attnswitch.verify import Case
from attnswitch.verify.drawing import data, stored
from attnswitch.verify.judge import examine

rng = np.random.default_rng(23)
PAGES, PAGE, HEADS, DIM = 9, 4, 2, 16
TABLE, LENGTHS = [[8, 1, 5], [0, 5, -1]], [11, 6]
TEXT = "b2.h4/2.s1x64.d64.bf16.causal-br.lengths.page=16"
ONE = np.float32(0.37)
SCALES: dict[str, Any] = {
    "none": None,
    "number": 0.37,
    "array of one": ONE,
    "list": [0.5, 0.25],
    "head": rng.uniform(0.1, 1.0, HEADS).astype("float32"),
    "page": rng.uniform(0.1, 1.0, (PAGES, 1)).astype("float32"),
    "page and head": rng.uniform(0.1, 1.0, (PAGES, HEADS)).astype("float32"),
}
#: A unit in the last place of the output, of each dtype of query, and a little more.
NEAR = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-12}


def cache(dtype: str) -> Any:
    """(P, page, H, D) of numbers that every type has, of all sizes that a scale of about 1 needs."""
    return (rng.standard_normal((PAGES, PAGE, HEADS, DIM)) * 4).round().astype(stored.DTYPES[dtype])


def meant(elements: Any, scale: Any) -> Any:
    """What they stand for, in float64."""
    wide = elements.astype(np.float64)
    if scale is None:
        return wide
    scale = np.asarray(scale, np.float64)
    return wide * (scale if scale.ndim < 2 else scale[:, None, :])[..., None]


def as_torch(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


@pytest.mark.parametrize("backend", ["tiled", "reference", "sdpa-math", None])
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("wide", NEAR)
def test_it_is_attention_of_what_elements_stand_for(backend: str | None, dtype: str, wide: str) -> None:
    key, value = cache(dtype), cache(dtype)
    query = rng.standard_normal((2, 1, 4, DIM)).astype(getattr(np, wide, ml_dtypes.bfloat16))
    said = {"key_scale": SCALES["page and head"], "value_scale": SCALES["page"]}
    whole = meant(key, said["key_scale"]), meant(value, said["value_scale"])
    expected = attention_paged(query.astype(np.float64), *whole, TABLE, LENGTHS, backend="reference")
    got = attention_paged(query, key, value, TABLE, LENGTHS, backend=backend, **said)
    assert got.dtype == query.dtype
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=NEAR[wide], rtol=NEAR[wide])
    of_torch = torch.from_numpy(query.astype(np.float64)).to(getattr(torch, wide))
    said = {name: as_torch(scale) for name, scale in said.items()}
    again = attention_paged(of_torch, as_torch(key), as_torch(value), TABLE, LENGTHS, backend=backend, **said)
    assert again.dtype == of_torch.dtype
    np.testing.assert_allclose(again.double().numpy(), expected, atol=NEAR[wide], rtol=NEAR[wide])


@pytest.mark.parametrize("of_values", SCALES)
@pytest.mark.parametrize("of_keys", SCALES)
def test_scales_of_every_shape(of_keys: str, of_values: str) -> None:
    key, value, query = cache("int8"), cache("int8"), rng.standard_normal((2, 1, 4, DIM))
    said = {"key_scale": SCALES[of_keys], "value_scale": SCALES[of_values]}
    expected = attention_paged(query, meant(key, said["key_scale"]), meant(value, said["value_scale"]), TABLE, LENGTHS)
    np.testing.assert_allclose(attention_paged(query, key, value, TABLE, LENGTHS, **said), expected, rtol=1e-6)


def test_packed_queries_and_other_forms() -> None:
    key, value = cache("float8_e4m3fn"), cache("float8_e4m3fn")
    query = rng.standard_normal((5, 4, DIM)).astype(np.float32)
    said: Any = {"cu_seqlens_q": [0, 4, 5], "sinks": [0.5, -1.0, 2.0, 0.0], "alibi_slopes": [0.5, 0.25, 0.1, 0.0]}
    scales = {"key_scale": SCALES["head"], "value_scale": SCALES["page"]}
    whole = (meant(key, SCALES["head"]).astype(np.float32), meant(value, SCALES["page"]).astype(np.float32))
    expected = attention_paged(query, *whole, TABLE, LENGTHS, return_lse=True, window=(5, 0), backend="tiled", **said)
    got = attention_paged(
        query, key, value, TABLE, LENGTHS, return_lse=True, window=(5, 0), backend="tiled", **said, **scales
    )
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_what_nobody_uses_is_not_read() -> None:
    key = cache("float8_e4m3fn")
    value, query = key.copy(), rng.standard_normal((2, 1, 4, DIM))
    before = attention_paged(query, key, value, TABLE, LENGTHS, key_scale=SCALES["page"])
    for unused in (2, 3, 4, 6, 7):
        key[unused] = value[unused] = np.nan
    scale = SCALES["page"].copy()
    scale[[2, 3, 4, 6, 7]] = np.nan
    key[5, 3:] = value[5, 3:] = np.nan  # the third row of the page that both share is the last that any has
    np.testing.assert_array_equal(
        attention_paged(query, key, value, TABLE, LENGTHS, key_scale=scale), before, strict=True
    )


def test_plans_explain_and_take_scales() -> None:
    key, value, query = cache("int8"), cache("int8"), rng.standard_normal((2, 1, 4, DIM))
    beside: Any = {"block_table": TABLE, "cache_lengths": LENGTHS, "key_scale": 0.5, "value_scale": SCALES["head"]}
    plan = attnswitch.plan(query, key, value, **beside)
    assert plan.problem.cache == "int8"
    assert ".page=4.cache=int8" in str(plan.problem)
    np.testing.assert_array_equal(plan(query, key, value, **beside), attention_paged(query, key, value, **beside))
    with pytest.raises(InvalidProblem, match="make a plan for it"):
        plan(
            query,
            *(array.astype(np.float64) for array in (key, value)),
            **beside | {"key_scale": None, "value_scale": None},
        )
    dense = attnswitch.plan(*(rng.standard_normal((1, 1, 2, 8)) for _ in range(3)))
    with pytest.raises(InvalidProblem, match=r"the plan is not for a cache in pages, of which .*key_scale"):
        dense(query, key, value, key_scale=0.5)


@pytest.mark.parametrize("text", ["fp8e4m3", "fp8e5m2", "int8"])
def test_the_text_form_bytes_and_workload(text: str) -> None:
    problem = Problem.parse(f"{TEXT}.cache={text}")
    assert str(problem) == f"{TEXT}.cache={text}"
    assert problem.cache in CACHES
    assert 2 * cost.kv_bytes(problem) == cost.kv_bytes(Problem.parse(TEXT))
    work = workload.of(problem, "cpu")
    plain = {name: x for name, x in work.keywords().items() if not name.endswith("_scale")}
    caches = [
        (tensor.float() * scale[:, None, :, None])
        for tensor, scale in zip((work.key, work.value), work.scales, strict=True)
        if scale is not None
    ]
    expected = work.function(work.query.float(), *caches, **plain)
    got = work.function(work.query, work.key, work.value, **work.keywords())
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
    assert deviation.make(work).wrong([got]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": cache("float8_e5m2")}, "key_cache has dtype int8 and value_cache float8_e5m2: expected one of"),
        ({"value": np.zeros((PAGES, PAGE, HEADS, DIM))}, "key_cache has dtype int8 and value_cache float64"),
        (
            {"key_scale": np.ones(3)},
            r"key_scale has shape \(3,\): expected a number, or numbers of .*\(2,\)",
        ),
        ({"value_scale": np.ones((HEADS, PAGES))}, r"value_scale has shape \(2, 9\): expected a number"),
        ({"key_scale": float("nan")}, "key_scale=nan: expected finite numbers"),
        ({"value_scale": [1.0, np.inf]}, r"value_scale=\[1.0, inf\]: expected finite numbers"),
        ({"value_scale": 10**400}, "value_scale=1000.*: expected a number"),
        ({"key_scale": float("inf")}, "key_scale=inf: expected finite numbers"),
        ({"key_scale": [[1.0], [1.0, 2.0]]}, "key_scale=.*: expected a number"),
        (
            {"key": np.zeros((PAGES, PAGE, HEADS, DIM), np.uint8)},
            "key_cache has dtype uint8: expected query's float64, or",
        ),
        ({"key_scale": "half"}, "key_scale='half': expected a number"),
        ({"key_scale": True}, "key_scale=True: expected a number"),
        ({"key_scale": np.ones(HEADS, np.int64)}, "key_scale has dtype int64: expected one of float16"),
        ({"key_scale": torch.ones(HEADS)}, "key_scale is a torch array on cpu:0, query a numpy array on cpu:0"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    given = {"key": cache("int8"), "value": cache("int8")} | changes
    key, value = given.pop("key"), given.pop("value")
    with pytest.raises(InvalidProblem, match=message):
        attention_paged(rng.standard_normal((2, 1, 4, DIM)), key, value, TABLE, LENGTHS, **given)


@pytest.mark.parametrize(
    "scale", [float("nan"), [1.0, float("inf")], [[1.0, float("nan")]] * PAGES, [True, True]], ids=str
)
def test_numbers_are_looked_at_in_a_graph_as_they_are_without(scale: Any) -> None:
    key = torch.zeros(PAGES, PAGE, HEADS, DIM, dtype=torch.int8)
    query = torch.randn(2, 1, 4, DIM)
    for function in (attention_paged, torch.compile(attention_paged, backend="eager")):
        for role in ("key_scale", "value_scale"):
            with pytest.raises(InvalidProblem, match=f"{role}=.*expected"):
                function(query, key, key, TABLE, LENGTHS, **{role: scale})


def test_scales_without_a_cache_of_8_bits_are_refused() -> None:
    key = rng.standard_normal((PAGES, PAGE, HEADS, DIM))
    with pytest.raises(InvalidProblem, match="value_scale with caches of float64: only those of float8_e4m3fn"):
        attention_paged(rng.standard_normal((2, 1, 4, DIM)), key, key, TABLE, LENGTHS, value_scale=2.0)


def test_a_scale_has_no_gradient() -> None:
    key, query = torch.zeros(PAGES, PAGE, HEADS, DIM, dtype=torch.int8), torch.randn(2, 1, 4, DIM)
    with pytest.raises(InvalidProblem, match=r"key_scale requires a gradient.*pass key_scale.detach\(\)"):
        attention_paged(query, key, key, TABLE, LENGTHS, key_scale=torch.ones(HEADS, requires_grad=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TEXT}.cache=fp8", "part 'cache=fp8' is not understood.*cache=fp8e4m3"),
        ("b1.h1.s8.d8.fp32.cache=int8", "only a cache in pages has a type of its own"),
        (f"{TEXT}.cache=int4", "part 'cache=int4' is not understood"),
    ],
)
def test_a_problem_without_such_a_cache(text: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        Problem.parse(text)


def test_who_does_not_read_them_says_so() -> None:
    plan = planner.make_plan(Problem.parse(f"{TEXT}.cache=int8"), Device.named("h200"))
    reasons = {candidate.backend: plan.why_not(candidate) for candidate in plan.candidates}
    for name in {"cuda", "triton"} & set(reasons):
        assert "cache" not in " ".join(reasons[name])
    others = [why for name, why in reasons.items() if name not in ("cuda", "triton")]
    assert any("its kernels read pages of query's dtype" in " ".join(why) for why in others)


@pytest.mark.parametrize("scales", stored.SCALE_KINDS)
@pytest.mark.parametrize("dtype", CACHES)
def test_the_verifier_stores_what_it_then_means(dtype: str, scales: str) -> None:
    case = Case(batch=2, heads_kv=2, seq_k=12, page=4, lengths=(11, 6), alignment="bottom_right", cache=dtype)
    case = case.replace(scales=scales, data_seed=5)
    made = data.operands(case)
    for role in ("key", "value"):
        of_rows = np.repeat(made[f"{role}_scale"], 4, 2)[..., None]
        elements = stored.elements(made[role] / of_rows, dtype)
        np.testing.assert_array_equal(elements.astype(np.float64) * of_rows, made[role])
        assert len(np.unique(made[f"{role}_scale"])) == {"tensor": 1, "head": 2, "page": 3, "page-head": 6}[scales]
        assert len(np.unique(elements.astype(np.float64))) > 20
    for outcome in examine(case, ("tiled", "reference"), "cpu"):
        assert outcome.verdict == "verified", outcome
