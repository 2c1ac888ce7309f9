"""Where results are written: found out before a long run, and put there whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnswitch import files as durable
from attnswitch.errors import InvalidProblem

__all__ = ["at_the_end", "check", "is_standard", "write"]


def is_standard(target: Path | None) -> bool:
    """Whether ``target`` is ``-``, standard output, which is then for that document alone."""
    return str(target) == "-"


def at_the_end(target: Path) -> bool:
    """Whether ``target`` takes a document once, when it is whole: standard output, a pipe or a device."""
    return is_standard(target) or durable.is_stream(target)


def check(targets: Iterable[Path | None], appended: Iterable[Path | None] = ()) -> None:
    """Find out before a long run, not after it, that a result could not be written, or would be lost to another.

    What goes to the files ``appended`` is added to what they hold. Raises ``InvalidProblem``.
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
        except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
            raise InvalidProblem(f"{path} cannot be written: {error}") from None


def write(text: str, target: Path | None) -> None:
    """Put ``text`` in the place of ``target``, whole or not at all; None or ``-`` is standard output.

    Raises ``OSError``; what was there before is then left as it was.
    """
    if target is None or is_standard(target):
        print(text, end="")
        return
    durable.replace(target, text.encode(errors="replace"))


def _try(path: Path, *, whole: bool) -> None:
    """Leave nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.open("a").close()
    if whole or not path.exists():
        new = durable.beside(path)
        new.touch()
        new.unlink()
