"""Files of this project: one writer, which replaces a file as a whole or leaves it as it was, and one cache folder."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

__all__ = ["beside", "cache_folder", "is_stream", "replace", "sync", "write"]


def replace(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace what ``path`` holds by ``content``; after an ``OSError`` the file is as it was.

    Readers see the old content or the new one, also while other processes and threads replace the same file. If
    ``durable``, the content is on the disk when this returns; else a crash of the machine may lose it. Folders are made
    as needed. A link stays a link, and the file keeps its mode. A pipe or a device is written to.
    """
    if is_stream(path):
        path.write_bytes(content)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = beside(path)
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            write(handle, 0, content)
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(new, path)
    except BaseException:  # a full disk, or Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if durable:
        sync(path.parent)


def beside(path: Path) -> Path:
    """A new name in the folder of ``path``, for a file that is to replace it."""
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")


def is_stream(path: Path) -> bool:
    """Whether ``path`` is a pipe or a device, which no file can replace."""
    return path.exists() and not (path.is_file() or path.is_dir())


def write(handle: int, at: int, content: bytes) -> None:
    """Write all of ``content`` to an open file, starting at byte ``at``."""
    os.lseek(handle, at, os.SEEK_SET)
    while content:
        content = content[os.write(handle, content) :]


def sync(folder: Path) -> None:
    """Put the entries of ``folder`` on the disk, where the system has that (Windows needs none)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cache_folder() -> Path:
    """Where wisdom and compiled kernels are kept; it may not exist yet.

    It is ATTNSWITCH_CACHE_DIR, or else the user's cache folder of this system. For a user without a home it is
    ``attnswitch-<user id>`` in the temporary directory. Kernels are run from there, so it must belong to this user, and
    nobody else may write to it; if that cannot be had, it is a new folder for this process alone, which is not reused.
    Raises ``OSError`` if there is no temporary directory either.
    """
    if named := os.environ.get("ATTNSWITCH_CACHE_DIR"):
        return Path(named)
    from platformdirs import user_cache_path

    try:
        folder = user_cache_path("attnswitch", appauthor=False)
    except RuntimeError:  # no home
        return _homeless()
    return folder if folder.is_absolute() else _homeless()  # an older platformdirs leaves "~" as it is


@functools.cache
def _homeless() -> Path:
    import tempfile  # slow to import

    if hasattr(os, "getuid"):  # not on Windows
        folder = Path(tempfile.gettempdir()) / f"attnswitch-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()  # another user may have put a link there
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="attnswitch-"))
