"""``Wisdom``: the records that hold on this machine now, indexed for the planner. They are read once a process.

Records that this process adds count at once, and those of other processes after ``reload``. Both begin a new
``generation``: plans of an earlier one are not used again.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.problem import Problem
from attnswitch.wisdom import classes, store
from attnswitch.wisdom.classes import SpeedClass, Traits, speed_class
from attnswitch.wisdom.record import Record, Time, Untimed, Verdict, now
from attnswitch.wisdom.signature import Signature, sign

__all__ = ["Near", "Wisdom", "changed", "current", "generation", "indexed", "now", "reload", "remember", "take"]


@dataclass(frozen=True, slots=True)
class Near:
    """How fast a backend was in the classes nearest to that of a problem. ``problems`` has the nearest first.

    ``slower`` is its time over that of the fastest backend: a geometric mean over these classes, in which nearer ones
    count more. A class in which the backend could not be timed counts as ``HOPELESS``.
    """

    problems: tuple[Problem, ...]
    slower: float


#: What was measured of one backend under one signature, by class.
_Table = dict[SpeedClass, Time | Untimed]


@dataclass(slots=True, eq=False)
class Wisdom:
    """Records, indexed by what is looked up."""

    times: dict[tuple[str, Signature], _Table] = field(default_factory=dict)
    #: Mismatches by backend and machine; verdicts "right" by backend, machine and case.
    faults: dict[tuple[str, str], list[Verdict]] = field(default_factory=dict)
    mended: dict[tuple[str, str, str], list[Verdict]] = field(default_factory=dict)
    #: Classes that this process has measured, or tried to measure, when it first met them.
    sighted: set[tuple[SpeedClass, Device]] = field(default_factory=set)
    #: What ``nearest`` answered, by class, device, backends and generation; and the traits of classes.
    _nearest: dict[tuple[SpeedClass, Device, tuple[str, ...], int], dict[str, Near]] = field(default_factory=dict)
    _traits: dict[SpeedClass, Traits] = field(default_factory=dict)

    def joined(self, records: Iterable[Record]) -> Wisdom:
        """A ``Wisdom`` of these records and ``records``; other threads may go on reading this one."""
        made = Wisdom(
            {key: dict(table) for key, table in self.times.items()},
            {key: list(seen) for key, seen in self.faults.items()},
            {key: list(seen) for key, seen in self.mended.items()},
            self.sighted,
            _traits=self._traits,
        )
        for record in records:
            made.add(record)
        return made

    def add(self, record: Record) -> None:
        """Index one record. A newer time replaces an older one of the same class.

        One of the future is no newer than what comes after it: the clock was wrong then, and has been put back.
        """
        if isinstance(record, Time | Untimed):
            table, of = self.times.setdefault((record.backend, record.signature), {}), speed_class(record.problem)
            before = table.get(of)
            if before is None or before.date <= record.date or before.date > now():
                table[of] = record
            self._nearest.clear()
        elif record.right:
            self.mended.setdefault((record.backend, record.signature.device, record.case), []).append(record)
        else:
            self.faults.setdefault((record.backend, record.signature.device), []).append(record)

    def time(self, backend: str, problem: Problem, device: Device) -> Time | Untimed | None:
        """The time of ``backend`` on the class of ``problem`` with the software that is here now, or why it has none.

        None if nobody tried to measure it.
        """
        return self.tried((backend,), problem, device)[backend]

    def tried(self, backends: Iterable[str], problem: Problem, device: Device) -> dict[str, Time | Untimed | None]:
        """``time`` of each of ``backends``. The class of the problem is worked out once."""
        if not self.times:
            return dict.fromkeys(backends)
        of = speed_class(problem)
        return {name: None if (table := self._table(name, device)) is None else table.get(of) for name in backends}

    def knows(self, backend: str) -> bool:
        """Whether anything was measured of ``backend``, anywhere and with any software: asked without loading it."""
        return any(name == backend for name, _ in self.times)

    def _table(self, backend: str, device: Device) -> _Table | None:
        signature = sign(backend, device)
        return None if isinstance(signature, Missing) else self.times.get((backend, signature))

    def measured(self, backend: str, device: Device) -> Iterable[Time | Untimed]:
        """What was measured of ``backend`` on ``device`` with the software that is here now, once for each class."""
        return (self._table(backend, device) or {}).values()

    def nearest(self, problem: Problem, device: Device, backends: Sequence[str]) -> dict[str, Near]:
        """How fast ``backends`` were in the classes nearest to the class of ``problem``; empty if none is near.

        Distances are measured from the representative of the class, so that the answer is worked out once for all its
        problems. Classes on which the first of ``backends`` was not tried are ignored.
        """
        if not self.times:
            return {}
        key = speed_class(problem), device, tuple(backends), generation
        near = self._nearest.get(key)
        if near is None:
            near = self._nearest[key] = self._look_near(problem, device, backends)
        return near

    def _look_near(self, problem: Problem, device: Device, backends: Sequence[str]) -> dict[str, Near]:
        seen: dict[SpeedClass, list[Time | Untimed]] = {}
        for name in backends:
            for of, record in (self._table(name, device) or {}).items():
                seen.setdefault(of, []).append(record)
        asked = classes.traits(classes.representative(problem))
        away = {
            of: classes.doublings(self._traits_of(of, tried), asked)
            for of, tried in seen.items()
            if _compares(tried, backends[0])
        }
        near = sorted((of for of in away if away[of] <= classes.NEAR), key=lambda of: away[of])
        results: dict[str, list[tuple[Time | Untimed, float, float]]] = {}
        for of in near[: classes.NEIGHBOURS]:
            fastest = min(record.pace for record in seen[of] if isinstance(record, Time))
            for record in seen[of]:
                slower = record.pace / fastest if isinstance(record, Time) else classes.HOPELESS
                results.setdefault(record.backend, []).append((record, classes.weight(away[of]), math.log(slower)))
        timed = [name for name, each in results.items() if any(isinstance(record, Time) for record, _, _ in each)]
        return {name: _near(results[name]) for name in timed}

    def _traits_of(self, of: SpeedClass, records: Sequence[Time | Untimed]) -> Traits:
        known = self._traits.get(of)
        if known is None:
            known = self._traits[of] = classes.traits(classes.representative(records[0].problem))
        return known

    def fault(self, backend: str, problem: Problem, device: Device) -> Verdict | None:
        """The newest mismatch of ``backend`` on ``device`` that ``problem`` may meet too, or None.

        A mismatch holds until another version of the software or of the backend gets its case right.
        """
        if not self.faults:
            return None
        signature = sign(backend, device)
        if isinstance(signature, Missing):
            return None
        for seen in reversed(self.faults.get((backend, signature.device), ())):
            if classes.covers(seen.problem, problem) and self._stands(seen, signature):
                return seen
        return None

    def standing(self, backend: str, device: Device) -> list[Verdict]:
        """The mismatches of ``backend`` on ``device`` that hold: no other version got their cases right since."""
        signature = sign(backend, device)
        if isinstance(signature, Missing):
            return []
        seen = self.faults.get((backend, signature.device), ())
        return [fault for fault in seen if self._stands(fault, signature)]

    def _stands(self, seen: Verdict, here: Signature) -> bool:
        right = self.mended.get((seen.backend, seen.signature.device, seen.case), ())
        later = (verdict for verdict in right if verdict.date >= seen.date or verdict.signature == here)
        return seen.signature == here or not any(verdict.signature != seen.signature for verdict in later)


def _compares(tried: Sequence[Time | Untimed], first: str) -> bool:
    """Whether ``first`` was tried on a class, and at least one backend was timed on it."""
    return any(record.backend == first for record in tried) and any(isinstance(record, Time) for record in tried)


def _near(seen: Sequence[tuple[Time | Untimed, float, float]]) -> Near:
    """The mean over records of one backend, each with its weight and the logarithm of its time over the fastest's."""
    mean = sum(counts * slower for _, counts, slower in seen) / sum(counts for _, counts, _ in seen)
    return Near(tuple(record.problem for record, _, _ in seen), math.exp(mean))


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a fork must not find it held by a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_wisdom: Wisdom | None = None
#: A number that grows whenever anything that plans depend on changes. A plan holds for one generation. Every call reads
#: it, as ``view.generation`` (its name alone would keep the number of the day), and a function would take it longer.
generation = 0


