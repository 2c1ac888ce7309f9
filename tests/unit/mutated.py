"""A kernel that is emulated with other instructions than its own, to show that the emulator sees what is missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

__all__ = ["compile_with"]

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")


def compile_with(kernel: str, macros: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Hopper's ``kernel`` compiled with ``macros`` behind the instructions; all builds of a test are alike."""
    source, build = folder / "mutant.cu", emulator.build
    source.write_text(f'#include "hopper/instructions.cuh"\n{macros}\n#include "hopper/{kernel}.cu"\n')
    mutant: list[Any] = []

    def built(variant: Any) -> Any:
        if variant.kernel != kernel:
            return build(variant)
        if not mutant:
            mutant.append(emulator.load(str(source), kernel, {**variant.sizes, **dict(variant.flags)}))
        return mutant[0]

    monkeypatch.setattr(emulator, "build", built)
