"""Every reader of files on files that were changed at random: ``InvalidProblem`` is all that any of them raises.

ATTNSWITCH_FUZZ says how many files each reader is given, in place of some hundreds.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import attnswitch
from attnswitch import Device, InvalidProblem, Problem
from attnswitch.bench import compare
from attnswitch.machine import fleet
from attnswitch.tune.problems import recorded
from attnswitch.verify import Case, Failure, joined, to_html, to_json, to_pytest
from attnswitch.verify.drawing.case import MaskRecipe
from attnswitch.verify.session import corpus, journal
from attnswitch.wisdom import exchange, store, view
from attnswitch.wisdom.record import Record, Time, Untimed, Verdict, _sum, from_line, to_line
from attnswitch.wisdom.signature import Signature, sign

RUNS = int(os.environ.get("ATTNSWITCH_FUZZ", "600"))
PROBLEM = Problem.parse("b2.h4.s64.d32.fp32")
CASE = Case(batch=2, seq_q=3, seq_k=4, lengths=(2, 4), mask=MaskRecipe(rank=2), window=(1, None), scale=0.5)

#: What takes the place of a value.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 64, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**400, -(10**20)),
    *(0.0, -0.0, 0.5, 5e-324, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "nan",
        "cpu",
        "cuda:0",
        "auto",
        "tiled",
        "os:system",
        "\ud800",
        "\0\x1b[31m",
        "$x^^$",
        "[/]",
        "x" * 70_000,
    ),
    *("2026-11-01", "9999-12-31T23:59:59.999+00:00", "float16", "qkvm", "bhqk", "expanded-rows", "activations"),
    *("b9223372036854775807.h1.s1.d1.fp32", "b1.h4.s1x9223372036854775807.d64.bf16.causal.window=9,0.grad.varlen"),
    *([], [0], [-1, 2**63], {}, {"x": []}, [[]], json.loads(40 * "[" + 40 * "]")),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is anything in ``value``, itself left out."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*place, key)
        yield from places(item, (*place, key))


def changed(plain: Any, dice: random.Random) -> Any:
    """``plain`` with one to three of its values replaced, taken out or moved elsewhere."""
    made = copy.deepcopy(plain)
    for _ in range(dice.randint(1, 3)):
        *path, key = dice.choice(list(places(made)) or [("x",)])
        inside = made
        for step in path:
            inside = inside[step]
        if dice.random() < 0.15 and isinstance(inside, dict):
            inside[dice.choice(["x", "schema", "\ud800"])] = inside.pop(key, None)
        else:
            inside[key] = copy.deepcopy(dice.choice(ODD))
    return made


def garbled(text: bytes, dice: random.Random) -> bytes:
    """``text`` cut, doubled, or with bytes that are others."""
    at = dice.randrange(len(text) + 1)
    odd = dice.choice([b"", b"\0", b"\xff", b"[" * 50, b"9" * 5000, b"\n", b'"', b"{}", b"\\ud800", b"NaN", text[:at]])
    return text[:at] + odd + text[at + dice.randint(0, 3) :]


def files(plain: Any, runs: int = RUNS) -> Iterator[bytes]:
    """The same ones each time."""
    dice = random.Random(0)
    for number in range(runs):
        text = json.dumps(changed(plain, dice)).encode()
        yield garbled(text, dice) if number % 4 == 0 else text


def refusal(reader: Callable[[Any], Any], given: Any, use: Callable[[Any], Any] = str) -> str:
    """The sentence with which ``given`` is refused, which is short and has the file's name; "" if it is taken."""
    try:
        found = reader(given)
    except InvalidProblem as problem:
        said = str(problem)
    else:
        use(found)
        return ""
    assert len(said) < 2000, said
    assert not isinstance(given, Path) or said.startswith(str(given)), said
    return said or "nothing was said"


def refused(reader: Callable[[Path], Any], plain: Any, path: Path, use: Callable[[Any], Any] = str) -> int:
    """How many files were refused."""
    count = 0
    for text in files(plain):
        path.write_bytes(text)
        count += bool(refusal(reader, path, use))
    return count


