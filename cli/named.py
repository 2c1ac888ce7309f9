"""Devices and backends as they are named on the command line, looked up before anything runs."""

from __future__ import annotations

import os
import sys

from attnswitch.errors import BackendUnavailable, InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Standing
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.names import one_of
from attnswitch.verify.outcome import AUTO

__all__ = ["able", "first", "functions", "named", "present", "reach"]


def first() -> str:
    """The first GPU of this machine, else the CPU, as torch spells it."""
    return "cuda:0" if len(Device.all()) > 1 else "cpu"


def present(name: str | None) -> str:
    """``name`` as torch spells it, if it is a device of this machine; ``first`` where none is named.

    Raises ``InvalidProblem`` if it is not here.
    """
    if name is None:
        return first()
    device = Device.parse(name)
    if not device.present:
        raise InvalidProblem(f"device {name!r} is not in this machine: kernels can be planned for it, not run")
    return device.where


def named(name: str) -> str:
    """``name``, if it is a backend, a target that can be loaded, or auto. Raises ``InvalidProblem`` if not."""
    known = (AUTO, *registry.names())
    if name in known:
        return name
    if ":" not in name:
        target = ", or a target such as package.module:Class or file.py:function"
        raise InvalidProblem(f"backend {name!r} is not known; {one_of(name, known, target)}")
    reach(name)
    loaded = registry.load(name)
    if isinstance(loaded, Missing):
        what = "a function in a file" if registry.is_function(name) else "a target"
        raise InvalidProblem(f"backend {name!r} is {what}, and {loaded}")
    return name


def functions(names: list[str] | None, like: str | None) -> list[str]:
    """The targets ``FILE.py:NAME@LIKE`` that --function and --like stand for.

    Raises ``InvalidProblem`` for a name that is none, and for --like without a function that it could be of.
    """
    if like is not None and not names:
        raise InvalidProblem(f"--like {like}: it says how a function is called; name that with --function FILE.py:NAME")
    for name in names or ():
        if not registry.is_function(name):
            raise InvalidProblem(f"--function {name}: {_no_function(name)}")
        if like is not None and "@" in name.rpartition(":")[2]:
            raise InvalidProblem(f"--function {name} says what it is like, and so does --like {like}: leave out one")
    joined = [name if like is None else f"{name}@{like}" for name in names or ()]
    if not all(map(registry.is_function, joined)):
        raise InvalidProblem(f"--like {like!r}: expected a word such as torch, flash-attn or bhsd+gqa")
    return joined


def _no_function(name: str) -> str:
    """Why ``name`` is no function in a file."""
    path, _, _ = name.rpartition(":")
    odd = next((letter for letter in path if letter in ":\"'`\\" or letter < " "), "")
    if odd and path.endswith(".py"):
        return f"a path with {odd!r} cannot be told apart from what follows it: link the file under another"
    return "expected FILE.py:NAME, such as kernels.py:attention"


def able(name: str, where: str) -> str:
    """``name``, if it is a backend that can run here and be chosen on the device ``where``.

    Raises ``InvalidProblem`` if it is not known or is approximate, ``BackendUnavailable`` if it cannot run here.
    """
    loaded = registry.load(named(name))
    why = loaded.reason if isinstance(loaded, Missing) else loaded.unavailable()
    if why:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {why}")
    if isinstance(loaded, Backend) and loaded.standing(Device.parse(where)) is Standing.NAMED:
        raise InvalidProblem(f"backend {name!r} is approximate: it is never chosen, so there is nothing to tune")
    return name


def reach(name: str) -> None:
    """Let a target be imported from the current directory, where its author is likely to be.

    Only where one is named, and behind everything else: a file there that happens to be called like a module of the
    standard library must not hide it.
    """
    here = os.getcwd()
    if ":" in name and not registry.is_function(name) and here not in sys.path:
        sys.path.append(here)
