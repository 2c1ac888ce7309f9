"""The one place where a Triton kernel is launched."""

from __future__ import annotations

from typing import Any

__all__ = ["start"]


def start(kernel: Any, programs: int, *arguments: Any, **flags: Any) -> None:
    """Launch ``programs`` programs of ``kernel`` on the current stream of the current device."""
    kernel[(programs,)](*arguments, **flags)
