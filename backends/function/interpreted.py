"""Triton's interpreter on the CPU, for kernels of users: when it runs, and what it cannot do."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from typing import Any

__all__ = ["VARIABLE", "interprets", "untimed", "without_gpu"]

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


def without_gpu() -> None:
    """Have Triton say that its device is the CPU, if it finds no GPU: files ask it as they are imported."""
    try:
        from triton.backends import backends
        from triton.runtime import driver
    except ImportError:  # the file that imports it says so
        return
    if not any(backend.driver.is_active() for backend in backends.values()):
        driver.set_active(_Cpu())


class _Cpu:
    """What stands for the driver of a GPU: neither CUDA nor HIP, so that a file takes its plainest way."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no GPU is here, and what stands for Triton's driver has no {name}")


def _equally_fast(*arguments: Any, **named: Any) -> float:
    return 0.0
