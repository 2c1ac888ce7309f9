"""``Signature``: what a record was made with. It holds as long as this is the same here."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing

__all__ = ["Signature", "machine", "sign"]

#: What a kernel is written in.
_SOURCES = frozenset((".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".c"))
#: Packages whose versions count, by the library that a backend is native to. A Device knows the other versions.
_PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch", "triton"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
}
#: Software in a Device's versions that a CPU does not run.
_OF_GPUS = ("cuda", "cudnn", "driver", "cupy", "triton")
#: Package of the built-in backends. Each file directly in it is a backend by itself.
_HOME = "attnswitch.backends"
#: Sources that their kernels use outside their own folders.
_SHARED = (Path(registry.__file__).parents[1] / "problem/philox.py",)
_OWN = "attnswitch.backends.own"


@dataclass(frozen=True, slots=True)
class Signature:
    """``device`` as ``machine`` names it, names and versions of software, and a hash of the backend's source.

    What compiled the backend's kernels is software too (``Backend.toolchain``).
    """

    device: str
    versions: tuple[tuple[str, str], ...]
    source: str

    def __hash__(self) -> int:
        return hash((self.device, self.source))  # hashing the versions as well would slow down every look-up

    def differs(self, here: Signature) -> str | None:
        """Why a record with this signature does not hold under ``here``, as half a sentence; None if they are equal."""
        if self.device != here.device:
            return f"it was measured on {self.device}, and this is {here.device}"
        then, now = dict(self.versions), dict(here.versions)
        for name in sorted(then.keys() | now.keys()):
            before, after = then.get(name, "absent"), now.get(name, "absent")
            if before != after:
                return f"it was measured with {name} {before}, and here it is {after}"
        if self.source != here.source:
            return f"the backend's source has changed since (hash {self.source}, here {here.source})"
        return None


def machine(device: Device) -> str:
    """A device as a signature names it: its name, and its number of cores or SMs."""
    return f"{device}, {os.cpu_count()} cores" if device.kind == "cpu" else f"{device}, {device.sms} SMs"


def sign(name: str, device: Device) -> Signature | Missing:
    """The signature of backend ``name`` on ``device`` as both are here; else why there is none.

    Worked out once for each backend and device, and again when the registry loads another backend under that name.
    Never raises for a backend that is broken or unknown.
    """
    try:
        return _sign(name, registry.load(name), device)
    except InvalidProblem:
        return Missing(f"backend {name!r} is not known here")


@functools.lru_cache(maxsize=1024)
def _sign(name: str, backend: Backend | Missing, device: Device) -> Signature | Missing:
    if isinstance(backend, Missing):
        return Missing(f"backend {name!r} cannot be loaded here: {backend}")
    libraries = dict.fromkeys((backend.library, *backend.libraries))
    packages = [package for library in libraries for package in _PACKAGES.get(library, ())]
    versions = {package: version for package in packages if (version := _version(package)) is not None}
    versions |= dict(device.versions) if set(libraries) != {"numpy"} else {}
    try:
        versions |= backend.toolchain(device)
    except Exception as error:  # a broken plug-in has no wisdom
        return Missing(f"backend {name!r} cannot say what compiled its kernels: {type(error).__name__}: {error}")
    if device.kind == "cpu":
        versions = {name: version for name, version in versions.items() if name not in _OF_GPUS}
    return Signature(machine(device), tuple(sorted(versions.items())), _source(backend))


@functools.cache
def _version(package: str) -> str | None:
    from importlib import metadata  # slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source(backend: Any) -> str:
    """A hash of the folder of the backend's class, or of its file if other backends share the folder.

    The hash of a built-in backend covers what the built-in backends share as well.
    """
    module = type(backend).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return "none"
    package = module.rpartition(".")[0]
    place = Path(file) if package in ("", _HOME) else Path(file).parent
    return _hash(place, *(_shared() if f"{package}.".startswith(f"{_HOME}.") else ()))


@functools.cache
def _shared() -> tuple[Path, ...]:
    spec = importlib.util.find_spec(_OWN)
    assert spec is not None
    assert spec.origin is not None
    return (*_SHARED, Path(spec.origin).parent)


@functools.cache
def _hash(*places: Path) -> str:
    """Twelve digits of the SHA-256 of files; of a folder, the names and contents of all its sources count."""
    import hashlib  # slow to import

    digest = hashlib.sha256()
    try:
        for place in places:
            files = sorted(path for path in place.rglob("*") if path.suffix in _SOURCES) if place.is_dir() else [place]
            for path in files:
                digest.update(f"{path.relative_to(place).as_posix()}\0".encode())
                digest.update(path.read_bytes())
    except OSError:  # a package in an archive; changes to it go unnoticed
        return "unread"
    return digest.hexdigest()[:12]
