"""``attnswitch bench generate`` without transformers: what is asked of it, and what it says; tests/model runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest

from attnswitch.bench.generate import Load, loads


def test_no_length_comes_twice() -> None:
    load = Load("dynamic", padded=False, prompt=10, new_tokens=4)
    spans = [set(range(load.length(turn), load.length(turn) + load.new_tokens + 1)) for turn in range(5)]
    assert sum(map(len, spans)) == len(set.union(*spans))


def test_lengths_come_again_where_that_is_asked_for() -> None:
    assert {Load("static", padded=True, prompt=10, step=0).length(turn) for turn in range(3)} == {10}


def test_static_caches_with_masks_alike_are_of_other_lengths() -> None:
    made = list(loads(["static", "dynamic"], [False, True], 2, 10, 4, None))
    assert [(load.cache, load.padded, load.prompt) for load in made] == [
        ("static", False, 10),
        ("static", True, 11),
        ("dynamic", False, 12),
        ("dynamic", True, 13),
    ]


def test_without_transformers_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "generate", "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "attnswitch[transformers]" in capsys.readouterr().err.replace("\n", "")
