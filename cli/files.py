"""Files of results: checked before a long run, and written as a whole after it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnswitch import files as durable
from attnswitch.errors import InvalidProblem

__all__ = ["at_the_end", "check", "is_standard", "write"]


def is_standard(target: Path | None) -> bool:
    """Whether ``target`` is ``-``: standard output, which then takes this document alone."""
    return str(target) == "-"


def at_the_end(target: Path) -> bool:
    """Whether ``target`` takes a document only once, at the end: standard output, a pipe or a device."""
    return is_standard(target) or durable.is_stream(target)


def check(targets: Iterable[Path | None], appended: Iterable[Path | None] = ()) -> None:
    """Raise ``InvalidProblem`` if a result cannot be written or two have the same file: for use before a long run.

    Results for the files ``appended`` are added to what they hold.
    """
    seen = set[Path]()
    for path, whole in (*((path, True) for path in targets), *((path, False) for path in appended)):
        if path is None:
            continue
        if is_standard(path) and not whole:
            raise InvalidProblem("-: standard output takes whole documents, and this result is added to a file")
        try:
            if not is_standard(path) and durable.is_stream(path):
                continue
            place = path if is_standard(path) else path.resolve()
            if place in seen:
                raise InvalidProblem(f"{path} is named for two results, and one would take the other's place")
            if not is_standard(path):
                _try(place, whole=whole)
            seen.add(place)
        except InvalidProblem:
            raise
        except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
            raise InvalidProblem(f"{path} cannot be written: {error}") from None


def write(text: str, target: Path | None) -> None:
    """Replace what ``target`` holds by ``text``; None or ``-`` is standard output.

    After an ``OSError`` the file is as it was.
    """
    if target is None or is_standard(target):
        print(text, end="")
        return
    durable.replace(target, text.encode(errors="replace"))


def _try(path: Path, *, whole: bool) -> None:
    """Raise ``OSError`` if ``path`` cannot be written. Nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.open("a").close()
    if whole or not path.exists():
        new = durable.beside(path)
        new.touch()
        new.unlink()
