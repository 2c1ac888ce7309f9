"""What was compiled, on disk: by content, shared by all processes, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import platformdirs

from attnswitch import files

__all__ = ["folder", "kept"]

#: Threads of a process write to one name before they move it.
_ONE_AT_A_TIME = threading.Lock()


def folder() -> Path:
    """Where builds are kept: ``ATTNSWITCH_CACHE_DIR``, or the user's cache of this system."""
    chosen = os.environ.get("ATTNSWITCH_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("attnswitch", appauthor=False)


def kept(parts: tuple[str, ...], suffix: str, make: Callable[[], bytes]) -> Path:
    """The file that ``make`` makes from ``parts``, which say all that it depends on; made where it is not there yet.

    Two processes may both make it: each moves its own, whole, to the same name. A folder that cannot be written to is
    no reason to fail: the file is then a temporary one.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    target = folder() / "cuda" / digest[:2] / (digest + suffix)
    if target.is_file():
        return target
    content = make()
    try:
        with _ONE_AT_A_TIME:
            files.replace(target, content)
    except OSError:
        handle, temporary = tempfile.mkstemp(suffix=suffix)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return Path(temporary)
    return target
