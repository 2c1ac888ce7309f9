"""``attnswitch bench overhead``: what is called, beside what, and what is written down of it."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import attnswitch
from attnswitch import InvalidProblem
from attnswitch.bench.overhead import clock, costs
from attnswitch.bench.overhead.clock import QUICK, Effort
from attnswitch.bench.overhead.costs import Cost
from attnswitch.bench.overhead.operands import Feed, Operands
from attnswitch.bench.overhead.rows import SECTIONS, ad_hoc, rows
from attnswitch.bench.overhead.ways import Way, ways

PLAIN = ad_hoc("b1.h1.s8.d64.fp32")
SHORT = Effort(calls=2, uncounted=1, warm=1, rounds=2)


def named(made: Any) -> dict[str, Cost]:
    return {cost.call: cost for cost in made}


# -- what is called ----------------------------------------------------------------------------------------------------


def test_each_backend_is_set_against_torchs_own_call() -> None:
    made = list(costs.costs(PLAIN, "cpu", effort=SHORT))
    besides = {cost.call: cost.beside for cost in made}
    assert besides == {
        "torch": None,
        "torch, sdpa-flash": None,
        "sdpa-flash": "torch, sdpa-flash",
        "torch, sdpa-math": None,
        "sdpa-math": "torch, sdpa-math",
        "auto": "torch, sdpa-flash",
        "plan": "torch, sdpa-flash",
    }
    for cost in made:
        assert 0 < cost.us_low <= cost.us <= cost.us_high
        assert cost.problem == str(PLAIN.problem)
        assert (cost.over is None) is (cost.ratio is None) is (cost.beside is None)


def test_a_backend_that_torch_has_no_kernel_of_is_set_against_its_choice() -> None:
    row = ad_hoc("b1.h1.s8.d64.fp32.mask=fp32.grad=qkvm", step=True)
    made = ways(row, Feed(row, "cpu"), ["sdpa-math", "tiled"])
    assert "torch, sdpa-math" in made
    assert "torch, tiled" not in made
    assert made["tiled"].beside == "torch"


def test_torchs_own_call_is_left_out_where_the_kernel_does_not_take_it() -> None:
    row = ad_hoc("b1.h1.s8.d64.fp32.dropout=0.5")
    made = ways(row, Feed(row, "cpu"), ["sdpa-flash", "sdpa-math"])
    assert "torch, sdpa-flash" not in made
    assert made["sdpa-flash"].beside == "torch"


def test_the_named_backends_alone() -> None:
    found = [cost.call for cost in costs.costs(PLAIN, "cpu", ["sdpa-math"], SHORT)]
    assert found == ["torch", "torch, sdpa-math", "sdpa-math", "auto", "plan"]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("b1.h1.s8.d64.fp32", {}),
        ("b2.h4/2.s8.d16.fp32.causal.scale=0.5.grad", {}),
        ("b1.h1.s1x16.d8.fp32.causal-br", {}),
        ("b1.h2.s1x16.d8.fp32.mask=bool:k", {"keys": "slice"}),
        ("b1.h2.s4x16.d8.fp32.mask=fp32", {"new": "mask"}),
        ("b1.h2.s8.d8.fp32.mask=fp32.grad=qkvm", {"step": True}),
        ("b1.h2.s8.d8.fp32.causal.grad", {"step": True}),
    ],
)
def test_all_that_is_called_computes_the_same(text: str, options: dict[str, Any]) -> None:
    row = ad_hoc(text, **options)
    feed = Feed(row, "cpu")
    outs = {}
    for name, way in ways(row, feed).items():
        with way.within():
            outs[name] = way.of(feed.take(1)[0])()
    assert {"torch", "auto", "plan"} < outs.keys()
    for out in outs.values():
        torch.testing.assert_close(out, outs["torch"])
        if row.step:
            assert len(out) == len(row.problem.grads)
        else:
            assert out.requires_grad is bool(row.problem.grads)


def test_a_training_step_has_the_gradients_of_the_upstream_given() -> None:
    row = ad_hoc("b1.h2.s8.d8.fp32.mask=fp32.grad=qkvm", step=True)
    feed = Feed(row, "cpu")
    query, key, value, mask = feed.first
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out.backward(feed.grad_out)  # type: ignore[no-untyped-call]
    made = ways(row, feed)["auto"].of(feed.first)()
    for leaf, gradient in zip((query, key, value, mask), made, strict=True):
        assert leaf is not None
        torch.testing.assert_close(gradient, leaf.grad)


def test_torch_is_held_to_the_kernel() -> None:
    feed = Feed(PLAIN, "cpu")
    with ways(PLAIN, feed, ["sdpa-math"])["torch, sdpa-math"].within():
        assert torch._fused_sdp_choice(*feed.first[:3]) == SDPBackend.MATH.value


@pytest.mark.parametrize("part", ["lse", "softcap=3.0", "lengths", "window=3,0", "mask=bool.causal"])
def test_what_torch_cannot_say_is_refused(part: str) -> None:
    with pytest.raises(InvalidProblem, match="torch's own call"):
        ad_hoc(f"{PLAIN.problem}.{part}")


@pytest.mark.parametrize(
    ("part", "options"),
    [("", {"step": True}), (".grad", {"new": "length"}), ("", {"new": "mask"})],
    ids=["a step without gradients", "new keys and gradients", "a new mask of none"],
)
def test_what_cannot_be_timed_is_refused(part: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem, match=r"gradients|no mask"):
        ad_hoc(f"{PLAIN.problem}{part}", **options)


# -- the operands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["", ".mask=bool:k"])
def test_no_number_of_keys_comes_twice(mask: str) -> None:
    row = ad_hoc(f"b1.h2.s1x30.d8.fp32{mask}", "slice", "length")
    feed = Feed(row, "cpu", 2 * 3 * 4)
    assert feed.first.key.shape[2] == 30
    taken = [[feed.take(4, way, 3) for way in range(3)] for _ in range(2)]
    lengths = Counter(one.key.shape[2] for turn in taken for calls in turn for one in calls)
    assert lengths == Counter(range(31, 31 + 24))
    first, last = ([one.key.shape[2] for one in taken[0][way]] for way in (0, 2))
    assert statistics.mean(last) - statistics.mean(first) == 2  # each way has about as many keys
    for one in taken[1][2]:
        assert one.value.shape[2] == one.key.shape[2] < one.key.stride(1) // 8
        assert (one.attn_mask is None) is (not mask)
        if one.attn_mask is not None:
            assert one.attn_mask.shape == (1, 1, 1, one.key.shape[2])


def test_a_new_mask_is_another_tensor_with_the_same_values() -> None:
    feed = Feed(ad_hoc("b1.h1.s8.d8.fp32.mask=bool", new="mask"), "cpu")
    one, two = (each.attn_mask for each in feed.take(2))
    assert one is not None
    assert two is not None
    assert one.data_ptr() != two.data_ptr()
    assert torch.equal(one, two)


def test_a_mask_of_keys_hides_padding() -> None:
    mask = Feed(ad_hoc("b1.h1.s1x20.d8.fp32.mask=bool:k"), "cpu").first.attn_mask
    assert mask is not None
    assert mask.shape == (1, 1, 1, 20)
    assert mask.flatten().tolist() == [True] * 18 + [False] * 2


@pytest.mark.parametrize(("keys", "whole"), [("whole", True), ("slice", False)])
def test_keys_are_whole_or_of_a_cache(keys: Any, whole: bool) -> None:
    _, key, value, _ = Feed(ad_hoc("b1.h2.s1x20.d8.fp32.grad", keys), "cpu").first
    for tensor in (key, value):
        assert tensor.shape == (1, 2, 20, 8)
        assert tensor.is_contiguous() is whole
        assert tensor.requires_grad


def test_a_step_through_a_cache_has_gradients_of_the_whole_cache() -> None:
    row = ad_hoc("b1.h2.s4.d8.fp32.grad", "slice", step=True)
    feed = Feed(row, "cpu")
    assert [tuple(leaf.shape) for leaf in feed.leaves] == [(1, 2, 4, 8), (1, 2, 8, 8), (1, 2, 8, 8)]
    assert ways(row, feed)["auto"].of(feed.take(1)[0])()[1][:, :, 4:].abs().max() == 0


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_a_host_that_changes_its_speed_changes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a fast host, then of a slow one: the medians themselves are of different rounds."""
    rounds = dict.fromkeys(ways(PLAIN, Feed(PLAIN, "cpu"), ["sdpa-math"]), [1.0] * 5)
    rounds |= {"torch, sdpa-math": [10.0, 10.0, 50.0, 50.0, 50.0], "sdpa-math": [14.0, 12.0, 53.0, 51.0, 52.0]}
    monkeypatch.setattr(clock, "turns", lambda *_, **__: rounds)
    made = named(costs.costs(PLAIN, "cpu", ["sdpa-math"]))
    assert (made["sdpa-math"].over, made["sdpa-math"].ratio) == (2.0, 1.06)
    assert made["sdpa-math"].us == 51.0


