"""What was compiled, on disk: by content, shared by all processes, written whole or not at all.

It is code that this machine will run. So a file counts only where nobody but this user can have written it, and where
it is whole: a hash of its name and content stands at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from attnswitch import files

__all__ = ["distrust", "folder", "kept"]

#: A lock for each file that a thread is making: another that wants it waits, and finds it there.
_making: weakref.WeakValueDictionary[Path, threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()
#: Bytes of the hash.
_SEAL = 32


def folder() -> Path:
    """Where it is kept; it may not exist yet."""
    return files.cache_folder() / "cuda"


def distrust() -> str | None:
    """Why nothing is kept here, nor run from here; None where it is."""
    return files.distrust(files.cache_folder()) or files.distrust(folder())


def kept(parts: tuple[str, ...], suffix: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` makes from ``parts``, which say all that it depends on; made where it is not there yet, or damaged.

    Two processes may both make it: each moves its own, whole, to the same name. A folder that cannot be written to, or
    that others can write to, is no reason to fail: nothing is kept then.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if distrust():
        return make()
    target = folder() / digest[:2] / (digest + suffix)
    content = _read(target)
    if content is not None:
        return content
    with _guard:
        lock = _making.setdefault(target, threading.Lock())
    with lock:
        content = _read(target)
        if content is None:
            content = make()
            with contextlib.suppress(OSError):
                files.replace(target, content + _seal(target, content), private=True)
        return content


def _read(target: Path) -> bytes | None:
    try:
        whole = files.read_own(target)
    except OSError:
        return None
    content, seal = whole[:-_SEAL], whole[-_SEAL:]
    return content if seal == _seal(target, content) else None


def _seal(target: Path, content: bytes) -> bytes:
    return hashlib.sha256(target.name.encode() + b"\0" + content).digest()