def saved() -> dict[str, Any]:
    failure = {"check": "reference", "message": "wrong", "result": "out", "index": [0], "got": 1.0}
    return {
        "schema": 1,
        "backend": "tiled",
        "device": "cpu",
        "case": CASE.to_json(),
        "failure": failure,
        "environment": {
            "python": "3.12.3",
            "system": "Linux x86_64",
            "torch": "2.11.0",
            "numpy": "2.4.6",
            "cores": "2",
        },
        "note": "",
    }


def test_saved_cases(tmp_path: Path) -> None:
    def use(found: corpus.Saved) -> None:
        failure = Failure(found.check or "reference", found.note)
        ast.parse(to_pytest(found.case, found.backend, found.device, failure, {}).encode(errors="replace"))

    assert RUNS / 20 < refused(corpus.load, saved(), tmp_path / "case.json", use) < RUNS * 0.95


def test_machines(tmp_path: Path) -> None:
    plain = {"backends": {"tiled": None, "cuda": "no GPU"}, "libraries": {"numpy": "2.4.6"}, "devices": ["cpu (x)"]}
    plain |= {"distrusted": None, "host": "node", "version": "0.1.0", "date": "2026-11-27T12:00:00+00:00"}

    def use(found: fleet.Fleet) -> None:
        assert json.dumps(found.to_json())

    assert RUNS / 20 < refused(lambda path: fleet.joined([path]), plain, tmp_path / "m.json", use) < RUNS * 0.95


def test_worst_cases(tmp_path: Path) -> None:
    path = tmp_path / "worst.json"
    for text in files({**saved(), "ratio": 0.5}):
        path.write_bytes(text)
        assert isinstance(corpus._ratio(path), float | int)


def test_journals(tmp_path: Path) -> None:
    plain, found = {"count": 1, "backend": "tiled", "case": CASE.to_json()}, list[Any]()
    for text in files(plain):
        (tmp_path / "journal.json").write_bytes(text)
        found.append(journal.read(tmp_path / "journal.json"))
    assert {entry is None for entry in found} == {True, False}


def log() -> list[dict[str, Any]]:
    target = {"device": "cpu", "backends": ["tiled"], "space": {}, "recipes": 1, "emulation": {}}
    shared = {"at": 1.0, "backend": "tiled", "device": "cpu"}
    failure = {**saved()["failure"], "got": "inf", "expected": 0.5, "bound": None}
    plan = {"targets": [target], "shard": "1/2", "seed": 3, "held": ["tiled"], "requirements": ["causal"]}
    judged = {**shared, "verdict": "mismatch", "ratios": {"out": "nan"}, "worst": {"out": [0, 0, 1, 2]}}
    found = {"chosen": "tiled", "variant": "64x64", "ratios": {"out": 2.5}, "failure": failure, "case": CASE.to_json()}
    told = {"seconds": 1.0, "cases_before": 2, "from_corpus": False, "path": "a.json", "replayed_with": ["--court"]}
    end = {"workers": 2, "stopped": "", "passed_over": ["b.json: cut off"], "environment": {"torch": "2.11.0"}}
    return [
        {"event": "start", "at": 0.0, "schema": 2, "plan": plan, "environment": {"torch": "2.11.0"}},
        {"event": "case", "at": 1.0, "source": "drawn", "case": CASE.to_json()},
        {"event": "outcome", **judged, "failure": failure, "checks": ["form"], "variant": "64x64", "seconds": 0.25},
        {"event": "reason", "at": 1.0, "id": 0, "text": "no softcap"},
        {"event": "outcome", **shared, "verdict": "refused", "reasons": [0]},
        {"event": "divergence", **shared, "id": "nonfinite-leak", "shows": True},
        {"event": "failure", **shared, **found, **told},
        {"event": "end", "at": 2.0, **end},
    ]


def test_logs(tmp_path: Path) -> None:
    dice, path, count = random.Random(0), tmp_path / "log.ndjson", 0
    for number in range(RUNS):
        lines = [json.dumps(event).encode() for event in log()]
        at = dice.randrange(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), dice)).encode()
        text = b"\n".join(lines)
        path.write_bytes(garbled(text, dice) if number % 4 == 0 else text)
        count += bool(refusal(lambda log: joined([log]), path, lambda report: (to_json(report), to_html(report))))
    assert RUNS / 20 < count < RUNS * 0.95


