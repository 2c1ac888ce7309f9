"""``Store``: the file of a machine's wisdom, to which any number of processes append at once.

Writers take turns by a lock beside the file; the system releases it when its holder dies. A record is a line that is on
the disk before ``append`` returns. So a process that is killed, or a machine that loses power, can leave at most an
unfinished last line, which nobody was told is there. Readers take no lock and ignore such a line; the next writer cuts
it off. A change to anything but the end is written as a new file that replaces the old one.

A file has at most ``MOST`` bytes: a writer that would pass it keeps the newest of all lines that say the same, and no
more of them than half of it holds. Readers read no more than the end of a file that is larger nevertheless.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attnswitch import files
from attnswitch.errors import InvalidProblem
from attnswitch.wisdom.compact import fitting, newest
from attnswitch.wisdom.record import LONGEST, OtherSchema, Record, Verdict, from_line, to_line

__all__ = ["BRIEF", "MOST", "NAME", "Contents", "Damage", "Store", "here"]

NAME = "wisdom.jsonl"
#: Bytes of a file: thousands of records, which are read in half a second.
MOST = 2**20
#: Mismatches that are looked for in what is not read.
_OLD = 1000
#: Seconds to wait for other writers, of which each needs milliseconds; and where an application waits for its result.
_PATIENCE, BRIEF = 60.0, 2.0
_POLL = 0.005


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that is no record: where it is, and what is wrong with it. Line 0 is all that is not read."""

    path: Path
    line: int
    why: str
    #: The line itself if another version can read it, else empty.
    other: bytes = b""
    #: Bytes before the first line that is counted.
    before: int = 0

    def __str__(self) -> str:
        place = f", line {self.line}" if self.line else ""
        return f"{self.path}{place}{f' after byte {self.before:,}' if self.line and self.before else ''}: {self.why}"


@dataclass(slots=True)
class Contents:
    """The records of a store, those of the files beneath first, and its damaged lines."""

    records: list[Record] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)

    @property
    def others(self) -> list[bytes]:
        """The lines that another version can read."""
        return [damage.other for damage in self.damaged if damage.other]


@dataclass(frozen=True, slots=True)
class Store:
    """One file that is read and written, and files beneath it that are only read."""

    path: Path
    beneath: tuple[Path, ...] = ()

    def read(self) -> Contents:
        """Every record, in the order of the lines. A file that is missing or cannot be read holds none."""
        return _all(*self.beneath, self.path)

    def lower(self) -> Contents:
        """The contents of the files beneath alone."""
        return _all(*self.beneath)

    def append(self, records: Iterable[Record], patience: float = _PATIENCE) -> None:
        """Add ``records``; they are on the disk when this returns. After an ``OSError`` none of them was added.

        It is a ``TimeoutError`` if another process was writing for ``patience`` seconds, such as one that is stopped.
        """
        lines = b"".join(map(to_line, records))
        if not lines:
            return
        with self._locked(patience):
            self._make_room(len(lines))
            self._add(lines)

    def _add(self, lines: bytes) -> None:
        with self._opened() as handle:
            end = _end(handle)
            os.ftruncate(handle, end)
            try:
                files.write(handle, end, lines)
                os.fsync(handle)
            except BaseException as error:  # a full disk, or Ctrl-C
                os.ftruncate(handle, end)
                if isinstance(error, OSError):
                    error.filename = str(self.path)  # of an open file it is not told
                raise

    def _make_room(self, size: int) -> None:
        """Compact the file if ``size`` bytes more would be too much."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size + size > MOST:
                before = _everything(self.path)
                files.replace(self.path, b"".join(_lines(newest(before.records), before.others, MOST // 2)))

    def check(self) -> None:
        """Raise ``InvalidProblem`` if nothing can be appended: for use before a long run."""
        try:
            with self._locked(), self._opened():
                pass
        except OSError as error:
            raise InvalidProblem(
                f"{self.path} cannot be written ({error.strerror or error}): what is measured would be forgotten;"
                " ATTNSWITCH_CACHE_DIR names another folder"
            ) from None

    def change(self, decide: Callable[[list[Record]], Iterable[Record]], *, others: bool = True) -> int:
        """Replace the records by what ``decide`` makes of them, and return by how many lines the file is shorter.

        Damaged lines are dropped. Lines that another version wrote are kept if ``others``. The files beneath do not
        change. After an ``OSError`` nothing has changed.
        """
        with self._locked():
            before = _everything(self.path)
            whole = before.others if others else []
            lines = _lines([*decide(before.records)], whole, MOST)
            files.replace(self.path, b"".join(lines))
            return len(before.records) + len(before.others) - len(lines)

    @contextlib.contextmanager
    def _locked(self, patience: float = _PATIENCE) -> Iterator[None]:
        from filelock import FileLock, Timeout

        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_suffix(".lock"), timeout=patience, poll_interval=_POLL)
        try:
            lock.acquire()
        except Timeout:
            raise TimeoutError(
                f"{self.path} could not be written for {patience:g} s, as another process holds {lock.lock_file}: see"
                " whether one is stopped, and end it"
            ) from None
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, open to read and write; it is made if it is missing."""
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
            _read(path, contents)
    return contents