def test_percentiles_lie_within_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "turns", lambda *_, **__: {"torch": [10.0, 100.0]})
    (cost,) = costs.costs(PLAIN, "cpu")
    assert (cost.us_low, cost.us, cost.us_high, cost.batches) == (28.0, 55.0, 82.0, 2)


@pytest.mark.parametrize("done", [False, True])
def test_batches_take_turns_and_are_waited_for(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))

    def way(name: str) -> Way:
        return Way(lambda _: lambda: seen.append(name))

    effort = Effort(calls=3, uncounted=2, warm=2, rounds=3, seconds=1e9)
    times = clock.turns({"a": way("a"), "b": way("b")}, Feed(PLAIN, "cpu"), "cuda:0", effort, done=done)
    a, b = ([name] * 2 + ["wait"] + [name] * 3 + ["wait"] * done for name in "ab")
    rounds = [seen[at : at + len(a + b)] for at in range(0, len(seen), len(a + b))]
    assert len(rounds) == effort.warm + effort.rounds
    assert all(each in (a + b, b + a) for each in rounds)
    assert a + b in rounds
    assert b + a in rounds
    assert times == {"a": [1e6 / 3] * 3, "b": [1e6 / 3] * 3}


def test_rounds_end_with_the_time_given() -> None:
    def slow(_: Operands) -> Callable[[], None]:
        return lambda: time.sleep(0.002)

    effort = Effort(calls=1, uncounted=0, warm=3, rounds=1000, seconds=0.001)
    assert len(clock.turns({"a": Way(slow)}, Feed(PLAIN, "cpu"), "cpu", effort, done=False)["a"]) == clock.LEAST


