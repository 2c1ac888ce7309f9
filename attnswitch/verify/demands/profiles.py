"""``Profile``: requirements under a name, for what a kernel is used for; those of the package are in profiles.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of
from attnswitch.verify.demands.requirement import Requirement

__all__ = ["Profile", "named", "profiles"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What it is for, and what it requires."""

    about: str
    requirements: tuple[Requirement, ...]


def named(name: str) -> Profile:
    """The profile called ``name``. Raises ``InvalidProblem`` if there is none."""
    if name not in profiles():
        raise InvalidProblem(f"profile {name!r} is not known; {one_of(name, profiles())}")
    return profiles()[name]


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Those of the package, by name."""
    text = (resources.files(__package__) / "profiles.toml").read_text(encoding="utf-8")
    return {name: _read(name, found) for name, found in tomllib.loads(text).items()}


def _read(name: str, found: Any) -> Profile:
    values = reading.table(found, {"about": str, "require": list[str]}, name)
    return Profile(values["about"], tuple(map(Requirement.parse, values["require"])))
