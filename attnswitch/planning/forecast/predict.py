"""``forecast``: the expected time of each backend for a problem on a device, from a table of what was measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.problem import Problem
from attnswitch.wisdom import view
from attnswitch.wisdom.classes import SpeedClass, representative, speed_class

if TYPE_CHECKING:
    from attnswitch.planning.forecast.table import Table

__all__ = ["TABLES", "Forecast", "forecast", "of_itself"]

#: The tables, by compute capability.
TABLES = {(9, 0): "sm90.npz"}
#: Classes that are remembered; beyond, all are forgotten.
_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Milliseconds by backend, and what they rest on: how many problems, on which GPUs, measured when, and here."""

    ms: dict[str, float]
    problems: int
    devices: tuple[str, ...]
    date: str
    here: int

    @property
    def source(self) -> str:
        """What it rests on, in words."""
        here = f", and {self.here} here" if self.here else ""
        return f"{self.problems} problems measured on {' and '.join(self.devices)} until {self.date}{here}"


_NOTHING = Forecast({}, 0, (), "", 0)
_known: dict[tuple[SpeedClass, Device, int], Forecast] = {}


def forecast(problem: Problem, device: Device) -> Forecast:
    """The expected times of the class of ``problem``, by what this machine measured as well.

    Of no backend where there is no table for such a device.
    """
    table = _of(problem, device)
    if table is None:
        return _NOTHING
    key = speed_class(problem), device, view.generation
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[key] = _made(table, representative(problem), device)
    return known


def of_itself(problem: Problem, device: Device) -> Forecast:
    """The same of ``problem`` and not of its class, for whoever adds times up. Nothing of it is remembered."""
    table = _of(problem, device)
    return _NOTHING if table is None else _made(table, problem, device)


def _of(problem: Problem, device: Device) -> Table | None:
    table = _table(device.capability) if device.kind == "cuda" else None
    return None if problem.is_empty or not problem.seq_k else table


def _made(table: Table, problem: Problem, device: Device) -> Forecast:
    ms, here = {name: _repeats(name, problem, device) * time for name, time in table.times(problem, device).items()}, 0
    if view.current().times:
        from attnswitch.planning.forecast.correction import correction  # imports NumPy

        known = correction(table, device, view.generation)
        ms, here = known.apply(ms, table.point(problem, device)), known.problems
    return Forecast(ms, len(table.points), table.devices, table.date, here)


def _repeats(name: str, problem: Problem, device: Device) -> float:
    backend = registry.load(name)
    return 1.0 if isinstance(backend, Missing) else backend.repeats(problem, device)


@functools.cache
def _table(capability: tuple[int, int] | None) -> Table | None:
    name = TABLES.get(capability) if capability else None
    if name is None:
        return None
    from attnswitch.planning.forecast.table import Table  # imports NumPy

    return Table.read(name)