def test_batches_of_long_calls_are_short() -> None:
    effort = Effort()
    assert clock.paced(effort, 1e-6, new_lengths=False) == effort
    assert clock.paced(effort, 1.0, new_lengths=False) == replace(effort, calls=1, uncounted=0)
    fewer = clock.paced(effort, 1e-6, new_lengths=True)
    assert fewer.calls < effort.calls
    assert fewer.rounds < effort.rounds


def test_the_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with clock.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# -- the rows and the command ------------------------------------------------------------------------------------------


def test_the_rows_show_every_figure() -> None:
    made = rows("cuda:0")
    assert {row.problem.dtype for row in made} == {"bfloat16"}
    assert {row.section for row in made} == set(SECTIONS)
    decoding = [row for row in made if row.section == "repeated" and row.problem.seq_q == 1]
    assert {(row.problem.seq_k, row.keys, row.problem.mask is None) for row in decoding} == {
        (length, keys, plain) for length in (300, 2000) for keys in ("whole", "slice") for plain in (True, False)
    }
    assert {(row.new, row.keys) for row in made if row.section == "lengths"} == {("length", "slice")}
    masks = [row for row in made if row.section == "masks"]
    assert {(row.problem.seq_q, row.problem.mask and row.problem.mask.dtype, row.new) for row in masks} == {
        (length, dtype, new) for length in (77, 512) for dtype in ("bool", "bfloat16") for new in ("nothing", "mask")
    }
    training = [row for row in made if row.section == "training"]
    assert all(row.step and row.problem.grads for row in training)
    assert {(row.problem.seq_q, row.problem.dim_qk) for row in training} == {(8, 64), (512, 80)}
    assert {row.problem.grads for row in training} == {"qkv", "qkvm"}


