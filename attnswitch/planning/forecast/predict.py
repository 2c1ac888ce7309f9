"""``forecast``: the expected time of each backend for a problem on a device, from a table of what was measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.wisdom.classes import SpeedClass, representative, speed_class

if TYPE_CHECKING:
    from attnswitch.planning.forecast.table import Table

__all__ = ["TABLES", "Forecast", "forecast"]

#: The tables, by compute capability.
TABLES = {(9, 0): "sm90.npz"}
#: Classes that are remembered; beyond, all are forgotten.
_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Milliseconds by backend, and what they rest on: how many problems, on which GPUs, measured when."""

    ms: dict[str, float]
    problems: int
    devices: tuple[str, ...]
    date: str

    @property
    def source(self) -> str:
        """What it rests on, in words."""
        return f"{self.problems} problems measured on {' and '.join(self.devices)} until {self.date}"


_NOTHING = Forecast({}, 0, (), "")
_known: dict[tuple[SpeedClass, Device], Forecast] = {}


def forecast(problem: Problem, device: Device) -> Forecast:
    """The expected times of the class of ``problem``; of no backend where such a device has no table."""
    table = _table(device.capability) if device.kind == "cuda" else None
    if table is None or problem.is_empty or not problem.seq_k:
        return _NOTHING
    key = speed_class(problem), device
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        ms = table.times(representative(problem), device)
        known = _known[key] = Forecast(ms, len(table.points), table.devices, table.date)
    return known


@functools.cache
def _table(capability: tuple[int, int] | None) -> Table | None:
    name = TABLES.get(capability) if capability else None
    if name is None:
        return None
    from attnswitch.planning.forecast.table import Table  # imports NumPy

    return Table.read(name)
