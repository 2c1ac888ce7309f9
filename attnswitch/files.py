"""Files of this project: one writer, which replaces a file as a whole or leaves it as it was, and one cache folder."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

__all__ = ["beside", "cache_folder", "distrust", "house_cupy", "is_stream", "read_own", "replace", "sync", "write"]


def replace(path: Path, content: bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace what ``path`` holds by ``content``; after an ``OSError`` the file is as it was.

    Readers see the old content or the new one, also while other processes and threads replace the same file. If
    ``durable``, the content is on the disk when this returns; else a crash of the machine may lose it. Folders are made
    as needed. A link stays a link, and the file keeps its mode. A pipe or a device is written to. If ``private``,
    whatever is there is replaced, and no other user may read the file, nor the folders that are made.
    """
    if not private and is_stream(path):
        path.write_bytes(content)
        return
    path = path.resolve()
    _make(path.parent, 0o700 if private else 0o777)
    new = beside(path)
    try:
        handle = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600 if private else 0o644
        )
        try:
            write(handle, 0, content)
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        if not private:
            with contextlib.suppress(FileNotFoundError):
                new.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(new, path)
    except BaseException:  # a full disk, or Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if durable:
        sync(path.parent)


def _make(folder: Path, mode: int) -> None:
    """Make it and those above it that are missing: ``Path.mkdir`` would give ``mode`` to the last alone."""
    if not folder.is_dir():
        _make(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)


def read_own(path: Path) -> bytes:
    """What a file holds that only this user or the administrator can have written.

    Raises ``PermissionError`` where another can have, and any other ``OSError`` where it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if why := _of_another(facts, stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} {why}, and is not used: remove it")
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{path} is no file")
        return file.read()


def distrust(folder: Path) -> str | None:
    """Why code that lies in ``folder`` is not run: another user can put it there. None where none can, or it is new."""
    try:
        why = _of_another(folder.stat(), stat.S_IWOTH)
    except OSError:
        return None
    return why and f"{folder} {why}: nothing compiled is kept there, nor run from there; name a folder of your own"


def _of_another(facts: os.stat_result, writable: int) -> str | None:
    """Whose it is, if not this user's or the administrator's; or that others may write to it, by the bits named."""
    if not hasattr(os, "getuid"):  # Windows keeps a user's folders to the user
        return None
    if facts.st_uid not in (0, os.getuid()):
        return f"belongs to user {facts.st_uid}"
    return "can be written by other users" if facts.st_mode & writable else None


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


def house_cupy() -> None:
    """Before CuPy is imported: without a home it would keep its kernels in a folder "~" of the current one."""
    if "CUPY_CACHE_DIR" not in os.environ and not os.path.isabs(os.path.expanduser("~")):
        os.environ["CUPY_CACHE_DIR"] = str(cache_folder() / "cupy")


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
