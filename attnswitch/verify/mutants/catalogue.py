"""The mutants as data, and the backend that each edit makes of the tiled backend's source."""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import sys
import tomllib
from dataclasses import dataclass
from importlib import resources
from types import ModuleType
from typing import Any

from attnswitch.errors import VerificationError
from attnswitch.machine import registry
from attnswitch.machine.registry import Missing

__all__ = ["FAMILIES", "Excluded", "Mutant", "backend", "excluded", "mutants"]

#: What part of attention a fault is in.
FAMILIES = (
    "tail",  # the last tile of keys or queries
    "long",  # sizes and offsets that few tests reach
    "dims",  # head dimensions
    "scale",
    "softmax",  # maximum, rescaling, exponential
    "rounding",  # narrower types than promised
    "dead-rows",
    "softcap",
    "lse",
    "causal",
    "window",
    "mask",
    "lengths",
    "varlen",  # sequences without padding
    "paged",  # keys in the pages of a cache
    "heads",  # sinks, and slopes of ALiBi
    "hidden",  # what lies at hidden positions reaches the result
    "gqa",
    "layout",  # strides and alignment
    "memory",  # inputs written, outputs unwritten or shared, gaps read
    "backward",
    "subset",  # gradients of some operands only
    "dropout",
    "dtype",  # types of the results
    "state",  # what one call leaves behind for the next
    "empty",
    "contract",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small edit of the tiled backend: ``find``, which occurs once in its source, becomes ``replace``.

    ``seen`` names a public example of the same class of bug, "" where none is known.
    """

    name: str
    family: str
    fault: str
    seen: str
    find: str
    replace: str

    @property
    def target(self) -> str:
        """What the registry loads the mutant by."""
        return f"{__package__}:{self.name}"

    def edited(self) -> str:
        """The source with the edit made. Raises ``VerificationError`` where it does not fit."""
        times = _source().count(self.find)
        if times != 1:
            raise VerificationError(
                f"mutant {self.name} no longer fits the source of the tiled backend: the text that it replaces occurs"
                f" {times} times, expected once; bring its entry in mutants.toml up to date:\n{self.find}"
            )
        return _source().replace(self.find, self.replace)

    def diff(self) -> str:
        """The edit as a unified diff. Raises ``VerificationError`` where it does not fit."""
        old, new = (text.splitlines(keepends=True) for text in (_source(), self.edited()))
        return "".join(difflib.unified_diff(old, new, "tiled.py", f"tiled.py, {self.name}"))


@dataclass(frozen=True, slots=True)
class Excluded:
    """A class of bug that is no mutant, and why."""

    name: str
    argument: str


@functools.cache
def _data() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((resources.files(__package__) / "mutants.toml").read_text(encoding="utf-8"))


@functools.cache
def mutants() -> tuple[Mutant, ...]:
    """All mutants, by family in the order of ``FAMILIES``."""
    made = (Mutant(**entry) for entry in _data()["mutant"])
    return tuple(sorted(made, key=lambda mutant: FAMILIES.index(mutant.family)))


@functools.cache
def excluded() -> tuple[Excluded, ...]:
    """Bugs that cannot be a mutant here, each with its argument."""
    return tuple(Excluded(**entry) for entry in _data()["excluded"])


@functools.cache
def _source() -> str:
    """The true text of the tiled backend, reached as every backend is: through the registry."""
    tiled = registry.load("tiled")
    if isinstance(tiled, Missing):
        raise VerificationError(f"the mutants are edits of the tiled backend, and {tiled}")
    return inspect.getsource(sys.modules[type(tiled).__module__])


def backend(name: str) -> type:
    """The backend class of mutant ``name``, in a module of its own, with no state from earlier calls.

    Raises:
        KeyError: there is no such mutant.
        VerificationError: its edit does not fit the source of the tiled backend.
    """
    mutant = next((mutant for mutant in mutants() if mutant.name == name), None)
    if mutant is None:
        raise KeyError(name)
    text, file = mutant.edited(), f"<mutant {name}>"
    module = ModuleType(f"{__package__}.{name}", mutant.fault)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # no mtime: never checked again
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    made: Any = module.TiledBackend
    made.name = name
    return made  # type: ignore[no-any-return]