def _everything(path: Path) -> Contents:
    """What a file holds, and the mismatches in what is not read of it."""
    contents = Contents()
    with contextlib.suppress(FileNotFoundError):
        start = _read(path, contents)
        contents.records[:0] = _verdicts(path, start)
    return contents


def _read(path: Path, into: Contents) -> int:
    """Read the last ``MOST`` bytes of a file; how many come before them. Raises ``OSError`` for what is no file."""
    if files.is_stream(path):  # which may never end
        raise OSError(f"{path} is no file")
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - MOST)
        file.seek(start)
        content = file.read(MOST)
    if start:
        cut = content.find(b"\n") + 1  # the end of a line that begins before
        start, content = start + cut, content[cut:]
        why = (
            f"its first {start:,} bytes are not read, which is too much: `attnswitch wisdom forget --stale` shortens it"
        )
        into.damaged.append(Damage(path, 0, why))
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # after the last newline: nothing, or a line that is being written
        if not line or line.startswith(b'{"wisdom":'):  # the head of a file that was exported
            continue
        try:
            into.records.append(from_line(line))
        except OtherSchema as other:
            into.damaged.append(Damage(path, number, str(other), line + b"\n", start))
        except InvalidProblem as problem:
            into.damaged.append(Damage(path, number, str(problem), before=start))
    return start


def _verdicts(path: Path, end: int) -> list[Record]:
    """The last verdicts before byte ``end`` of a file, of which only these are looked at."""
    found = deque[bytes](maxlen=_OLD)
    with path.open("rb") as file:
        while file.tell() < end and (line := file.readline(LONGEST)):
            if b'"kind":"verdict"' in line:
                found.append(line)
    records = []
    for line in found:
        with contextlib.suppress(InvalidProblem):
            records.append(from_line(line))
    return [record for record in records if isinstance(record, Verdict)]


def _lines(records: list[Record], others: list[bytes], size: int) -> list[bytes]:
    """The lines of a new file of at most ``size`` bytes; those of another version have a quarter of it."""
    kept, room = list[bytes](), size // 4
    for line in reversed(others):
        room -= len(line)
        if room < 0:
            break
        kept.append(line)
    return [*reversed(kept), *fitting(records, size - sum(map(len, kept)))]


def _end(handle: int) -> int:
    """Where the last whole line of a file ends: after it is what a writer left unfinished."""
    at = os.lseek(handle, 0, os.SEEK_END)
    while at:
        start = max(0, at - LONGEST)
        os.lseek(handle, start, os.SEEK_SET)
        if found := os.read(handle, at - start).rfind(b"\n") + 1:
            return start + found
        at = start
    return 0


def here() -> Store:
    """The user's store, above the file that an administrator may have put there for all users."""
    from platformdirs import site_data_path

    return Store(files.cache_folder() / NAME, (site_data_path("attnswitch") / NAME,))
