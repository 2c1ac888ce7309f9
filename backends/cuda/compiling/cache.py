"""What was compiled, on disk: by content, shared by all processes, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from attnswitch import files

__all__ = ["kept"]

#: A lock for each file that a thread is making: another that wants it waits, and finds it there.
_making: weakref.WeakValueDictionary[Path, threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def kept(parts: tuple[str, ...], suffix: str, make: Callable[[], bytes]) -> Path:
    """The file that ``make`` makes from ``parts``, which say all that it depends on; made where it is not there yet.

    Two processes may both make it: each moves its own, whole, to the same name. A folder that cannot be written to is
    no reason to fail: the file is then a temporary one.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    target = files.cache_folder() / "cuda" / digest[:2] / (digest + suffix)
    if target.is_file():
        return target
    with _guard:
        lock = _making.setdefault(target, threading.Lock())
    with lock:
        return target if target.is_file() else _made(target, make())


def _made(target: Path, content: bytes) -> Path:
    try:
        files.replace(target, content)
    except OSError:
        handle, temporary = tempfile.mkstemp(suffix=target.suffix)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return Path(temporary)
    return target
