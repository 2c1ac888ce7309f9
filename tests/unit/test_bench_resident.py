"""``attnswitch bench resident``: memory of a call in a process of its own."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import InvalidProblem, Problem
from attnswitch.bench import resident as bench
from attnswitch.bench.resident import Resident, resident

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


def test_what_grows_with_both_lengths_is_seen() -> None:
    """Scores of 4096 x 4096 in float32 are 64 MiB; online softmax has none. What this process has is not counted."""
    mine = bytearray(400 * MIB)
    mine[::4096] = b"1" * len(mine[::4096])
    text = "b1.h1.s4096.d64.fp32.window=64,0"
    quadratic, linear = (resident(text, backend) for backend in ("sdpa-math", "tiled"))
    assert quadratic.operands == linear.operands == 3 * MIB
    assert quadratic.beyond is not None
    assert linear.beyond is not None
    assert quadratic.beyond > 64 * MIB
    assert linear.beyond < 24 * MIB  # its result is 1 MiB
    assert (quadratic.chosen, linear.chosen) == ("sdpa-math", "tiled")
    assert quadratic.ratio is not None
    assert quadratic.ratio == quadratic.beyond / quadratic.operands


def test_what_a_process_raises_is_told() -> None:
    made = resident("b1.h1.s8.d8.fp32.dropout=0.5", "tiled")
    assert (made.beyond, made.ratio, made.seconds) == (None, None, None)
    assert made.why is not None
    assert made.why.startswith("Unsupported: ")
    assert "seed" in made.why


def test_its_process_imports_what_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the current folder, and a target of the folders that this process imports from."""
    for name in ("typing", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    made = resident("b1.h1.s8.d8.fp32", "saboteurs:Saboteur")
    assert (made.why, made.chosen) == (None, "saboteurs:Saboteur")


def test_a_call_that_takes_too_long_is_given_up() -> None:
    assert resident("b1.h1.s8.d8.fp32", timeout=0.01).why == "it took longer than 0.01 s"


def test_gradients_are_refused() -> None:
    with pytest.raises(InvalidProblem, match="without gradients"):
        resident("b1.h1.s8.d8.fp32.grad")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("b2.h4/2.s8x16.d8/4.fp16", 2 * (2 * 4 * 8 * 8 + 2 * 2 * 16 * 12)),
        ("b1.h2.s4x6.d8.fp32.mask=bool:hk", 4 * (2 * 4 * 8 + 2 * 6 * 16) + 12),
        ("b1.h1.s4.d8.fp16.mask=fp32", 2 * 96 + 64),
    ],
)
def test_the_bytes_of_operands(text: str, size: int) -> None:
    assert bench._operand_bytes(Problem.parse(text)) == size


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "resident", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("ratios", "arguments", "code"),
    [
        ((0.5, 1.5), (), 0),
        ((0.5, 1.5), ("--fail-over", "1.2"), 1),
        ((0.5, 1.1), ("--fail-over", "1.2"), 0),
        ((0.5, None), ("--fail-over", "1.2"), 1),
        ((0.5, None), (), 0),
        ((None, None), (), 3),
    ],
)
def test_the_exit_code(
    ratios: Any, arguments: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = iter(ratios)

    def measured(text: str, backend: str, _: float) -> Resident:
        ratio = next(made)
        beyond = None if ratio is None else int(100 * ratio)
        return Resident(text, backend, "tiled", 100, beyond, ratio, None if ratio else "killed")

    monkeypatch.setattr(importlib.import_module("attnswitch.cli.resident"), "measure", measured)
    path = tmp_path / "resident.json"
    assert command(monkeypatch, *arguments, "--json", str(path)) == code
    read = json.loads(path.read_text())
    assert [each["ratio"] for each in read["resident"]] == list(ratios)
    assert [each["problem"] for each in read["resident"]] == list(bench.PROBLEMS)


def test_what_is_not_known_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "--backend", "fastest") == 2
    assert command(monkeypatch, "--problem", "b1") == 2
