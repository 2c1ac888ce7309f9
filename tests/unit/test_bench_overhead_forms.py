"""``attnswitch bench overhead --section forms``: pages, varlen, sinks and slopes, as a program calls them again."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem
from attnswitch.bench.overhead import clock, costs, forms
from attnswitch.bench.overhead.clock import Effort
from attnswitch.bench.overhead.forms import FIRST, FormFeed, form_ways, torch_call
from attnswitch.bench.overhead.rows import Row, ad_hoc, rows
from attnswitch.bench.peers import PEERS
from attnswitch.call import alike, finite, paged
from attnswitch.call import forms as way_of_any
from attnswitch.problem import Problem

SHORT = Effort(calls=2, uncounted=1, warm=1, rounds=2)
PAGED = "b2.h4/2.s1x32.d8.fp32.causal-br.lengths.page=16"
TEXTS = (
    PAGED,
    "b2.h4/1.s1x32.d24/16.fp32.causal-br.lengths.page=16",
    "b2.h4/2.s3x32.d8.fp32.causal-br.lengths.page=16.varlen",
    "b2.h4.s6.d8.fp32.causal.varlen",
    "b2.h4.s6.d8.fp32.causal.sinks",
    "b2.h4.s6.d8.fp32.causal.alibi",
)


STEPS = "b2.h4.s6.d8.fp32.causal.varlen.grad", "b2.h4/2.s6.d8.fp32.causal.sinks.grad=qv"


def formed(text: str) -> Row:
    return ad_hoc(text, new="tensors", step=".grad" in text)


@pytest.mark.parametrize("text", [*TEXTS, *STEPS])
def test_all_that_is_called_computes_the_same(text: str) -> None:
    feed = FormFeed(formed(text), "cpu")
    made = form_ways(feed)
    assert {"tiled", "reference", "auto"} <= made.keys()
    outs = {name: way.of(feed.take(1)[0])() for name, way in made.items()}
    for out in outs.values():
        torch.testing.assert_close(out, outs["reference"])


def test_steps_are_known_again(
    register: Callable[[str, str], None], nothing_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tensors that want gradients lie as those before."""
    monkeypatch.setattr(alike, "knows_again", lambda query: query.is_cpu)
    register("own", "test_alike:Own")
    for text in STEPS:
        feed = FormFeed(formed(text), "cpu")
        made = form_ways(feed, ["own"])
        grads = [made["own"].of(work)() for work in feed.take(3)]
        assert all(len(each) == len(feed.first.leaves) for each in grads)
        with finite.checking("never"), monkeypatch.context() as patch:
            for each in feed.take(2):
                made["own"].of(each)()
            patch.setattr(way_of_any, "called", None)
            for grad, again in zip(grads[0], made["own"].of(feed.take(1)[0])(), strict=True):
                torch.testing.assert_close(grad, again)


@pytest.mark.parametrize("text", TEXTS)
def test_tensors_are_new_and_lie_as_before(text: str) -> None:
    """But for caches and parameters, which a program leaves where they are."""
    feed = FormFeed(formed(text), "cpu")
    one, two = feed.take(2)
    stay = {"key", "value"} if feed.first.block_table is not None else set()
    for name in ("query", "key", "value", "key_lengths", "block_table", "sinks", "alibi_slopes"):
        tensors = [getattr(work, name) for work in (feed.first, one, two)]
        if tensors[0] is None:
            assert tensors == [None] * 3
            continue
        places = {tensor.data_ptr() for tensor in tensors}
        assert len(places) == (1 if name in stay | {"sinks", "alibi_slopes"} else 3)
        assert len({(tensor.shape, tensor.stride()) for tensor in tensors}) == 1
        assert torch.equal(tensors[0], tensors[1])
    if one.offsets is not None and feed.first.offsets is not None:
        assert one.offsets[0].data_ptr() != feed.first.offsets[0].data_ptr()
        assert (one.offsets[0] is one.offsets[1]) is (feed.first.offsets[0] is feed.first.offsets[1])


def test_values_within_keys_stay_there() -> None:
    one = FormFeed(formed("b1.h4/1.s5.d576/512.fp32.varlen"), "cpu").take(1)[0]
    assert one.value.data_ptr() == one.key.data_ptr()


@pytest.mark.parametrize(
    ("text", "why"), [(PAGED, "pages"), (TEXTS[3], "runs on GPUs"), (TEXTS[4], "sinks"), (TEXTS[5], "alibi")]
)
def test_where_torch_has_no_call_it_is_said_why(text: str, why: str) -> None:
    call, reason = torch_call(FormFeed(formed(text), "cpu").first)
    assert call is None
    assert why in reason
    for cost in costs.costs(formed(text), "cpu", ["tiled"], SHORT):
        assert (cost.unmatched, cost.beside, cost.over) == (reason, None, None)


