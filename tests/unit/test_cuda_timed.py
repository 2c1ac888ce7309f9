"""Tiles of the portable forward, and splits of keys, by what was timed: the choice is near the fastest of what was."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Problem
from attnswitch.machine.device import Device

config = importlib.import_module("attnswitch.backends.cuda.config")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
timed = importlib.import_module("attnswitch.backends.cuda.portable.timed")

H200 = Device.named("h200")
RECORD = json.loads((Path(__file__).parents[2] / "fixtures/results/h200/tiles.json").read_text(encoding="utf-8"))


def chosen(text: str, device: Device = H200) -> Any:
    """The first config of a portable forward."""
    return next(
        c
        for c in config.configs(Problem.parse(text), device)
        if isinstance(c.forward, tiles.Tile) and not c.forward.generic
    )


@pytest.mark.parametrize("found", RECORD["problems"], ids=lambda found: found["problem"])
def test_the_choice_is_the_fastest_or_near_it(found: dict[str, Any]) -> None:
    """Of what was measured, within a sixth; and it is still that one."""
    times, choice = found["milliseconds"], chosen(found["problem"])
    name = f"chosen: {choice.forward}, splits {choice.splits}"
    assert name in times
    assert times[name] <= 7 / 6 * min(times.values())
    most = 2**-7 if found["problem"].endswith("bf16") else 2**-19
    assert all(difference <= most for difference in found["difference"].values())


@pytest.mark.parametrize(
    ("text", "device", "taken"),
    [
        ("b4.h16.s512.d64.fp32", "h200", True),
        ("b4.h16.s512.d128.fp32.mask=bool.grad", "h100", True),
        ("b4.h16.s512.d129.fp32", "h200", False),
        ("b4.h16.s512.d64.fp64", "h200", False),
        ("b4.h16.s512.d64.bf16", "h200", False),
        ("b4.h16.s512.d64.fp32", "a100", False),
        ("b4.h16/4.s40.d64.fp32", "h200", False),  # whose heads share tiles
        ("b4.h16.s512.d64.fp32.varlen", "h200", False),
        ("b4.h16.s512.d64.fp32.lengths.page=16", "h200", False),
    ],
)
def test_which_are_timed(text: str, device: str, taken: bool) -> None:
    assert timed.taken(Problem.parse(text), Device.named(device)) is taken


@pytest.mark.parametrize("text", ["b0.h4.s512.d64.fp32", "b1.h4.s512x0.d64.fp32", "b1.h1.s70x1.d8.fp32"])
def test_what_is_empty_or_short_is_not_split(text: str) -> None:
    assert chosen(text).splits == 1


def test_more_blocks_than_there_is_room_for_are_not_split() -> None:
    assert chosen("b4.h16.s2048.d64.fp32").splits == 1
    assert chosen("b1.h8.s4000.d64.bf16").splits == 1
    assert chosen("b1.h1.s100x100000.d64.fp32").splits >= 16
