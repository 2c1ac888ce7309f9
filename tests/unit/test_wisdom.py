"""Wisdom: what a record says and holds for, the store, and files that are carried from machine to machine."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnswitch import Device, InvalidProblem, Problem
from attnswitch.machine import registry
from attnswitch.machine.registry import Missing
from attnswitch.problem import Mask, Memory
from attnswitch.wisdom import exchange, store, view
from attnswitch.wisdom import signature as signatures
from attnswitch.wisdom.classes import covers, doublings, representative, speed_class, traits
from attnswitch.wisdom.record import Record, Time, Untimed, Verdict, _sum, from_line, to_line
from attnswitch.wisdom.signature import Signature, machine, sign
from attnswitch.wisdom.store import Store

CPU = Device.cpu()
PROBLEM = Problem.parse("b2.h4.s64.d32.fp32")


def signature(backend: str = "tiled") -> Signature:
    signed = sign(backend, CPU)
    assert isinstance(signed, Signature)
    return signed


def time(ms: float = 1.0, problem: Problem = PROBLEM, backend: str = "tiled", date: str = "2026-11-01") -> Time:
    return Time(problem, backend, "", ms, 0.9 * ms, 1.1 * ms, 30, 2, signature(backend), date)


def fault(problem: Problem = PROBLEM, backend: str = "tiled", case: str = "a.json", right: bool = False) -> Verdict:
    return Verdict(problem, backend, right, case, "reference: out", signature(backend), "2026-11-01")


# -- records -----------------------------------------------------------------------------------------------------------


UNTIMED = Untimed(PROBLEM, "tiled", "out of memory", signature(), "2026-11-03")


@pytest.mark.parametrize(
    "record", [time(), time(problem=Problem.parse("b1.h8/2.s1x70.d64.bf16.causal-br")), fault(), UNTIMED]
)
def test_a_line_is_the_record(record: Record) -> None:
    line = to_line(record)
    assert from_line(line) == record
    assert (line.count(b"\n"), line.endswith(b"\n")) == (1, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.replace(b'"ms":1.0', b'"ms":0.5'), "its checksum is not that of its content"),
        (lambda line: line[:-10], "it is not JSON: cut off"),
        (lambda line: b"\0" * len(line), "it is not JSON: cut off, or written over"),
        (lambda line: b"{}", "it has no checksum"),
        (lambda line: 10**4 * b"[", "nested more than 32 deep"),
        (lambda line: b"[1]", "it is not a line of wisdom"),
    ],
)
def test_a_line_that_was_changed_is_refused(change: object, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        from_line(change(to_line(time())))  # type: ignore[operator]


def changed(**change: object) -> bytes:
    """A line whose checksum is right, and whose fields are not those of a record."""
    fields = {**json.loads(to_line(time())), **change}
    del fields["sum"]
    return json.dumps({**fields, "sum": _sum(fields)}).encode()


def test_a_line_may_have_whole_numbers() -> None:
    assert from_line(changed(ms=1, low=1, high=1)).ms == 1  # type: ignore[union-attr]


#: Lines that have the right sum, and what is wrong with them.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": 3}, "it is of schema 3"),
    ({"schema": [3]}, "no schema"),
    ({"kind": "guess"}, "kind is 'guess': expected one of time, untimed, verdict"),
    ({"kind": []}, r"kind is \[\]: expected text"),
    ({"ms": "fast"}, "ms is 'fast': expected a number"),
    ({"ms": -1.0}, "expected numbers from 1e-06 to 1e[+]09"),
    ({"ms": 5e-324}, "expected numbers from"),
    ({"high": 1e300}, "expected numbers from"),
    ({"low": math.nan}, "expected numbers from"),
    ({"high": math.inf}, "expected numbers from"),
    ({"ms": True}, "ms is True: expected a number"),
    ({"ms": 10**400}, "an integer of 401 digits"),
    ({"runs": 1.5}, "runs is 1.5: expected an integer"),
    ({"config": 1}, "config is 1: expected text"),
    ({"config": "\ud800"}, "half of a surrogate pair"),
    ({"config": "x" * 2**16}, "more than 65,536 bytes"),
    ({"backend": ["tiled"]}, "backend is .*: expected text"),
    ({"problem": "b1"}, "missing"),
    ({"problem": 3}, "problem is 3: expected text"),
    ({"problem": "b9223372036854775808.h1.s1.d1.fp32"}, "no array is as long"),
    ({"device": []}, r"device is \[\]: expected text"),
    ({"versions": None}, "versions is None: expected an object"),
    ({"versions": {"torch": []}}, r"versions.torch is \[\]: expected text"),
    ({"date": "yesterday"}, "date is 'yesterday': expected one such as 2026-11-01"),
    ({"more": json.loads(100 * "[" + 100 * "]")}, "nested more than 32 deep"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_line_with_a_right_sum_and_wrong_content_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        from_line(changed(**change))


def test_a_text_of_any_length_fits_a_line() -> None:
    told = replace(UNTIMED, why="\U0001f600" * 10**5 + "\ud800")
    assert told.why.startswith(from_line(to_line(told)).why)  # type: ignore[union-attr]
    assert from_line(to_line(replace(told, why="lost: \ud800"))).why == "lost: ?"  # type: ignore[union-attr]


# -- what a record holds for -------------------------------------------------------------------------------------------


def test_a_length_near_a_measured_one_is_of_its_class() -> None:
    measured = speed_class(Problem.parse("b4.h16.s1000.d128.bf16.causal"))
    for length in (730, 1000, 1023, 1100, 1440):
        assert speed_class(Problem.parse(f"b4.h16.s{length}.d128.bf16.causal.scale=0.3")) == measured
    whole = speed_class(Problem.parse("b4.h16.s1024.d128.bf16.causal"))
    assert whole != measured  # the last tile is full
    for length in (768, 896, 1152, 1408):
        assert speed_class(Problem.parse(f"b4.h16.s{length}.d128.bf16.causal")) == whole
    for other in ("s700", "s1500", "s1x1024", "s1024x2048"):
        assert speed_class(Problem.parse(f"b4.h16.{other}.d128.bf16.causal")) != measured
    assert speed_class(Problem.parse("b4.h16.s1024.d64.bf16.causal")) != measured
    assert speed_class(Problem.parse("b4.h16.s1024.d128.bf16")) != measured


@pytest.mark.parametrize(
    "text",
    [
        "b0.h2.s0x3.d8.fp32",
        "b1.h2.s128x100.d8.fp32",
        "b1.h2.s1x100.d8.fp32",
        "b1.h2.s90.d8.fp32",
        "b3.h6/2.s5x1000.d8/16.fp16.window=100,*.mask=bool:bqk.lengths.softcap=3.0.dropout=0.1.grad=q",
    ],
)
def test_a_class_has_a_problem_of_its_own(text: str) -> None:
    problem = Problem.parse(text)
    of = representative(problem)
    assert speed_class(of) == speed_class(problem)
    assert representative(of) == of


HEADS = st.sampled_from([(1, 1), (4, 2), (4, 4)])
SIZES = st.integers(0, 5) | st.sampled_from([90, 91, 127, 128, 129, 180, 181, 182, 1023, 1024, 1025])
SIDES = st.none() | SIZES
CHANGES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "alignment": st.sampled_from(["top_left", "bottom_right"]),
        "window": st.none() | st.tuples(SIDES, SIDES),
        "mask": st.none() | st.builds(Mask, st.sampled_from(["bool", "float32"]), st.sampled_from(["k", "bk", "qk"])),
        "key_lengths": st.booleans(),
        "scale": st.none() | st.sampled_from([-1.0, 0.5]),
        "softcap": st.sampled_from([0.0, 1.0, 30.0]),
        "dropout": st.sampled_from([0.0, 0.1, 0.5]),
        "seeded": st.booleans(),
        "lse": st.booleans(),
        "grads": st.sampled_from(["", "q", "qkv"]),
        "deterministic": st.booleans(),
        "query": st.sampled_from([Memory(), Memory(align=2)]),
        "nonfinite": st.booleans(),
    },
)


@st.composite
def drawn(draw: st.DrawFn) -> Problem:
    heads_q, heads_kv = draw(HEADS)
    dtype = draw(st.sampled_from(["float16", "float32"]))
    sizes = draw(SIZES), heads_q, heads_kv, draw(SIZES), draw(SIZES), draw(st.sampled_from([8, 9])), 8
    return Problem(*sizes, dtype, **draw(CHANGES))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine may be busy
@given(drawn(), CHANGES, SIZES)
def test_two_problems_are_of_one_class_where_one_problem_stands_for_both(
    problem: Problem, changes: dict[str, Any], seq_k: int
) -> None:
    other = problem.replace(seq_k=seq_k, **changes)
    assert (speed_class(problem) == speed_class(other)) is (representative(problem) == representative(other))
    assert speed_class(representative(other)) == speed_class(other)


SEEN = "b1.h2.s5x9.d8.fp32.causal.grad"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b4.h8.s512.d64.fp32.causal.grad", True),
        ("b1.h2.s5x9.d8.fp32.causal.mask=bool.grad", True),
        ("b1.h2.s5x9.d8.fp32.causal", False),  # the forward was right
        ("b1.h2.s5x8.d8.fp32.causal.grad", False),
        ("b1.h2.s5x9.d8.fp16.causal.grad", False),
        ("b1.h2.s5x9.d8.fp32.grad", False),
        ("b1.h2.s5x0.d8.fp32.causal.grad", False),
    ],
)
def test_a_fault_is_expected_wherever_what_it_needs_is_there(text: str, expected: bool) -> None:
    assert covers(Problem.parse(SEEN), Problem.parse(text)) is expected


@pytest.mark.parametrize(
    ("seen", "without"),
    [
        ("b1.h1.s4.d8.fp32.scale=-1.0", "b1.h1.s4.d8.fp32"),
        ("b1.h1.s4.d8/16.fp32", "b1.h1.s4.d16.fp32"),
        ("b1.h1.s4.d8.fp32.mask=fp32", "b1.h1.s4.d8.fp32.mask=bool"),
        ("b1.h1.s4.d8.fp32.window=1,1", "b1.h1.s4.d8.fp32"),
        ("b1.h1.s4.d8.fp32.nonfinite", "b1.h1.s4.d8.fp32"),
        ("b1.h1.s4x0.d8.fp32", "b1.h1.s4.d8.fp32"),
        ("b1.h1.s4.d8.fp32.causal-br", "b1.h1.s4.d8.fp32.causal"),
        ("b1.h4/2.s4.d8.fp32", "b1.h4.s4.d8.fp32"),
    ],
)
def test_a_fault_says_nothing_of_what_is_without_its_cause(seen: str, without: str) -> None:
    assert covers(Problem.parse(seen), Problem.parse(seen))
    assert not covers(Problem.parse(seen), Problem.parse(without))


# -- the store ---------------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    kept = Store(tmp_path / "deep" / "wisdom.jsonl")
    assert kept.read().records == []
    kept.append([time(1.0), fault()])
    kept.append([])
    kept.append([time(2.0)])
    assert kept.read().records == [time(1.0), fault(), time(2.0)]
    assert kept.read().damaged == []


def later() -> bytes:
    """A line of a version that writes another schema."""
    fields = {**json.loads(to_line(time())), "schema": 3, "sum": "another kind of sum"}
    return json.dumps(fields).encode() + b"\n"


def test_lines_of_another_schema_are_kept_when_the_others_are_changed(tmp_path: Path) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    kept.path.write_bytes(later() + to_line(time(1.0)) + b"damaged\n" + to_line(time(2.0)))
    assert [damage.why.partition(":")[0] for damage in kept.read().damaged] == [
        "it is of schema 3, and this version reads schema 2",
        "it is not JSON",
    ]
    assert kept.change(lambda records: records[1:]) == 1
    assert kept.path.read_bytes() == later() + to_line(time(2.0))
    assert kept.change(lambda records: [], others=False) == 2
    assert kept.path.read_bytes() == b""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that has room for thirty lines."""
    monkeypatch.setattr(store, "MOST", 30 * len(to_line(time(1.0))))
    return Store(tmp_path / "wisdom.jsonl")