def test_a_backend_that_was_named_and_refuses_says_why() -> None:
    with pytest.raises(attnswitch.Unsupported, match="sinks: its kernels know of none"):
        list(costs.costs(formed("b2.h8.s64.d64.fp32.causal.sinks"), "cpu", ["sdpa-math"], SHORT))


def test_beside_torch_s_own_call_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(work: Any) -> Callable[[], Any]:
        return lambda: attnswitch.attention_varlen(work.query, work.key, work.value, **work.keywords())

    monkeypatch.setitem(PEERS, "torch", varlen_attn)
    monkeypatch.setattr(forms, "torch_call", lambda work: (varlen_attn(work), ""))
    monkeypatch.setattr(costs, "torch_call", lambda work: (varlen_attn(work), ""))
    made = {cost.call: cost for cost in costs.costs(formed(TEXTS[3]), "cpu", ["tiled"], SHORT)}
    assert {name: cost.beside for name, cost in made.items()} == {"torch": None, "tiled": "torch", "auto": "torch"}
    assert made["auto"].ratio is not None
    assert {cost.unmatched for cost in made.values()} == {None}


def test_a_first_call_is_asked_and_others_are_known_again(
    register: Callable[[str, str], None], nothing_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose tensors nobody reads. The first ones leave known what was known before them."""
    monkeypatch.setattr(alike, "knows_again", lambda query: query.is_cpu)
    register("own", "test_alike:Own")
    asked: list[object] = []
    ask = paged._ask

    def noted(*given: Any) -> Any:
        asked.append(given)
        return ask(*given)

    monkeypatch.setattr(paged, "_ask", noted)
    with finite.checking("never"):
        feed = FormFeed(formed(PAGED), "cpu")
        made = form_ways(feed, ["own"])
        assert list(made) == ["own", "own" + FIRST, "auto", "auto" + FIRST]
        again, first = ([made[name].of(work) for work in feed.take(6)] for name in ("own", "own" + FIRST))
        counts = []
        for calls, way in ((again, "own"), (first, "own" + FIRST), (again, "own")):
            before = len(asked)
            with made[way].within():
                for call in calls:
                    call()
            counts.append(len(asked) - before)
    assert counts == [2, 6, 0]


def test_the_rows_are_of_every_form() -> None:
    for device, dtype in (("cuda:0", "bfloat16"), ("cpu", "float32")):
        made = [row.problem for row in rows(device, ["forms"])]
        assert {p.dtype for p in made} == {dtype}
        assert [(p.page > 0, p.varlen, p.sinks, p.alibi, p.dim_qk) for p in made] == [
            (True, False, False, False, 128),
            (True, False, False, False, 576),
            (True, True, False, False, 128),
            (False, True, False, False, 128),
            (False, False, True, False, 64),
            (False, False, False, True, 64),
            (False, True, False, False, 128),
            (False, False, True, False, 64),
            (False, False, False, True, 64),
        ]
        assert [bool(p.grads) for p in made] == [False] * 6 + [True] * 3


@pytest.mark.parametrize("row", rows("cpu", ["forms"], quick=True), ids=lambda row: str(row.problem))
def test_each_row_of_a_quick_run_can_be_called(row: Row) -> None:
    feed = FormFeed(row, "cpu")
    assert clock.one_call(form_ways(feed, ["tiled"]), feed, "cpu") > 0


@pytest.mark.parametrize("options", [{"new": "nothing"}, {"new": "length"}])
@pytest.mark.parametrize("text", TEXTS[2:])
def test_forms_have_new_tensors(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem, match="are timed with new tensors"):
        ad_hoc(text, **options)


@pytest.mark.parametrize(
    ("part", "options", "why"),
    [
        (".grad", {}, "without gradients"),
        ("", {"step": True}, "a step with them"),
        ("", {"keys": "slice"}, "whole keys"),
        (".lse.grad", {"step": True}, "of the output alone"),
    ],
)
def test_what_is_not_timed_is_refused(part: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidProblem, match=why):
        Row("forms", Problem.parse(TEXTS[3] + part), new="tensors", **options)


def test_the_command_says_what_torch_has_no_call_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    said = ("--problem", PAGED, "--new", "tensors", "--backend", "tiled", "--device", "cpu", "--quick")
    for more in ((), ("--json", "-")):
        monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "overhead", *said, *more])
        with contextlib.suppress(SystemExit):
            main()
        printed = capsys.readouterr().out
        if more:
            made = json.loads(printed)["costs"]
            assert [(cost["call"], cost["section"], cost["new"]) for cost in made] == [
                ("tiled", "forms", "tensors"),
                ("auto", "forms", "tensors"),
            ]
            assert all("pages" in cost["unmatched"] for cost in made)
        else:
            assert f"{PAGED}, new tensors in each call" in printed
            assert "not beside torch: scaled_dot_product_attention is not called here with a cache in pages" in printed
