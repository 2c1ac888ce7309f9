"""``Correction``: what this machine has measured moves the forecast of problems that are near.

The errors of the forecast are interpolated as the forecast itself is, by kriging over the nearest problems.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnswitch.machine.device import Device
from attnswitch.planning.forecast.table import Table
from attnswitch.problem import Problem
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time

__all__ = ["Correction", "correction"]

#: How many of the nearest problems are asked; noise of what was measured, over the variance of the forecast's error.
_NEAREST, _NOISE = 16, 0.05


@dataclass(frozen=True, slots=True)
class Correction:
    """By backend: where the problems are that were measured here (N, F), and the logarithms of time over forecast."""

    known: dict[str, tuple[Any, Any]]

    @property
    def problems(self) -> int:
        """How many problems were measured of the backend that has most."""
        return max((len(errors) for _, errors in self.known.values()), default=0)

    def apply(self, ms: dict[str, float], point: Any) -> dict[str, float]:
        """``ms`` with the errors taken out that are expected at ``point``."""
        return {name: time * self._factor(name, point) for name, time in ms.items()}

    def _factor(self, name: str, point: Any) -> float:
        if name not in self.known:
            return 1.0
        points, errors = self.known[name]
        away = np.sqrt(np.square(points - point).sum(1))
        near = np.argsort(away)[:_NEAREST]
        among = points[near]
        apart = np.sqrt(np.square(among[:, None] - among[None]).sum(2))
        weights = np.linalg.solve(np.exp(-apart) + _NOISE * np.eye(len(near)), errors[near])
        return float(np.exp(np.exp(-away[near]) @ weights))


@functools.lru_cache(maxsize=16)
def correction(table: Table, device: Device, generation: int) -> Correction:
    """That of ``device`` by the wisdom of this generation."""
    wisdom = view.current()
    expected: dict[Problem, tuple[Any, dict[str, float]]] = {}
    known = {}
    for name in table.backends:
        points, errors = [], []
        for record in wisdom.measured(name, device):
            if isinstance(record, Time):
                if record.problem not in expected:
                    expected[record.problem] = table.point(record.problem, device), table.times(record.problem, device)
                point, times = expected[record.problem]
                points.append(point)
                errors.append(np.log(record.ms / times[name]))
        if points:
            known[name] = np.array(points), np.array(errors)
    return Correction(known)