def test_runs_of_the_benchmark(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "suite": "grid",
        "row": "S 64",
        "problem": str(PROBLEM),
        "kind": "speed",
        "direction": "forward",
    }
    record |= {"candidate": "tiled", "status": "measured", "ms": 1.0, "ms_low": 0.9, "ms_high": 1.1, "memory": 3}
    plain: dict[str, Any] = {
        "schema": 1,
        "date": "2026-11-01",
        "device": "cpu",
        "environment": {"torch": "2.11.0"},
        "limits": {"tflops": 1.0, "gbps": 2.0},
        "records": [record, {**record, "candidate": "torch", "ms": None, "status": "failed", "why": "lost"}],
    }

    def use(document: dict[str, Any]) -> None:
        pairs = compare.pairs(plain, document)
        assert all((pair.ratio is None or pair.ratio >= 0, pair.apart) for pair in pairs)
        compare.means(pairs)
        compare.differences(document, plain)

    assert RUNS / 20 < refused(compare.load, plain, tmp_path / "run.json", use) < RUNS * 0.95


def test_recordings(tmp_path: Path) -> None:
    dice, path = random.Random(0), tmp_path / "recorded"
    plain = (
        b"b2.h4/2.s64x70.d32/8.fp32.causal-br.window=3,*\nb1.h1.s32.d8.bf16.mask=fp16:bhqk.grad=qkm.k=expanded,align2\n"
    )
    count = 0
    for _ in range(RUNS):
        path.write_bytes(garbled(plain, dice))
        count += bool(refusal(recorded, path))
    assert 0 < count < RUNS


# -- wisdom ------------------------------------------------------------------------------------------------------------


def signature() -> Signature:
    signed = sign("tiled", Device.cpu())
    assert isinstance(signed, Signature)
    return signed


def records() -> list[Record]:
    here, date = signature(), "2026-11-01"
    return [
        Time(PROBLEM, "tiled", "", 1.0, 0.9, 1.1, 30, 2, here, date),
        Untimed(PROBLEM, "sdpa-math", "out of memory", here, date),
        Verdict(PROBLEM, "tiled", False, "a.json", "reference: out", here, date),
    ]


def lines(seed: int, count: int) -> Iterator[bytes]:
    """Lines of changed fields, whose checksum is right in most of them."""
    dice = random.Random(seed)
    plain = [json.loads(to_line(record)) for record in records()]
    for number in range(count):
        fields = changed(dice.choice(plain), dice)
        if number % 4:
            fields.pop("sum", None)
            fields["sum"] = _sum(fields)
        text = json.dumps(fields).encode()
        yield (garbled(text, dice) if number % 8 == 0 else text) + b"\n"


def test_lines_of_wisdom() -> None:
    count = sum(bool(refusal(from_line, line, to_line)) for line in lines(0, RUNS))
    assert RUNS / 20 < count < RUNS * 0.98


def test_exported_wisdom(tmp_path: Path) -> None:
    dice, path, whole = random.Random(0), tmp_path / "wisdom", records()
    plain, taken = exchange.content(whole), list[Any]()
    for _ in range(RUNS // 4):
        path.write_bytes(garbled(plain, dice))
        refusal(exchange.read, path, taken.append)
    assert all(found == whole for found in taken)


def test_no_store_breaks_a_call(no_wisdom: Path) -> None:
    tensors = [torch.zeros(2, 4, 64, 32) for _ in range(3)]
    for seed in range(RUNS // 50):
        (no_wisdom / store.NAME).write_bytes(b"".join(lines(seed, 60)))
        view.reload()
        assert attnswitch.attention(*tensors).shape == (2, 4, 64, 32)
        assert str(attnswitch.explain(*tensors, is_causal=True))
        assert str(attnswitch.plan("b1.h4.s9223372036854775807.d32.fp32"))
        exchange.held(store.here().read().records, Device.all())
