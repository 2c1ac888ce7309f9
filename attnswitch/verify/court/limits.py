"""How much of its resources a process may use, which any process of the same user may change for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType

resource: ModuleType | None = None
with suppress(ImportError):  # not of every system
    import resource

__all__ = ["held", "restored"]

#: Least and most of each resource, by the name that the system has for it.
Limits = Mapping[str, tuple[int, int]]


def held() -> Limits:
    """The limits of this process."""
    if resource is None:
        return {}
    names = (name for name in vars(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def restored(before: Limits) -> bool:
    """Whether the limits of this process are ``before``, or are so again."""
    if resource is None or held() == before:
        return True
    for name, limit in before.items():
        with suppress(OSError, ValueError):  # who may not raise the most may raise the least
            resource.setrlimit(getattr(resource, name), limit)
    return held() == before
