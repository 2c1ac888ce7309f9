"""The classes that calls under policy LEARN have met and that wait to be measured, in the order in which they came.

Calls only add to it. Whoever measures takes from it, and says here what becomes of it, for ``explain`` to tell.
"""

from __future__ import annotations

import threading

from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.wisdom.classes import SpeedClass, speed_class

__all__ = ["add", "done", "first", "forget", "give_up", "news"]

_lock = threading.Lock()
#: The first problem of each class that waits, and the classes that were met at all: none waits a second time.
_waiting: dict[tuple[SpeedClass, Device], Problem] = {}
_met: set[tuple[SpeedClass, Device]] = set()
_given_up = ""


def add(problem: Problem, device: Device) -> bool:
    """Have the class of ``problem`` wait, if it is met for the first time; whether it is."""
    key = speed_class(problem), device
    if key in _met:
        return False
    with _lock:
        if key in _met:  # by another thread meanwhile
            return False
        _met.add(key)
        _waiting[key] = problem
    return True


def first() -> tuple[Problem, Device] | None:
    """The problem of the class that has waited longest. The class goes on waiting until it is ``done``."""
    with _lock:
        return next(((problem, device) for (_, device), problem in _waiting.items()), None)


def done(problem: Problem, device: Device) -> None:
    """The class of ``problem`` waits no longer, whatever came of it."""
    with _lock:
        _waiting.pop((speed_class(problem), device), None)


def give_up(why: str) -> None:
    """Nothing will be measured in this process any more."""
    global _given_up
    _given_up = why


def news(problem: Problem, device: Device) -> str:
    """What is told of the class of ``problem`` on ``device`` while it waits, else ""."""
    key = speed_class(problem), device
    with _lock:
        if key not in _waiting:
            return ""
        before = list(_waiting).index(key)
    if _given_up:
        return f"its class was to be measured in the background, and is not: {_given_up}"
    behind = f", behind {before} other{'s' if before > 1 else ''}" if before else ""
    return f"its class waits to be measured in the background{behind}"


def forget() -> None:
    """No class was met, and nothing was given up. Another thread's lock is none of a fork's."""
    global _lock, _waiting, _met, _given_up
    _lock, _waiting, _met, _given_up = threading.Lock(), {}, set(), ""
