"""The backends of a device, each asked about one problem, and only when the choice wants to know."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from attnswitch.machine import one_by_one, registry
from attnswitch.machine.backend import Backend, Config, Standing
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.forecast import Forecast, forecast
from attnswitch.problem import Problem, cost
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time

__all__ = ["Field", "Row", "order"]

#: Bytes beside the operands that never speak against a backend: so many, so many times the operands and results, and
#: this share of the device's memory.
_LIGHT, _TIMES, _SHARE = 512 * 2**20, 4, 16


class Row:
    """A backend and what holds of it for every problem on a device; it is loaded when that is asked."""

    def __init__(self, name: str, device: Device, *, waits: bool = False) -> None:
        self.name, self._device = name, device
        #: Whether its standing is known not to be free without loading it (``registry.Row``).
        self.waits = waits

    @functools.cached_property
    def backend(self) -> Backend | Missing:
        """The backend, or why it could not be loaded."""
        return registry.load(self.name)

    @functools.cached_property
    def _known(self) -> tuple[str | None, bool, Standing]:
        backend = self.backend
        if isinstance(backend, Missing):
            return backend.reason, False, Standing.FREE
        try:
            unavailable = backend.unavailable() if self._device.present else None
            return unavailable, False, backend.standing(self._device)
        except Exception as error:  # a broken plug-in is a reason, not a crash
            return _raised(error), True, Standing.FREE

    @property
    def unavailable(self) -> str | None:
        """Why this machine cannot run it, or None; not asked of absent hardware."""
        return self._known[0]

    @property
    def broken(self) -> bool:
        """Whether it raised when it was asked."""
        return self._known[1]

    @property
    def standing(self) -> Standing:
        """When it may be chosen without being named."""
        return self._known[2]


@functools.lru_cache(maxsize=64)
def _rows(device: Device, generation: int) -> tuple[Row, ...]:
    waiting = {row.name for row in registry.table() if row.waits}
    return tuple(Row(name, device, waits=name in waiting) for name in registry.names())


def _raised(error: Exception) -> str:
    return f"it failed while planning: {type(error).__name__}: {error}"


def order(problem: Problem, device: Device) -> tuple[Row, ...]:
    """All backends in the order that stands for ``problem`` where nothing was measured: the least forecast first.

    A backend without one stands behind those that have one, as the registry has them.
    """
    return _ranked(device, view.generation, forecast(problem, device))


@functools.lru_cache(maxsize=4096)
def _ranked(device: Device, generation: int, expected: Forecast) -> tuple[Row, ...]:
    rows = _rows(device, generation)
    return tuple(sorted(rows, key=lambda row: expected.ms.get(row.name, math.inf))) if expected.ms else rows


class Field:
    """Every backend for one problem on one device, in order. What was asked of one is remembered."""

    def __init__(self, problem: Problem, device: Device, named: str | None = None, *, restarts: bool = False) -> None:
        self.problem, self.device = problem, device
        #: Whether the caller may have output and lse to start a backward from.
        self.restarts = restarts
        self.rows = order(problem, device)
        if named is not None and all(row.name != named for row in self.rows):  # a target, which is in no table
            self.rows = (*self.rows, Row(named, device))
        self._takes: dict[str, bool] = {}
        #: The first config of those that were asked.
        self.first: dict[str, Config] = {}

    def row(self, name: str) -> Row:
        """The row of the backend called ``name``, which is one of them."""
        return next(row for row in self.rows if row.name == name)

    def takes(self, row: Row) -> bool:
        """Whether it can run here and takes the problem."""
        known = self._takes.get(row.name)
        if known is None:
            known = self._takes[row.name] = row.unavailable is None and self._asked(row)
        return known

    def _asked(self, row: Row) -> bool:
        backend, problem, device = row.backend, self.problem, self.device
        if isinstance(backend, Missing):
            return False
        try:
            for _ in one_by_one.reasons(backend, problem, device):
                return False
            self.first[row.name] = next(iter(backend.configs(one_by_one.asked(backend, problem), device)))
        except Exception:  # ``candidate`` tells what it was
            return False
        return True

    def trusted(self) -> Iterator[Row]:
        """Those that can be chosen, in order: they take the problem and were not wrong on it here.

        What stands back until it was timed has been found right here, on the class of the problem.
        """
        wisdom = view.current()
        for row in self.rows:
            if row.waits and not wisdom.knows(row.name):  # nor is it loaded
                continue
            if not self._proven(row):
                continue
            if self.restarts and not getattr(row.backend, "restarts", True):
                continue
            if self.takes(row) and not wisdom.fault(row.name, self.problem, self.device):
                yield row

    def _proven(self, row: Row) -> bool:
        if row.standing is Standing.FREE:  # most are, and no time is looked up for them
            return True
        known = row.unavailable is None and view.current().time(row.name, self.problem, self.device)
        return row.standing.allows(isinstance(known, Time))

    def heavy(self, row: Row) -> int:
        """Bytes that it holds beside operands and results, where they are many beside these; else 0."""
        if isinstance(row.backend, Missing):
            return 0
        extra = one_by_one.extra_bytes(row.backend, self.problem, self.device)
        if extra <= max(_LIGHT, self.device.memory // _SHARE):
            return 0
        return extra if extra > _TIMES * cost.least_bytes(self.problem) else 0

    def candidate(self, row: Row) -> Candidate:
        """All that speaks against it, or all that is known of its speed."""
        backend, problem, device = row.backend, self.problem, self.device
        if isinstance(backend, Missing):
            return Candidate(row.name, unavailable=row.unavailable)
        if row.broken:
            return Candidate(row.name, unavailable=row.unavailable, broken=True)
        try:
            reasons = tuple(one_by_one.reasons(backend, problem, device))
            if not reasons:
                next(iter(backend.configs(one_by_one.asked(backend, problem), device)))
        except Exception as error:  # a broken plug-in is a reason, not a crash
            return Candidate(row.name, unavailable=_raised(error), broken=True)
        if reasons or row.unavailable is not None:
            return Candidate(row.name, reasons, row.unavailable)
        expected = forecast(problem, device).ms.get(row.name)
        known = self._known(row.name)
        return replace(known, heavy=self.heavy(row), expected=expected, standing=row.standing)

    def _known(self, name: str) -> Candidate:
        """A backend that takes the problem, with what this machine knows of it."""
        wisdom = view.current()
        measured = wisdom.time(name, self.problem, self.device)
        fault = wisdom.fault(name, self.problem, self.device)
        if isinstance(measured, Time):
            return Candidate(name, time=measured, fault=fault, config=measured.config)
        return Candidate(name, untimed=measured, fault=fault)
