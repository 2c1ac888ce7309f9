"""Files that are on the disk whole, or as they were: who is killed, or fills the disk, leaves nothing by halves."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["beside", "is_stream", "replace", "sync", "write"]


def replace(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of what a file holds: all of it, on the disk, or ``OSError`` and the file as it was.

    A link stays one, and the file's mode what it was. A pipe or a device, whose place no file can take, is written to.
    """
    if is_stream(path):
        path.write_bytes(content)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = beside(path)
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
        try:
            write(handle, 0, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        if path.exists():
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(new, path)
    except BaseException:  # a full disk, or Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def beside(path: Path) -> Path:
    """Where this process writes what is to take the place of ``path``."""
    return path.with_name(f"{path.name}.{os.getpid()}.new")


def is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, in whose place no file may come."""
    return path.exists() and not (path.is_file() or path.is_dir())


def write(handle: int, at: int, content: bytes) -> None:
    """Write all of ``content`` to an open file, from ``at`` on."""
    os.lseek(handle, at, os.SEEK_SET)
    while content:
        content = content[os.write(handle, content) :]


def sync(folder: Path) -> None:
    """The folder's own entry on the disk, where the system has that (Windows needs none)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