def test_a_store_does_not_grow_for_ever(small: Store) -> None:
    small.append([fault(), fault(case="b.json")])
    small.path.write_bytes(small.path.read_bytes() + later())
    for number in range(200):
        small.append([time(1.0 + number), time(1.0, Problem.parse(f"b{2 ** (number % 50)}.h4.s64.d32.fp32"))])
        assert small.path.stat().st_size <= store.MOST
    contents = small.read()
    assert [record for record in contents.records if isinstance(record, Verdict)] == [fault(), fault(case="b.json")]
    assert contents.records[-2] == time(200.0)
    assert [damage.why[:17] for damage in contents.damaged] == ["it is of schema 3"]


def test_the_end_of_a_store_that_is_too_large_is_read(small: Store) -> None:
    lines = [to_line(fault()), *(to_line(time(1.0 + number)) for number in range(100)), b"damaged\n"]
    small.path.write_bytes(b"".join(lines))
    contents = small.read()
    assert 25 < len(contents.records) < 31
    assert contents.records[-1] == time(100.0)
    unread, damaged = contents.damaged
    assert "bytes are not read, which is too much: `attnswitch wisdom forget --stale` shortens it" in str(unread)
    assert f"wisdom.jsonl, line {len(contents.records) + 1} after byte " in str(damaged)
    small.change(lambda records: records[:1] + records[-1:])
    assert (small.read().records, small.read().damaged) == ([fault(), time(100.0)], [])


