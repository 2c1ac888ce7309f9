"""Keys in parts, merged, and caches whose values lie within the keys: two forms of a call that verify draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch import InvalidProblem, arrays
from attnswitch.verify import Case, MaskRecipe, check
from attnswitch.verify.drawing.case import DENSE_WORK
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.drawing.parts import ranges
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.launch import parts
from attnswitch.verify.launch.call import place_operands
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.reduce import reduced

PARTS = Case(batch=2, group=2, seq_q=20, seq_k=70, dim_qk=16, dim_v=24, lse=True, grads="qkv", parts=3, data_seed=4)
LATENT = Case(
    batch=2,
    group=4,
    seq_q=3,
    seq_k=48,
    dim_qk=40,
    dim_v=24,
    lengths=(48, 7),
    page=16,
    alignment="bottom_right",
    latent=True,
)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "alignment": "bottom_right", "seq_q": 4},  # the last chunk of a prompt
        {"window": (9, None), "alignment": "bottom_right"},
        {"lengths": (70, 11), "sinks": "normal", "softcap": 5.0},
        {"mask": MaskRecipe("bool", "hk", 3), "causal": True, "dtype": "bfloat16"},
        {"mask": MaskRecipe("float16", "bqk", 4, "dead-rows"), "window": (5, 5), "layout": "BLHD"},
        {"mask": MaskRecipe("float32", "q", 4, "smooth"), "dtype": "float16", "scale": -1.0},
    ],
    ids=str,
)
def test_parts_merge_to_the_whole(changes: dict[str, Any], library: str, backend: str) -> None:
    found = check(PARTS.replace(library=library, **changes), backend)
    assert (found.verdict, found.failure) == ("verified", None)
    assert {"out", "lse", "grad query", "grad key", "grad value"} <= found.ratios.keys()


def test_the_parts_are_all_keys_once() -> None:
    for seed in range(40):
        case = PARTS.replace(data_seed=seed, parts=2 + seed % 3)
        assert np.concatenate([np.arange(70)[keys] for keys in ranges(case)]).tolist() == list(range(70))
        assert len(ranges(case)) == case.parts
    assert len({str(ranges(PARTS.replace(data_seed=seed))) for seed in range(40)}) > 30


def _mean(outs: Any, lses: Any, layout: str = "BHLD") -> Any:
    return sum(outs) / len(outs), sum(lses) / len(lses)


def _of_its_own(grad_out: Any, *operands: Any, out: Any, lse: Any, **call: Any) -> Any:
    return attnswitch.attention_backward(grad_out, *operands, **call)


@pytest.mark.parametrize(
    ("name", "wrong", "result"), [("merge", _mean, "out"), ("attention_backward", _of_its_own, "grad query")]
)
def test_what_does_not_add_up_is_found(
    name: str, wrong: Callable[..., Any], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = {key: getattr(attnswitch, key) for key in ("attention", "merge", "attention_backward", "plan")}
    monkeypatch.setattr(
        parts,
        "attnswitch",
        type("Wrong", (), {**{k: staticmethod(v) for k, v in public.items()}, name: staticmethod(wrong)}),
    )
    found = check(PARTS, "tiled")
    assert found.failure is not None
    assert (found.failure.check, found.failure.result) == ("reference", result)


def _flushed(query: Any, key: Any, value: Any, *, sinks: Any = None, **call: Any) -> Any:
    """As GPUs do it: a weight beside that of the sink is 0 where it is below all normal numbers."""
    out, lse = attnswitch.attention(query, key, value, sinks=sinks, **call)
    _, alone = attnswitch.attention(query, key, value, **call)
    return out.where((alone - lse > -126 * np.log(2))[..., None], 0.0), lse


def test_weights_below_all_normal_numbers_may_be_lost_beside_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of the part with the sink, whose own weights are not small (a case of cuda's on an H200)."""
    case = PARTS.replace(heads_kv=3, seq_q=33, seq_k=112, dim_qk=1, dim_v=1, dtype="float32", grads="", parts=4)
    case = case.replace(sinks="wide", data="negative", data_seed=15, library="torch")
    public = {key: staticmethod(getattr(attnswitch, key)) for key in ("merge", "attention_backward", "plan")}
    monkeypatch.setattr(parts, "attnswitch", type("Flushing", (), {**public, "attention": staticmethod(_flushed)}))
    found = check(case, "tiled")
    assert (found.verdict, found.failure) == ("verified", None)


def test_parts_of_a_case_that_is_not_answered_whole_are_refused() -> None:
    large = PARTS.replace(batch=1, group=1, heads_kv=8, seq_q=300, seq_k=300, dim_qk=64, dim_v=64, grads="")
    assert large.work > DENSE_WORK
    with pytest.raises(InvalidProblem, match=r"case\.parts: expected a case of at most"):
        Case.from_json(large.to_json())


def test_one_part_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ranges", lambda case: ranges(case)[:-1])
    found = check(PARTS.replace(grads=""), "tiled")
    assert found.failure is not None
    assert found.failure.result == "out"


# -- values within the keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"check": "batch", "query_lengths": (3, 1)},
        {"check": "variants", "dtype": "bfloat16"},
        {"check": "pages", "dim_v": 40},
        {"cache": "int8", "scales": "page-head", "heads_kv": 2},
        {"poison": True},
        {"tree": "ancestors", "check": "batch"},
    ],
    ids=str,
)
def test_values_lie_within_the_keys(changes: dict[str, Any], library: str) -> None:
    case = LATENT.replace(library=library, **changes)
    found = check(case, "tiled")
    assert (found.verdict, found.failure) == ("verified", None)
    placed = place_operands(case, operands(case), "cpu")
    key, value = placed.key, placed.value
    assert arrays.address(key) == arrays.address(value)
    assert tuple(value.shape) == (*key.shape[:3], case.dim_v)


@pytest.mark.parametrize("changes", [{"page": 0, "alignment": "top_left"}, {"dim_v": 41}])
def test_a_case_that_cannot_have_them_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem, match=r"case\.latent: expected pages"):
        Case.from_json(LATENT.replace(**changes).to_json())


@pytest.mark.parametrize("changes", [{"parts": 65}, {"parts": -1}, {"lse": False}, {"alibi": "geometric"}])
def test_parts_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem, match=r"case\.parts"):
        Case.from_json(PARTS.replace(**changes).to_json())


# -- drawn, saved and made smaller -------------------------------------------------------------------------------------


def test_free_draws_have_both() -> None:
    found = draw(Space(), 3, 1500)
    latent, merged = ([case for case in found if getattr(case, name)] for name in ("latent", "parts"))
    assert len(latent) > 10
    assert len(merged) > 30
    assert any(case.grads for case in merged)
    for case in latent + merged:
        assert Case.from_json(case.to_json()) == case


def test_a_failure_of_either_keeps_it_and_no_more() -> None:
    small = reduced(PARTS.replace(causal=True, softcap=5.0), lambda case: case.parts > 0, 500)
    assert (small.parts > 0, small.causal, small.softcap, small.grads, small.lse) == (True, False, 0.0, "", True)
    small = reduced(LATENT.replace(causal=True, window=(3, 3)), lambda case: case.latent, 500)
    assert (small.latent, small.causal, small.window, small.dim_v <= small.dim_qk) == (True, False, None, True)
