"""How torch spells the device that something is measured on, whichever way it was named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Device, api
from attnswitch.machine import device
from attnswitch.planning import planner
from attnswitch.tune import sight

SECOND = Device("cuda", "a GPU", (9, 0), present=True, index=1)


def test_a_gpu_keeps_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132, total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.version, "hip", None)
    first, second = (device._through_torch(index) for index in (0, 1))
    assert (first.where, second.where) == ("cuda:0", "cuda:1")
    assert (first, hash(first)) == (second, hash(second))  # what is known of one holds for the other


@pytest.mark.parametrize(("named", "where"), [(SECOND, "cuda:1"), (Device.cpu(), "cpu"), ("CPU", "cpu"), (None, "cpu")])
def test_first_sight_is_on_the_device_named(named: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    monkeypatch.setattr(planner, "make_plan", lambda *_: SimpleNamespace(open=True, basis=None))

    def measure(plan: Any, place: str) -> bool:
        places.append(place)
        return False

    monkeypatch.setattr(sight, "measure", measure)
    attnswitch.explain("b1.h1.s16.d8.fp32", device=named, policy="measure")
    assert places == [where]
    assert api._device(named).where == where