def test_a_store_that_is_too_large_is_compacted_by_the_next_writer(small: Store) -> None:
    lines = [to_line(fault()), *(to_line(time(1.0 + number)) for number in range(100)), to_line(time(9.0))[:50]]
    small.path.write_bytes(b"".join(lines))
    small.append([time(7.0)])
    assert (small.read().records, small.read().damaged) == ([fault(), time(100.0), time(7.0)], [])


def test_a_time_of_the_future_outlives_none_that_is_measured_later(small: Store) -> None:
    ahead = replace(time(9.0), date="2099-01-01T00:00:00.000+00:00")
    lines = [to_line(time(1.0 + number)) for number in range(100)]
    small.path.write_bytes(b"".join([*lines[:50], to_line(ahead), *lines[50:]]))
    small.append([fault()])
    assert small.read().records == [time(100.0), fault()]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "wisdom.jsonl")
    assert Store(tmp_path / "wisdom.jsonl").read().records == []


@pytest.mark.parametrize("length", [1, 50, -1])
def test_a_torn_line_is_cut_off_by_the_next_writer(tmp_path: Path, length: int) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    kept.append([time(1.0)])
    with kept.path.open("ab") as file:
        file.write(to_line(time(9.0))[:length])
    assert (kept.read().records, kept.read().damaged) == ([time(1.0)], [])
    kept.append([time(2.0)])
    assert (kept.read().records, kept.read().damaged) == ([time(1.0), time(2.0)], [])


