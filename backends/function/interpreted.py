"""Triton's interpreter on the CPU, for kernels of users: when it runs, and what it cannot do."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from typing import Any

__all__ = ["VARIABLE", "interprets", "untimed"]

#: Triton reads it as it is imported.
VARIABLE = "TRITON_INTERPRET"


def interprets() -> bool:
    """Whether Triton is to interpret kernels in this process."""
    return os.environ.get(VARIABLE) == "1"


def untimed(modules: Iterable[types.ModuleType]) -> None:
    """Have autotuned kernels of ``modules`` take the first of their configs: timing asks for a GPU's driver."""
    for module in modules:
        for kernel in list(vars(module).values()):
            found: Any = kernel
            while hasattr(found, "fn") and type(found).__module__.startswith("triton."):
                if hasattr(found, "_bench"):
                    found._bench = _equally_fast
                found = found.fn


def _equally_fast(*arguments: Any, **named: Any) -> float:
    return 0.0
