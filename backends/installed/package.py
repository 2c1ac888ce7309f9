"""Whether a library is installed and in which version, read from metadata: importing nothing."""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["Package"]


class Package(NamedTuple):
    """A library as pip knows it: the versions whose calls are known here, and the command that installs it."""

    distribution: str
    install: str
    least: str = ""
    #: The first version that is too new, if there is one.
    below: str = ""

    @property
    def version(self) -> str | None:
        """What is installed, or None."""
        return _version(self.distribution)

    def missing(self) -> str | None:
        """Why it cannot be used here, with the command that mends that; None if it can."""
        found = self.version
        if found is None:
            return f"{self.distribution} is not installed: {self.install}"
        if not _between(found, self.least, self.below):
            wanted = " and ".join(
                part for part in (self.least and f"from {self.least} on", self.below and f"before {self.below}") if part
            )
            return f"{self.distribution} {found} is installed, and its calls are known {wanted}: {self.install}"
        return None


@functools.cache
def _version(distribution: str) -> str | None:
    from importlib import metadata  # slow to import

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _between(version: str, least: str, below: str) -> bool:
    from packaging.version import InvalidVersion, Version  # slow to import

    try:
        found = Version(version)
    except InvalidVersion:
        return False
    known = Version(found.public)  # without what a build adds, such as +cu130
    return (not least or known >= Version(least)) and (not below or known < Version(below))