def test_a_torn_first_line_and_a_long_tail(tmp_path: Path) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    kept.path.write_bytes(b"\0" * 10_000)
    kept.append([time(1.0)])
    assert (kept.read().records, kept.read().damaged) == ([time(1.0)], [])


def test_a_damaged_line_is_named_and_the_others_hold(tmp_path: Path) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    kept.append([time(1.0), time(2.0), time(3.0)])
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(lines[0] + lines[1].replace(b"2.0", b"0.1") + lines[2])
    contents = kept.read()
    assert contents.records == [time(1.0), time(3.0)]
    assert [str(damage) for damage in contents.damaged] == [
        f"{kept.path}, line 2: its checksum is not that of its content: it was changed by hand, or damaged"
    ]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes end 50 bytes early, and the last of them fail."""
    write: Callable[[int, bytes], int] = os.write

    def full(handle: int, content: bytes) -> int:
        if len(content) < 100:
            raise OSError(28, "No space left on device")
        return write(handle, content[:-50])

    monkeypatch.setattr(os, "write", full)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    kept.append([time(1.0)])
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match=r"No space .*wisdom\.jsonl"):
        kept.append([time(2.0)])
    monkeypatch.undo()
    assert kept.path.read_bytes() == to_line(time(1.0))


def test_a_store_is_known_to_be_writable_before_it_is_written(tmp_path: Path) -> None:
    kept = Store(tmp_path / "deep" / "wisdom.jsonl")
    kept.check()
    assert kept.read().records == []
    kept.append([time(1.0)])
    kept.check()
    assert kept.read().records == [time(1.0)]
    with pytest.raises(InvalidProblem, match=r"cannot be written \(Is a directory\): what is measured"):
        Store(tmp_path / "deep").check()


def test_what_lies_beneath_is_read_and_never_written(tmp_path: Path) -> None:
    beneath = Store(tmp_path / "system" / "wisdom.jsonl")
    beneath.append([time(1.0)])
    before = beneath.path.read_bytes()
    kept = Store(tmp_path / "own" / "wisdom.jsonl", (beneath.path, tmp_path / "absent"))
    kept.append([time(2.0)])
    assert kept.read().records == [time(1.0), time(2.0)]
    assert kept.change(lambda records: []) == 1
    assert kept.read().records == [time(1.0)]
    assert beneath.path.read_bytes() == before


# -- what holds here ---------------------------------------------------------------------------------------------------


def test_times_hold_for_their_class_and_signature() -> None:
    view.remember([time(1.0), time(3.0, date="2026-11-02"), time(2.0, date="2026-10-01")])
    held = view.current().time("tiled", PROBLEM.replace(seq_q=60, seq_k=70), CPU)
    assert isinstance(held, Time)
    assert held.ms == 3.0  # the newest
    view.reload()
    assert view.current().time("tiled", PROBLEM, CPU) == held
    assert view.current().time("reference", PROBLEM, CPU) is None
    assert view.current().time("tiled", PROBLEM, replace(CPU, name="another")) is None


def test_whatever_plans_rest_on_begins_another_generation() -> None:
    changes: list[Callable[[], None]] = [lambda: view.remember([time()]), view.reload, view.changed]
    for change in changes:
        before = view.generation
        change()
        assert view.generation > before
    before = view.generation
    view.remember([])
    view.current()
    assert view.generation == before


def test_one_look_tells_what_was_tried_of_several_backends() -> None:
    view.remember([time(1.0), replace(UNTIMED, backend="reference", signature=signature("reference"))])
    tried = view.current().tried(("sdpa-math", "tiled", "reference", "bygone"), PROBLEM, CPU)
    assert {name: type(record).__name__ for name, record in tried.items()} == {
        "sdpa-math": "NoneType",
        "tiled": "Time",
        "reference": "Untimed",
        "bygone": "NoneType",
    }


def test_the_nearest_are_the_same_for_a_class_until_more_is_known() -> None:
    near = PROBLEM.replace(batch=4)
    names = ("tiled", "reference")
    assert view.current().nearest(PROBLEM, CPU, names) == {}
    view.remember([time(1.0, near), time(2.0, near, "reference")])
    first = view.current().nearest(PROBLEM, CPU, names)
    assert {name: round(each.slower, 6) for name, each in first.items()} == {"tiled": 1.0, "reference": 2.0}
    assert view.current().nearest(PROBLEM.replace(seq_k=60), CPU, names) is first
    assert view.current().nearest(PROBLEM, CPU, names[:1]).keys() == {"tiled"}
    view.remember([time(3.0, near, date="2026-11-02")])
    again = view.current().nearest(PROBLEM, CPU, names)
    assert {name: round(each.slower, 6) for name, each in again.items()} == {"tiled": 1.5, "reference": 1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b2.h4.s64.d32.fp32", 0.0),
        ("b8.h4.s64.d32.fp32", 1.0),
        ("b2.h4.s128.d32.fp32", 4.0),  # both lengths, and it fills its last tile
        ("b2.h4.s64.d32.fp32.causal", 1.0),
        ("b2.h4.s64.d32.fp32.mask=bool", math.inf),
        ("b2.h4.s1x64.d32.fp32", math.inf),
    ],
)
def test_distances_are_in_doublings(text: str, expected: float) -> None:
    assert doublings(traits(PROBLEM), traits(Problem.parse(text))) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda (NVIDIA A100, sm_80), 108 SMs"}, "it was measured on cuda .*A100.*, and this is cpu"),
        ({"versions": (("numpy", "1.0"),)}, "it was measured with numpy 1.0, and here it is"),
        ({"versions": (("driver", "550.1"),)}, "it was measured with driver 550.1, and here it is absent"),
        ({"source": "0123456789ab"}, "the backend's source has changed since"),
    ],
)
def test_what_was_signed_elsewhere_is_not_used(change: dict[str, object], message: str) -> None:
    signed = replace(signature(), **change)  # type: ignore[arg-type]
    view.remember([replace(time(), signature=signed)])
    assert view.current().time("tiled", PROBLEM, CPU) is None
    assert re.match(message, signed.differs(signature()) or "")


def test_that_there_is_no_time_takes_the_place_of_one_and_the_other_way_round() -> None:
    view.remember([time(1.0), UNTIMED])
    assert view.current().time("tiled", PROBLEM, CPU) == UNTIMED
    assert exchange.newest(store.here().read().records) == [UNTIMED]
    view.remember([time(2.0, date="2026-11-04")])
    assert view.current().time("tiled", PROBLEM, CPU) == time(2.0, date="2026-11-04")


def test_a_fault_holds_until_another_version_gets_its_case_right() -> None:
    old = replace(signature(), source="0123456789ab")
    view.remember([replace(fault(), signature=old)])
    assert view.current().fault("tiled", PROBLEM, CPU) is not None  # nobody has looked whether the new source is right
    view.remember([fault(case="another.json", right=True)])
    assert view.current().fault("tiled", PROBLEM, CPU) is not None
    view.remember([fault(right=True)])
    assert view.current().fault("tiled", PROBLEM, CPU) is None
    view.reload()
    assert view.current().fault("tiled", PROBLEM, CPU) is None


def test_a_fault_that_came_back_is_not_lifted_by_a_version_before_it() -> None:
    first, second, third = (replace(signature(), source=f"{number}" * 12) for number in range(3))
    view.remember([replace(fault(), signature=first), replace(fault(right=True), signature=second)])
    assert view.current().fault("tiled", PROBLEM, CPU) is None
    again = replace(fault(), signature=third, date="2026-11-02")
    view.remember([again])
    assert view.current().standing("tiled", CPU) == [again]
    view.remember([fault(right=True)])  # other processes may still be of the version that fails
    assert view.current().standing("tiled", CPU) == []


def test_a_fault_of_these_versions_is_not_lifted_by_them() -> None:
    """A case that fails now and then is wrong."""
    view.remember([fault(), fault(right=True)])
    assert view.current().fault("tiled", PROBLEM, CPU) == fault()
    assert view.current().standing("tiled", CPU) == [fault()]


# -- from machine to machine -------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "carried.jsonl"
    exchange.write([time(1.0), time(2.0, backend="reference"), fault()], path)
    return path


def test_an_exported_file_is_taken_whole(exported: Path) -> None:
    assert exchange.adopt(exported, [CPU]) == 3
    assert exchange.adopt(exported, [CPU]) == 3
    assert store.here().read().records == exchange.read(exported)
    assert view.current().time("reference", PROBLEM, CPU) is not None


def test_a_file_is_replaced_whole_or_stays_as_it_was(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = exported.read_bytes()
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        exchange.write([time(3.0)], exported)
    monkeypatch.undo()
    assert (exported.read_bytes(), os.listdir(exported.parent)) == (before, [exported.name])
    exchange.write([time(3.0)], exported)
    assert (exchange.read(exported), os.listdir(exported.parent)) == ([time(3.0)], [exported.name])


def test_what_a_path_leads_to_is_written(exported: Path) -> None:
    """A link stays a link, and a pipe or a device is no file to put another in the place of."""
    link = exported.with_name("link.jsonl")
    link.symlink_to(exported)
    exchange.write([time(3.0)], link)
    assert (link.is_symlink(), exchange.read(exported)) == (True, [time(3.0)])
    pipe = exported.with_name("pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    exchange.write([time(3.0)], pipe)
    assert (pipe.is_fifo(), os.read(reader, 2**16)) == (True, exported.read_bytes())
    os.close(reader)


def cut(path: Path, lines: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: cut(path, 3), "has 2 lines of wisdom and was written with 3: it was cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "line 4: it is not JSON: cut off"),
        (lambda path: path.write_text(path.read_text().replace('"ms":2.0', '"ms":0.2')), "line 3: its checksum"),
        (lambda path: path.write_bytes(to_line(time())), "its first line is not a head"),
        (lambda path: path.write_bytes(b""), "its first line is not a head"),
        (lambda path: path.write_text('{"wisdom":2,"lines":0,"sha256":""}\n'), "is of version 2"),
        (lambda path: path.write_text('{"wisdom":1}\n'), "the head is damaged"),
        (lambda path: path.write_text('{"wisdom":1,"lines":Infinity,"sha256":""}\n'), "the head is damaged"),
        (lambda path: path.write_text('{"wisdom":' + 10**5 * "["), "the head is damaged"),
        (
            lambda path: path.write_bytes(path.read_bytes().splitlines()[0] + b"\n" + 3 * to_line(time(4.0))),
            "its lines were changed",
        ),
    ],
)
def test_a_damaged_file_is_refused_whole(exported: Path, harm: object, message: str) -> None:
    harm(exported)  # type: ignore[operator]
    with pytest.raises(InvalidProblem, match=message):
        exchange.adopt(exported, [CPU])
    assert store.here().read().records == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda (NVIDIA A100, sm_80), 108 SMs"}, "line 3 .*A100.*, which is not in this machine; nothing"),
        ({"versions": (("driver", "550.1"),)}, "line 3 .*driver 550.1, and here it is absent; nothing"),
        ({"source": "0123456789ab"}, "line 3 .*the backend's source has changed"),
    ],
)
def test_a_file_from_elsewhere_is_refused_whole(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "carried.jsonl"
    exchange.write([time(), replace(time(), signature=replace(signature(), **change))], path)  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match=message):
        exchange.adopt(path, [CPU])
    assert store.here().read().records == []


def test_a_backend_that_is_not_here_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "carried.jsonl"
    exchange.write([replace(time(), backend="bygone")], path)
    with pytest.raises(InvalidProblem, match="backend 'bygone' is not known here"):
        exchange.adopt(path, [CPU])


def test_a_target_is_not_imported_for_a_files_sake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('sprung')\n")
    monkeypatch.syspath_prepend(tmp_path)
    exchange.write([replace(time(), backend="trap:Backend")], tmp_path / "wisdom")
    with pytest.raises(InvalidProblem, match=r"line 2 .trap:Backend.: it is a target, which is code to import"):
        exchange.adopt(tmp_path / "wisdom", [CPU])


def test_what_a_store_says_of_a_target_does_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('sprung')\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = replace(time(), backend="trap:Backend")
    assert exchange.held([told], [CPU]) == ([told], {})  # kept, as nobody can tell
    assert "trap" not in sys.modules


def test_what_backends_share_counts_as_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signature("triton").source, signature("tiled").source
    changed = tmp_path / "arithmetic.py"
    changed.write_text("LOG2E = 1.4426950408889634\n")
    monkeypatch.setattr(signatures, "_shared", lambda: (changed,))
    monkeypatch.setattr(signatures, "_sign", signatures._sign.__wrapped__)
    assert all(old != signature(name).source for old, name in zip(before, ("triton", "tiled"), strict=True))


def test_machines_are_told_apart() -> None:
    assert machine(Device.named("h100")) != machine(Device.named("h200"))
    assert "cores" in machine(CPU)
    assert signature("sdpa-math").versions != signature("tiled").versions
    assert signature("sdpa-math").source != signature("tiled").source
    assert isinstance(sign("no_such_module:Class", CPU), Missing)
    assert isinstance(sign("bygone", CPU), Missing)


def test_a_backend_is_signed_once_and_again_when_another_takes_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = signature("tiled"), replace(CPU, name="another")
    assert sign("tiled", CPU) is first
    assert sign("tiled", replace(CPU)) is first  # an equal device
    assert sign("tiled", other) == replace(first, device=machine(other))
    of_reference = registry.load("reference")
    monkeypatch.setattr(registry, "load", lambda name: of_reference)
    assert sign("tiled", CPU) == sign("reference", CPU) != first
