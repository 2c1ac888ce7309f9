"""The files of ``src``: read once, named as an ``#include`` names them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FOLDER", "files", "of_gpus"]

#: Where a compiler that reads files finds them.
FOLDER = Path(__file__).parents[1] / "src"


@functools.cache
def files() -> Mapping[str, str]:
    """Every source by its path below ``src``."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".cu", ".cuh", ".hpp", ".cpp"))
    return {path.relative_to(FOLDER).as_posix(): path.read_text() for path in paths}


@functools.cache
def of_gpus() -> Mapping[str, str]:
    """The sources that a GPU's kernels are made of: the emulator is not among them."""
    return {name: text for name, text in files().items() if not name.startswith("emulator/")}
