"""Shared by every test: the saboteur backends, entered in the registry for the length of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnswitch import planner, registry
from attnswitch.wisdom import view

sys.path.insert(0, str(Path(__file__).parent / "saboteurs"))


def forget_plans() -> None:
    """Drop everything remembered about backends."""
    for remembered in (registry.table, registry.load, planner.kernel):
        remembered.cache_clear()
    planner.forget()


@pytest.fixture(autouse=True)
def no_wisdom(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for what a test measures: what this machine knows is none of its business."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(folder))
    monkeypatch.setenv("XDG_DATA_DIRS", str(folder / "system"))
    view.reload()
    yield folder
    view.reload()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """``register(name, "module:Class")`` puts a backend in front of the table for the length of a test."""

    def add(name: str, target: str) -> None:
        monkeypatch.setattr(registry, "TABLE", (registry.Row(name, target, "the tests"), *registry.TABLE))
        forget_plans()

    yield add
    monkeypatch.undo()
    forget_plans()
