"""What a problem takes over ranks: the clock and the bytes by hand, and the command."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Device, Problem
from attnswitch.bench import links, pace, ranks
from attnswitch.bench.estimate import Peak, published
from attnswitch.bench.links import Link
from attnswitch.bench.pace import Pace
from attnswitch.bench.ranks import Planned, Ranks
from attnswitch.bench.rings import elapsed
from attnswitch.bench.splits import Split
from attnswitch.bench.timed import timed
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.parallel.dealing import Order
from attnswitch.parallel.heads import key_heads
from attnswitch.problem import cost

H100 = Device.named("h100")
TRAINING = Problem.parse("b1.h4/2.s1024.d64.bf16.causal.grad")
HELD = Path(__file__).parents[2] / "fixtures/results/h200/estimate-ranks.json"
#: So fast that summing takes no time, and a link of which a byte takes a nanosecond.
MEMORY, LINK = 1e18, Link(1.0, 0.0, "here")


def by_pairs(each: float = 1e-6) -> Any:
    """A pace of so many milliseconds for each visible pair of a head, twice as many in the backward."""

    def timed(call: Problem) -> Pace:
        ms = each * cost.rows(call) * call.seq_k * cost.visible(call)
        return Pace(ms, 2 * ms if call.grads else 0.0, ("made-up",), "measured", "by pairs")

    return timed


def planned(problem: Problem, count: int, link: Link = LINK, each: float = 1e-6, order: Order | None = None) -> Ranks:
    return ranks.estimate(problem, H100, count, link, by_pairs(each), MEMORY, order=order)


def split(found: Ranks, name: str) -> Planned:
    return next(split for split in found.splits if split.name == name)


def test_a_ring_by_hand() -> None:
    """Four ranks of 256 rows, in two parts of 128: causal within, then 256 x 128 pairs at each of three steps."""
    ring = split(planned(TRAINING, 4), "ring")
    assert ring.forward is not None
    assert ring.backward is not None
    own, other = 4 * 256 * 257 / 2 * 1e-6, 4 * 256 * 128 * 1e-6
    message = 2 * 256 * (64 + 64) * 2  # two key heads, two bytes
    keys, sums = message / 1e6, 2 * message / 1e6
    assert ring.forward.step == message
    assert ring.forward.sent == 3 * message
    assert ring.forward.compute == pytest.approx(own + 3 * other)
    assert ring.forward.ms == pytest.approx(max(own, keys) + 2 * max(other, keys) + other)
    assert ring.forward.exposed == pytest.approx(ring.forward.ms - ring.forward.compute)
    assert ring.backward.step == 3 * message
    assert ring.backward.sent == 3 * message + 4 * 2 * message
    both = max(2 * own, keys) + 2 * max(2 * other, keys + sums) + max(2 * other, sums) + sums
    assert ring.backward.ms == pytest.approx(both)


def test_all_to_all_by_hand() -> None:
    """Two ranks with two query heads each, of one key head."""
    traded = split(planned(TRAINING, 2), "all-to-all")
    assert traded.forward is not None
    assert traded.backward is not None
    query, keys, out = 2 * 512 * 64 * 2, 512 * 128 * 2, 2 * 512 * 64 * 2
    assert traded.forward.exchange == traded.forward.sent == query + keys + out
    assert traded.forward.compute == pytest.approx(2 * 1024 * 1025 / 2 * 1e-6)
    assert traded.forward.ms == pytest.approx(traded.forward.compute + (query + keys + out) / 1e6)
    assert traded.backward.ms == pytest.approx(2 * traded.forward.compute + (query + keys + out) / 1e6)
    assert traded.backward.step == 0


def test_latency_is_of_every_message() -> None:
    late = replace(LINK, latency_us=500.0)
    slow = Link(1e9, 500.0, "here")
    none = Link(1e9, 0.0, "here")
    ring = [split(planned(TRAINING, 4, link, each=0.0), "ring") for link in (none, slow)]
    assert [round(found.forward.ms, 3) for found in ring if found.forward] == [0.0, 1.5]
    assert [round(found.backward.ms, 3) for found in ring if found.backward] == [0.0, 0.5 + 2 * 1.0 + 0.5 + 0.5]
    assert late.ms(1e6) == 1.5
    assert late.ms(0) == 0.0
    traded = split(planned(TRAINING, 4, slow, each=0.0), "all-to-all").forward
    assert traded is not None
    assert traded.ms == pytest.approx(1.0, abs=1e-3)


def test_a_ring_of_one_is_the_call_alone() -> None:
    found = planned(TRAINING, 1)
    (alone,) = found.splits
    assert alone.forward is not None
    assert alone.forward.ms == pytest.approx(4 * 1024 * 1025 / 2 * 1e-6)
    assert alone.forward.sent == 0
    assert found.covered is None


def test_a_rank_waits_for_what_comes_from_the_rank_before_it() -> None:
    assert elapsed([[1.0, 1.0], [1.0, 1.0]], lambda step: 0.0) == (2.0, 2.0)
    assert elapsed([[1.0, 1.0], [1.0, 1.0]], lambda step: 3.0 if step == 0 else 0.0, last=0.5) == (4.5, 2.0)
    uneven = [[5.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert elapsed(uneven, lambda step: 2.0 if step < 2 else 0.0) == (8.0, 3.0)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    "hiding", ["", ".causal", ".causal-br", ".window=9,4", ".causal.window=30,0", ".causal.mask=bool"]
)
@pytest.mark.parametrize("sizes", ["s64", "s70x97"])
def test_the_calls_of_all_ranks_are_the_whole(sizes: str, hiding: str, order: Order) -> None:
    problem = Problem.parse(f"b2.h4.{sizes}.d8.fp32{hiding}")
    for over in (1, 2):
        dealt = Split(problem, 8, over, order)
        calls = [call for r in range(dealt.ring) for owner in range(dealt.ring) for call in dealt.calls(r, owner)]
        pairs = sum(round(cost.rows(call) * call.seq_k * cost.visible(call)) for call in calls)
        assert pairs * over == round(cost.rows(problem) * problem.seq_k * cost.visible(problem))


def test_zigzag_is_even_where_contiguous_is_not() -> None:
    for order, even in (("zigzag", True), ("contiguous", False)):
        dealt = Split(TRAINING, 4, 1, order)  # type: ignore[arg-type]
        work = [sum(pace.work(call) for owner in range(4) for call in dealt.calls(rank, owner)) for rank in range(4)]
        assert (max(work) == min(work)) is even
    zigzag, contiguous = (planned(TRAINING, 4, order=order) for order in ("zigzag", "contiguous"))
    assert split(zigzag, "ring").ms < split(contiguous, "ring").ms
    assert planned(TRAINING, 4).order == "zigzag"
    assert planned(TRAINING.replace(causal=False), 4).order == "zigzag"  # as context_parallel deals by itself


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (12, 2), (24, 4), (6, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_key_heads_are_those_of_the_query_heads_of_a_rank(heads: tuple[int, int], count: int) -> None:
    heads_q, heads_kv = heads
    if heads_q % count:
        return
    each, group = heads_q // count, heads_q // heads_kv
    brought = [key_heads(heads_q, heads_kv, count, rank) for rank in range(count)]
    (most,) = {len(keys) for keys in brought}  # so that all ranks have the same problem
    for rank, keys in enumerate(brought):
        owners = [head // group for head in range(rank * each, (rank + 1) * each)]
        assert [key for key in keys for _ in range(each // most)] == owners
    if each % group == 0 or group % each == 0:
        assert most == max(1, each // group)


def test_a_faster_link_never_takes_longer() -> None:
    found = [planned(TRAINING, 4, Link(gbps, 1.0, "here")) for gbps in (0.1, 1.0, 10.0, 100.0)]
    for name in ("ring", "2 all-to-all x 2 ring", "all-to-all"):
        times = [split(each, name).ms for each in found]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]
    assert found[0].best is not None
    assert found[0].best.ms == min(each.ms for each in found[0].splits)


def test_rows_that_cover_a_step_are_the_fewest() -> None:
    """A causal step of R rows computes 4 R^2 / 2 pairs, and its message has R * 2 * 128 * 2 bytes."""
    long = TRAINING.replace(seq_q=2**20, seq_k=2**20)
    found = planned(long, 4, each=2.1e-7)
    assert found.covered is not None
    forward, backward = found.covered
    exact = 2 * 128 * 2 / 1e6 / (4 / 2 * 2.1e-7)
    assert forward.rows == -(-exact // 128) * 128
    assert forward.ranks == 2**20 // forward.rows
    thrice = 3 * exact / 2  # three times the bytes, twice the time
    assert backward.rows == -(-thrice // 128) * 128
    never = planned(TRAINING, 4, each=1e-9).covered
    assert never is not None
    assert [covered.rows for covered in never] == [None, None]


def test_memory_by_hand() -> None:
    """Four ranks of 256 rows in a ring; bfloat16. A piece has all of them, or the later half."""
    ring = dict(split(planned(TRAINING, 4), "ring").memory)
    query, keys, lse = 4 * 256 * 64 * 2, 2 * 256 * 128 * 2, 4 * 256 * 4
    assert ring["forward"] == {
        "operands": query + keys,
        "results": 0,
        "gradients": 0,
        "gathered": 0,
        "messages": 2 * keys,
        "accumulators": 2 * query + lse,
        "parts": query + lse,
        "kernels": 0,
    }
    assert ring["backward"] == ring["forward"] | {
        "results": query + lse,
        "gradients": query,
        "messages": 2 * keys + 3 * 2 * keys,
        "accumulators": 2 * query,
        "parts": query // 2 + keys + 2 * (query // 2),
    }
    traded = dict(split(planned(TRAINING, 4), "all-to-all").memory)
    whole, none = query + 2 * keys, {"messages": 0, "accumulators": 0, "parts": 0, "kernels": 0}  # two share a key head
    assert traded["forward"] == none | {  # the output has arrived, and is put in order
        "operands": query + keys,
        "results": query + lse,
        "gradients": 0,
        "gathered": whole + query + lse + query,
    }
    assert traded["backward"] == none | {
        "operands": query + keys,
        "results": query + lse,
        "gradients": query,
        "gathered": 3 * whole,  # gradients, packed, and as they arrive
    }


def test_memory_is_what_two_gpus_held() -> None:
    """Of heads that share no keys; a rank's operands, and the output's gradient, were there before."""
    document = json.loads(HELD.read_text())
    h200, peak = Device.named("h200"), Peak(1e3, 1e3, "made up")
    seen = 0
    for row in document["rows"]:
        p = Problem.parse(row["problem"])
        if (p.group > 1 and row["what"] == "step") or (row["way"], row["what"]) == ("all-to-all", "forward"):
            continue  # by cuDNN then; and what arrived was held for longer then
        found = ranks.estimate(p, h200, 2, LINK, lambda call: pace.expected(call, h200, peak), MEMORY)
        phases = dict(split(found, row["way"]).memory)
        given = {"forward": phases["forward"]["operands"]}
        given["backward"] = given["forward"] + phases.get("backward", {"gradients": 0})["gradients"]
        kept = ("forward",) if row["what"] == "forward" else ("forward", "backward")
        said = max(sum(phases[name].values()) - given[name] for name in kept)
        assert 0.85 <= said / row["held"] <= 1.05, row
        seen += 1
    assert seen == 7


def test_more_ranks_hold_less_each() -> None:
    peaks = [split(planned(TRAINING, count), "ring").peak for count in (2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)
    whole = split(planned(TRAINING, 4), "ring")
    assert whole.peak == max(sum(items.values()) for _, items in whole.memory)


def test_what_does_not_fit_is_not_the_best() -> None:
    plain = planned(TRAINING, 4)
    assert plain.best is split(plain, "ring")
    tight = replace(H100, memory=plain.best.peak - 1)
    found = ranks.estimate(TRAINING, tight, 4, LINK, by_pairs(), MEMORY)
    assert found.best is not None
    assert found.best.peak <= tight.memory
    assert found.best.ms > min(each.ms for each in found.splits)


@pytest.mark.parametrize(
    ("problem", "count", "why"),
    [
        ("b1.h1.s64.d8.fp32", 0, "expected 1 to 256"),
        ("b1.h1.s9999999.d8.fp32", 1025, "expected 1 to 256"),
        ("b1.h1.s64x7.d8.fp32", 4, "at least two queries and two keys"),
        ("b0.h1.s64.d8.fp32", 4, "at least two queries"),
        ("b2.h1.s1x64.d8.fp16.lengths.page=16", 1, "at least two queries"),
        ("b2.h1.s16x64.d8.fp16.lengths.page=16", 2, "a paged cache is not dealt by rows"),
        ("b2.h1.s64.d8.fp16.varlen", 2, "depends on where they begin"),
        ("b2.h1.s64.d8.fp16.dropout=0.1", 2, "dropout mask is a function of the whole"),
        ("b2.h1.s64.d8.fp16.mask=fp16.grad=qkvm", 2, "attn_mask gets no gradient"),
    ],
)
def test_what_cannot_be_dealt_is_refused(problem: str, count: int, why: str) -> None:
    with pytest.raises((InvalidProblem, Unsupported), match=why):
        planned(Problem.parse(problem), count)


@pytest.mark.parametrize(
    ("problem", "refused", "why"),
    [
        ("b1.h6.s64.d8.fp32", {"all-to-all"}, "6 query heads are not dealt evenly over 4"),
        ("b1.h4.s64.d8.fp32.causal.alibi", {"ring", "2 all-to-all x 2 ring"}, "alibi_slopes in a ring"),
        ("b1.h4.s64x128.d8.fp32.causal-br.lengths", {"ring", "2 all-to-all x 2 ring"}, "bottom_right with key_lengths"),
        ("b1.h4.s64.d8.fp32.causal.lengths.sinks", set(), ""),
    ],
)
def test_splits_that_cannot_be_say_why(problem: str, refused: set[str], why: str) -> None:
    found = planned(Problem.parse(problem), 4)
    assert {each.name for each in found.splits if each.why_not} == refused & {each.name for each in found.splits}
    assert all(why in each.why_not for each in found.splits if each.why_not)
    assert all((each.forward is None) is bool(each.why_not) for each in found.splits)


def test_no_split_may_be_left() -> None:
    found = planned(Problem.parse("b1.h3.s64.d8.fp32.causal.alibi"), 2)
    assert found.best is None
    assert found.to_json()["best"] is None


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("450GB/s", 450.0),
        ("450GB", 450.0),
        ("50GiB/s", 50 * 2**30 / 1e9),
        ("400Gb/s", 50.0),
        ("0.5 TB/s", 500.0),
        ("800Mb", 0.1),
        ("1Kib/s", 128 / 1e9),
        ("400Gbps", 50.0),
        ("450GBps", 450.0),
        ("50 GiBps", 50 * 2**30 / 1e9),
        ("400 Gbit/s", 50.0),
        ("800Mbit", 0.1),
    ],
)
def test_a_link_as_it_is_written(text: str, gbps: float) -> None:
    assert links.link(text).gbps == pytest.approx(gbps)


@pytest.mark.parametrize(
    "text",
    [
        *("450", "GB/s", "-1GB/s", "0GB/s", "450 gigabytes", "1e9GB/s", "nanGB/s", "450GB/m", ""),
        *("400gbps", "400Gpbs", "400GB/ps", "450GB/s/s", "400GT/s", "100Gbyte/s"),
    ],
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblem, match=r"link .*expected a (finite )?rate"):
        links.link(text)


def test_latencies() -> None:
    assert links.link("1GB/s").latency_us == 0.0
    assert links.link("1GB/s", "10us").latency_us == pytest.approx(10.0)
    assert links.link("1GB/s", "0.5 ms").latency_us == pytest.approx(500.0)
    assert links.link("1GB/s", "250ns").latency_us == pytest.approx(0.25)
    for wrong in ("10", "-1us", "10 minutes", "9" * 400 + "s"):
        with pytest.raises(InvalidProblem, match="latency"):
            links.link("1GB/s", wrong)


def test_links_of_data_sheets() -> None:
    assert links.of_device(H100, 8).gbps == links.of_device(Device.named("h200"), 2).gbps == 450.0
    assert links.of_device(Device.named("a100"), 2, "3us") == Link(
        300.0, 3.0, "NVLink, by the data sheet of the A100; programs reach less"
    )
    with pytest.raises(Unsupported, match=r"NVLink joins 8 H100 on one board, not 9.*--link"):
        links.of_device(H100, 9)
    for without in (Device.named("rtx4090"), Device.cpu(), Device("cuda", "NVIDIA H100 PCIe", (9, 0))):
        with pytest.raises(Unsupported, match="say --link"):
            links.of_device(without, 2)


def peak(device: Device) -> Peak:
    found = published(device, "bfloat16")
    assert found is not None
    return found


def test_the_forecast_speaks_where_it_knows_the_device() -> None:
    long = Problem.parse("b1.h16.s16384.d128.bf16.causal.grad")
    known = pace.expected(long, H100, peak(H100))
    assert known.source == "forecast"
    assert known.backends
    assert 0.3 < 2.5 * known.forward / known.backward < 3
    a100 = Device.named("a100")
    other = pace.expected(long, a100, peak(a100))
    assert (other.source, other.basis, other.backends) == ("roofline", "data sheet of the A100", ())
    assert other.forward == pytest.approx(pace.work(long) / 312.0 / 1e9)
    assert other.backward == pytest.approx(2.5 * other.forward)
    least = pace.expected(long, replace(H100, capability=(8, 0)), peak(H100))
    assert known.forward > least.forward
    assert known.backward > least.backward


@pytest.mark.parametrize("hiding", ["", ".causal", ".window=1024,1024"])
def test_times_of_long_calls_grow_as_their_work_does(hiding: str) -> None:
    """Beyond what was measured a forecast tends to the mean of all calls: at a million tokens 0.7 of the rate here."""
    long = Problem.parse(f"b1.h8.s16384.d128.bf16{hiding}.grad")
    short = pace.expected(long, H100, peak(H100))
    rates = []
    for times in (4, 64):
        longer = long.replace(seq_q=times * 16384, seq_k=times * 16384)
        assert pace.shortened(longer) == long.replace(batch=times)
        told = pace.expected(longer, H100, peak(H100))
        more = pace.work(longer) / pace.work(long)
        rates += [told.forward / short.forward / more, told.backward / short.backward / more]
    assert all(0.8 < rate < 1.1 for rate in rates), rates


def test_what_is_shortened_keeps_its_tiles() -> None:
    problem = Problem.parse("b1.h1.s1000000x500000.d8.fp32")
    short = pace.shortened(problem)
    assert (short.batch, short.seq_q, short.seq_k) == (62, 16129, 8064)
    tiles = pace.shortened(Problem.parse(f"b1.h1.s{128 * 1001}.d8.fp32"))
    assert tiles.seq_q % 128 == 0
    assert pace.shortened(TRAINING) is TRAINING


@pytest.mark.parametrize("options", ["", ".causal.grad", ".mask=bool.grad", ".lengths", ".sinks.alibi.grad"])
def test_a_call_is_timed_on_the_cpu(options: str) -> None:
    found = timed(Problem.parse(f"b2.h4/2.s32.d16.fp32{options}"), "cpu", None)
    assert (found.source, found.forward > 0, found.backward > 0) == ("measured", True, "grad" in options)
    assert found.backends
    with pytest.raises(Unsupported, match="cannot be timed on cpu"):
        timed(Problem.parse(f"b1.h4.s32.d{2**40}.fp32"), "cpu")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["attnswitch", "estimate", *arguments])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as end:
        importlib.import_module("attnswitch.cli.app").main()
    return int(end.value.code or 0)


MILLION = ("b1.h32/8.s1048576.d128.bf16.causal.grad", "--device", "h100", "--ranks", "64")


def test_the_plan_of_a_million_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *MILLION, "--link", "450GB/s") == 0
    out = capsys.readouterr().out
    for text in (
        "64, of up to 16,384 rows each; in a ring dealt zigzag",
        "450 GB/s each way (as given), 0 us a message",
        "forecast: ",
        "all-to-all: 32 query heads are not dealt evenly over 64 ranks",
        "best: ",
        "forward: a step of the ring covers what is on its way from",
        "backward: a step of the ring covers what is on its way from",
    ):
        assert text in out, text
    assert run(monkeypatch, *MILLION, "--link", "1MB/s", "--latency", "5us", "--order", "contiguous") == 0
    out = capsys.readouterr().out
    assert "never hides its traffic" in out
    assert "5 us a message" in out
    assert "dealt contiguous" in out


def test_the_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *MILLION, "--link", "400Gb/s", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["link"] == {"gbps": 50.0, "latency_us": 0.0, "source": "as given"}
    assert (document["rows"], document["order"]) == (16384, "zigzag")
    ring, *_, traded = document["splits"]
    assert (ring["name"], ring["heads_over"], ring["ring"]) == ("ring", 1, 64)
    assert ring["forward"]["step"] == 8 * 16384 * 256 * 2
    assert ring["peak"] == max(sum(items.values()) for items in ring["memory"].values())
    assert (traded["forward"], traded["ms"], traded["memory"]) == (None, None, {})
    assert document["covered"]["backward"]["rows"] >= document["covered"]["forward"]["rows"] > 0
    assert document["paces"][0]["source"] == "forecast"
    fastest = min((each for each in document["splits"] if each["ms"]), key=lambda each: each["ms"])
    assert document["best"] == fastest["name"]


def test_calls_of_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("b1.h2.s256.d16.fp32.causal", "--device", "cpu", "--ranks", "2", "--link", "1GB/s")
    assert run(monkeypatch, *small, "--measured") == 0
    assert "measured: calls timed here, on cpu" in capsys.readouterr().out
    assert run(monkeypatch, *small) == 0
    assert "roofline, a lower bound that no kernel reaches: measured here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--ranks", "64"), "NVLink joins 8 H100 on one board, not 64"),
        (("--ranks", "2", "--link", "fast"), "expected a rate of one direction"),
        (("--ranks", "2", "--latency", "soon"), "expected a time such as 10us"),
        (("--ranks", "0", "--link", "1GB/s"), "expected 1 to 256"),
        (("--link", "1GB/s"), "--link: it is of ranks"),
        (("--latency", "1us"), "--latency: it is of ranks"),
        (("--order", "zigzag"), "--order: it is of ranks"),
        (("--ranks", "2", "--configs"), "--configs: --ranks tells of no tiles"),
        (("--ranks", "2", "--measured"), "is not in this machine"),
    ],
)
def test_the_command_refuses_with_a_reason(
    arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "b1.h4.s4096.d64.bf16", "--device", "h100", *arguments) == 2
    assert why in " ".join(capsys.readouterr().err.split())
