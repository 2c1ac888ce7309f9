"""Processes below another, as they are seen from outside, and how they are ended."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from importlib import util
from pathlib import Path

__all__ = ["below", "children", "command", "descendants", "end_below", "is_compilers", "state"]

#: How often processes are looked for that others start while they are ended.
_GENERATIONS = 100
#: How often a process without a command line is looked at again, and after how many seconds each.
_BEGINNING, _MOMENT = 20, 0.005
#: What Python runs for ``multiprocessing``, with numbers and names alone; and variables by which it would find other
#: modules of these names.
_OF_PYTHON = re.compile(
    r"from multiprocessing\.(resource_tracker import main;main\(\d+\)"
    r"|forkserver import main; main\(\d+, \d+, [\w ,.:*/'\[\]{}-]*\))"
)
_WHERE = (b"PYTHONPATH", b"PYTHONHOME")


def descendants(root: int) -> dict[int, str]:
    """Processes below ``root`` that still run, by number, with their command lines."""
    return {number: command(number) for number in below(root) if _state_of(number) != "Z"}


def end_below(root: int) -> None:
    """Stop ``root``, and kill all processes below it, those too that are started meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(root, signal.SIGSTOP)
    for _ in range(_GENERATIONS):
        there = descendants(root)
        for number in there:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if not there:
            return


def below(root: int) -> set[int]:
    """Numbers of the processes below ``root``, those that ended and were not asked for too."""
    found, level = set[int](), {root}
    while level:
        level = {number for each in level for number in children(each)} - found
        found |= level
    return found


def command(number: int) -> str:
    """The command line of a process, or its name in brackets where it has none; "" if it ended."""
    try:
        line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return line or f"[{Path(f'/proc/{number}/comm').read_bytes().decode(errors='replace').strip()}]"
    except OSError:
        return ""


def children(root: int) -> set[int]:
    """Processes that ``root`` started itself."""
    found = set()
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{root}/task"):
            with open(f"/proc/{root}/task/{task}/children", "rb", buffering=0) as file:
                found |= set(map(int, file.read().split()))
    return found


def state(number: int) -> str:
    """The state of a process as a word: "stopped", or "" for what needs no telling."""
    return {"T": "stopped", "t": "traced"}.get(_state_of(number), "")


def _state_of(number: int) -> str:
    """The letter that the system has for it; "" for a process that is not there."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]


def is_compilers(number: int) -> bool:
    """Whether a process is one that compilers keep for later, by what Python was told to run in it.

    A name alone is easily given; a process that writes over its own command line is not seen through.
    """
    try:
        words = _line(number).decode(errors="replace").split("\0")[1:-1]
        environment = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        if not os.path.samefile(f"/proc/{number}/exe", "/proc/self/exe"):
            return False
        words = _without_options(words)
        if words[:1] == ["-c"]:
            own = all(os.environb.get(name) == of for name, of in map(_variable, environment) if name in _WHERE)
            return own and any(environment) and len(words) == 2 and _OF_PYTHON.fullmatch(words[1]) is not None
        return bool(words) and os.path.samefile(words[0], _of_torch())
    except OSError:
        return False


def _line(number: int) -> bytes:
    """The command line of a process. While a program begins in it, it has none; that is waited for."""
    for _ in range(_BEGINNING):
        if line := Path(f"/proc/{number}/cmdline").read_bytes():
            return line
        time.sleep(_MOMENT)
    return b""


def _without_options(words: list[str]) -> list[str]:
    """What Python is told, from the program on; some options have a word of their own."""
    while words and words[0].startswith("-") and words[0] != "-c":
        words = words[1 + (words[0] in ("-X", "-W")) :]
    return words


def _variable(text: bytes) -> tuple[bytes, bytes]:
    name, _, value = text.partition(b"=")
    return name, value


@functools.cache
def _of_torch() -> str:
    """The program of the processes in which torch compiles; "" without torch."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    return os.path.join(os.path.dirname(found.origin), "_inductor", "compile_worker", "__main__.py")
