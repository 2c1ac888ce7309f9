"""``Store``: the file of a machine's wisdom, to which any number of processes append at once.

Records are lines that are only ever appended, by one writer at a time (a lock beside the file, which the system lets
go of when its holder dies) and each on the disk before ``append`` returns. So a process that is killed, or a machine
that loses power, can leave at most one thing behind: the beginning of a line at the end, which nobody was told is
there. Readers do not take the lock and leave such a tail out; the next writer cuts it off, so that it never grows into
the line after it. What has to change more than the end is written as a new file and put in its place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attnswitch import files
from attnswitch.errors import InvalidProblem
from attnswitch.wisdom.record import OtherSchema, Record, from_line, to_line

__all__ = ["NAME", "Contents", "Damage", "Store", "here"]

NAME = "wisdom.jsonl"
#: Seconds to wait for other writers, each of which needs milliseconds.
_PATIENCE = 60.0
_POLL = 0.005
#: Bytes looked through at a time for where the last whole line ends.
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that is no record: where it is, and why."""

    path: Path
    line: int
    why: str
    #: The line itself, where it is whole: one of another schema.
    other: bytes = b""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.why}"


@dataclass(slots=True)
class Contents:
    """What a store holds: its records, those of the files beneath first, and its damaged lines."""

    records: list[Record] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Store:
    """One file that is written, and files beneath it that are read as well."""

    path: Path
    beneath: tuple[Path, ...] = ()

    def read(self) -> Contents:
        """Every record, oldest first. A file that is not there, or cannot be read, holds none."""
        return _all(*self.beneath, self.path)

    def lower(self) -> Contents:
        """The same of the files beneath alone."""
        return _all(*self.beneath)

    def append(self, records: Iterable[Record]) -> None:
        """Add ``records``, which are on the disk when this returns. Raises ``OSError``, and has then added none."""
        lines = b"".join(map(to_line, records))
        if not lines:
            return
        with self._locked(), self._opened() as handle:
            end = _whole(handle)
            os.ftruncate(handle, end)
            try:
                files.write(handle, end, lines)
                os.fsync(handle)
            except BaseException:  # a full disk, or Ctrl-C
                os.ftruncate(handle, end)
                raise

    def check(self) -> None:
        """Find out before a long run, not after it, that nothing could be appended. Raises ``InvalidProblem``."""
        try:
            with self._locked(), self._opened():
                pass
        except OSError as error:
            raise InvalidProblem(
                f"{self.path} cannot be written ({error.strerror or error}): what is measured would be forgotten;"
                " ATTNSWITCH_CACHE_DIR names another folder"
            ) from None

    def change(self, decide: Callable[[list[Record]], Iterable[Record]], *, others: bool = True) -> int:
        """Put what ``decide`` makes of the records in their place, all or nothing; by how many lines they are fewer.

        Damaged lines go, and lines of another schema stay, if ``others`` are to. What lies beneath stays as it is.
        Raises ``OSError``.
        """
        with self._locked():
            before = Contents()
            with contextlib.suppress(FileNotFoundError):
                _read(self.path, self.path.read_bytes(), before)
            after = [to_line(record) for record in decide(before.records)]
            whole = [damage.other for damage in before.damaged if damage.other]
            lines = [*whole, *after] if others else after
            files.replace(self.path, b"".join(lines))
            return len(before.records) + len(whole) - len(lines)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE, poll_interval=_POLL):
            yield

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The file to read and write, which is there from now on."""
        new = not self.path.exists()
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            yield handle
        finally:
            os.close(handle)
        if new:
            for folder in (self.path.parent, self.path.parent.parent):
                files.sync(folder)


def _all(*paths: Path) -> Contents:
    contents = Contents()
    for path in paths:
        with contextlib.suppress(OSError):
            _read(path, path.read_bytes(), contents)
    return contents


def _read(path: Path, content: bytes, into: Contents) -> None:
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # after the last newline: nothing, or a line that is being written
        if not line or line.startswith(b'{"wisdom":'):  # the head of a file that was exported
            continue
        try:
            into.records.append(from_line(line))
        except OtherSchema as other:
            into.damaged.append(Damage(path, number, str(other), line + b"\n"))
        except InvalidProblem as problem:
            into.damaged.append(Damage(path, number, str(problem)))


def _whole(handle: int) -> int:
    """Where the last line that was written whole ends."""
    end = os.lseek(handle, 0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        os.lseek(handle, start, os.SEEK_SET)
        block = os.read(handle, end - start)
        if (newline := block.rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def here() -> Store:
    """The user's store, above the one that the machine's administrator may have left for all."""
    from platformdirs import site_data_path

    return Store(files.cache_folder() / NAME, (site_data_path("attnswitch") / NAME,))
