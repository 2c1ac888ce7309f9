"""Where results are written: found out before a long run, and put there whole after it and on its way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnswitch import durable
from attnswitch.errors import InvalidProblem

__all__ = ["check", "is_standard", "write"]


def is_standard(target: Path | None) -> bool:
    """Whether ``target`` is ``-``, standard output, which is then for that document alone."""
    return str(target) == "-"


def check(targets: Iterable[Path | None]) -> None:
    """Find out before a long run, not after it, that a result could not be written, or would be lost to another.

    Raises ``InvalidProblem``.
    """
    seen: set[Path] = set()
    for path in targets:
        if path is None:
            continue
        try:
            place = path if is_standard(path) else path.resolve()
            if not is_standard(path):
                _try(place)
            if place in seen:
                raise InvalidProblem(f"{path} is named for two results, and one would take the other's place")
            if not durable.is_stream(place):
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


def _try(path: Path) -> None:
    """Leave nothing behind; a pipe is not opened before there is something for its reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not durable.is_stream(path):
        if path.exists():
            path.open("a").close()
        _beside(path).touch()
        _beside(path).unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