def test_each_row_of_a_quick_run_can_be_called() -> None:
    for row in rows("cpu", [section for section in SECTIONS if section != "forms"], quick=True):
        made = ways(row, Feed(row, "cpu"))
        assert {"torch", "auto"} < made.keys()
        assert ("plan" in made) is (row.new != "length")


def test_a_row_with_new_lengths_has_keys_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ad_hoc("b1.h1.s1x4.d8.fp32", "slice", "length")
    seen: list[int] = []
    attend = attnswitch.attention

    def noted(query: Any, key: Any, value: Any, **keywords: Any) -> Any:
        seen.append(key.shape[2])
        return attend(query, key, value, **keywords)

    monkeypatch.setattr(attnswitch, "attention", noted)
    made = named(costs.costs(row, "cpu", ["sdpa-math"], replace(QUICK, rounds=3, seconds=1e9)))
    assert made["auto"].batches == 3
    lengths = Counter(length for length in seen if length > 4)
    assert len(lengths) > 4 * 2 * 2
    assert set(lengths.values()) == {1}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "overhead", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "overhead.json"
    asked = ("--device", "cpu", "--quick", "--section", "repeated", "--backend", "sdpa-flash", "--json", str(path))
    assert command(monkeypatch, *asked) == 0
    printed = capsys.readouterr().out
    read = json.loads(path.read_text())
    made = read["costs"]
    assert list(dict.fromkeys((row["problem"], row["keys"]) for row in made)) == [
        (str(row.problem), row.keys) for row in rows("cpu", ["repeated"])
    ]
    assert (read["schema"], read["device"], read["protocol"]["threads"]) == (2, "cpu", 1)
    assert "torch" in read["environment"]
    assert read["command"].endswith("--json overhead.json")
    for row in made:
        assert row["problem"] in printed
        assert row["call"] in printed
        assert row["us"] == round(row["us"], 2)
        assert row["batches"] >= clock.LEAST


def test_the_command_writes_json_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--problem", "b1.h1.s4.d8.fp32", "--backend", "sdpa-flash", "--device", "cpu", "--rounds", "3")
    assert command(monkeypatch, *asked, "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    assert [row["call"] for row in read["costs"]] == ["torch", "torch, sdpa-flash", "sdpa-flash", "auto", "plan"]
    assert {row["batches"] for row in read["costs"]} == {3}
    assert statistics.median(row["us"] for row in read["costs"]) > 0


def test_the_command_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "--device", "cpu", "--backend", "fastest") == 2
    assert command(monkeypatch, "--device", "cpu", "--problem", "b1.h1.s4.d8.fp32.softcap=2.0") == 2
    assert command(monkeypatch, "--device", "cpu", "--section", "slow") == 2
    assert command(monkeypatch, "--device", "cpu", "--section", "masks", "--problem", "b1.h1.s4.d8.fp32") == 2
    assert command(monkeypatch, "--device", "cpu", "--section", "masks", "--keys", "slice") == 2


def test_a_file_that_cannot_be_written_is_found_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "costs", lambda *_: pytest.fail("it ran"))
    assert command(monkeypatch, "--device", "cpu", "--json", "/dev/null/x") == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is launched there."""
    feed = Feed(PLAIN, "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert set(costs.kernels(ways(PLAIN, feed, ["sdpa-math"]), feed).values()) == {0.0}