def changed() -> None:
    """Begin a new generation: the wisdom has changed, or which backends there are."""
    global generation
    with _lock:
        generation += 1


def indexed(records: Iterable[Record]) -> Wisdom:
    """A ``Wisdom`` of ``records`` alone."""
    made = Wisdom()
    for record in records:
        made.add(record)
    return made


def current() -> Wisdom:
    """The wisdom of this process, read at the first call. Missing or damaged files are no error."""
    global _wisdom
    with _lock:
        if _wisdom is None:
            _wisdom = Wisdom()
            with contextlib.suppress(OSError):  # this machine has no folder for it
                _wisdom = indexed(store.here().read().records)
        return _wisdom


def remember(records: Iterable[Record], *, brief: bool = False) -> None:
    """Plan by ``records`` from now on, and write them to the user's store; ``brief``: without a long wait for others.

    Raises ``OSError`` if they cannot be written; they count in this process all the same.
    """
    kept = list(records)
    take(kept)
    if brief:
        store.here().append(kept, store.BRIEF)
    else:
        store.here().append(kept)


def take(records: Iterable[Record]) -> None:
    """Plan by ``records`` from now on, in this process alone."""
    global _wisdom
    kept = list(records)
    if kept:
        with _lock:
            _wisdom = current().joined(kept)
            changed()


def reload() -> None:
    """Forget what was read; the next plan reads the store again."""
    global _wisdom
    with _lock:
        _wisdom = None
        changed()
