"""``Fleet``: what many machines can run, put together from what ``attnswitch backends --json`` wrote on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnswitch import reading
from attnswitch.errors import InvalidProblem

__all__ = ["Cell", "Fleet", "Machine", "joined", "read"]

#: Bytes of a file, of which such a document has a thousandth.
_MOST = 2**22

State = Literal["ready", "not ready", "not listed"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One document. ``backends`` are by name, None where they can run; ``libraries`` have their version, or why not.

    ``host``, ``date`` and ``version`` of attnswitch are "" in documents of versions that did not write them.
    """

    backends: dict[str, str | None]
    libraries: dict[str, str]
    devices: tuple[str, ...]
    distrusted: str | None = None
    host: str = ""
    date: str = ""
    version: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Cell(NamedTuple):
    """What one machine says of a backend or a library: whether it is ready, and its version or why it is not."""

    state: State
    text: str


@dataclass(frozen=True)
class Fleet:
    """Machines by names of their own: the host's, with the file's where several have the same."""

    machines: dict[str, Machine]
    files: dict[str, str] = field(default_factory=dict)

    def backends(self) -> dict[str, tuple[Cell, ...]]:
        """Every backend with a cell for each machine, in the order of the first that lists it."""
        return {
            name: tuple(_backend(machine, name) for machine in self.machines.values())
            for name in _names(machine.backends for machine in self.machines.values())
        }

    def libraries(self) -> dict[str, tuple[Cell, ...]]:
        """The same of array libraries."""
        return {
            name: tuple(_library(machine, name) for machine in self.machines.values())
            for name in _names(machine.libraries for machine in self.machines.values())
        }

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        machines = [
            {"name": name, "file": self.files[name]}
            | {key: value for key, value in machine.to_json().items() if key not in ("backends", "libraries")}
            for name, machine in self.machines.items()
        ]
        rows = {
            kind: {
                name: {machine: cell._asdict() for machine, cell in zip(self.machines, cells, strict=True)}
                for name, cells in found.items()
            }
            for kind, found in (("backends", self.backends()), ("libraries", self.libraries()))
        }
        return {"machines": machines, **rows}


def joined(paths: Sequence[Path]) -> Fleet:
    """The machines whose documents are in ``paths``.

    Raises ``InvalidProblem`` for what is no such document or cannot be read, naming the file.
    """
    once = list({path.resolve(): path for path in paths}.values())
    if not once:
        raise InvalidProblem(
            "there is no machine to join: name files that attnswitch backends --json wrote, one of each"
        )
    machines = [read(path) for path in once]
    hosts = [machine.host or path.stem for machine, path in zip(machines, once, strict=True)]
    several, short = Counter(hosts), Counter(zip(hosts, (path.name for path in once), strict=True))
    names = [
        host if several[host] == 1 else f"{host} ({path if short[host, path.name] > 1 else path.name})"
        for host, path in zip(hosts, once, strict=True)
    ]
    if len(set(names)) < len(names):  # a host may be called what another is given as a name
        names = [f"{host} ({path})" for host, path in zip(hosts, once, strict=True)]
    files = dict(zip(names, map(str, once), strict=True))
    return Fleet(dict(zip(names, machines, strict=True)), files)


def read(path: Path) -> Machine:
    """One document. Raises as ``joined``."""
    try:
        return reading.made(Machine, reading.load(path, _MOST), others=True)
    except InvalidProblem as error:
        raise InvalidProblem(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidProblem(f"{path}: it cannot be read: {error.strerror}") from None


def _names(listed: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for names in listed for name in names))


def _backend(machine: Machine, name: str) -> Cell:
    if name not in machine.backends:
        return _absent(machine)
    why = machine.backends[name]
    return Cell("ready", "ready") if why is None else Cell("not ready", why)


def _library(machine: Machine, name: str) -> Cell:
    if name not in machine.libraries:
        return _absent(machine)
    text = machine.libraries[name]
    return Cell("ready" if text[:1].isdigit() else "not ready", text)


def _absent(machine: Machine) -> Cell:
    whose = f"attnswitch {machine.version}" if machine.version else "the attnswitch"
    return Cell("not listed", f"{whose} there does not list it")
