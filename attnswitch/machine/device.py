"""``Device``: what a machine is, as a value. Planning takes one, so plans for absent hardware can be made anywhere."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from attnswitch import files
from attnswitch.errors import InvalidProblem
from attnswitch.names import in_a_line, meant

__all__ = ["KNOWN", "Device", "release"]


@dataclass(frozen=True, slots=True)
class Device:
    """A processor that attention can run on; constructible without the hardware.

    ``memory`` and ``shared_memory`` (per thread block, opt-in) are bytes, 0 where not known or meaningless.
    ``versions`` pairs software names (torch, cuda, cudnn, driver) with version text.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    sms: int = 0
    memory: int = 0
    shared_memory: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    #: Whether it is in this machine; plans for absent hardware ask no backend whether it could run here.
    present: bool = False
    #: Which of this machine's; what is known of one holds for all that are alike.
    index: int = field(default=0, compare=False)

    def __hash__(self) -> int:
        return hash((self.kind, self.name))  # hashing the versions as well would slow down every look-up

    @property
    def where(self) -> str:
        """How torch spells a device of this machine: ``"cpu"`` or ``"cuda:1"``; what is neither is its kind."""
        return f"cuda:{self.index}" if self.kind in ("cuda", "rocm") else self.kind

    @property
    def on_chip(self) -> int:
        """``shared_memory``; where it is not known, what a block has on every GPU from compute capability 8.6 on."""
        return self.shared_memory or 99 * _KIB

    def version(self, software: str) -> tuple[int, ...] | None:
        """Version of ``software`` as numbers, e.g. ``(2, 11, 0)``, or None where not known."""
        text = dict(self.versions).get(software)
        return None if text is None else release(text)

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.kind} ({self.name})"
        return f"{self.kind} ({self.name}, sm_{self.capability[0]}{self.capability[1]})"

    @staticmethod
    @functools.cache
    def cpu() -> Device:
        """The processor of this machine."""
        return Device("cpu", _processor(), versions=_installed_versions(), present=True)

    @staticmethod
    def named(name: str) -> Device:
        """A device by name: ``"cpu"``, or a known GPU such as ``"h200"``, with the software versions installed here."""
        key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
        if key == "cpu":
            return Device.cpu()
        if key not in KNOWN:
            known = ", ".join(KNOWN)
            raise InvalidProblem(
                f"device {name!r} is not known; expected cpu, cuda, cuda:N, or one of {known}"
                f"{meant(key, ('cpu', 'cuda', *KNOWN))}"
            )
        return replace(KNOWN[key], versions=_installed_versions())

    @staticmethod
    def parse(text: str) -> Device:
        """``cpu``, ``cuda`` or ``cuda:1`` for this machine's hardware, else a known name (``Device.named``).

        Raises ``InvalidProblem`` for an unknown name or a GPU index that is not there.
        """
        if match := re.fullmatch(r"cuda(?::(\d+))?", text):
            return Device.of("cuda", int(match[1] or 0))
        return Device.named(text)

    @staticmethod
    def all() -> list[Device]:
        """The processor and every GPU of this machine, in the order of their indices."""
        devices = [Device.cpu()]
        for index in range(64):
            try:
                devices.append(Device.of("cuda", index))
            except InvalidProblem:
                break
        return devices

    @staticmethod
    def of(kind: str, index: int = 0) -> Device:
        """The device of this machine that arrays of ``kind`` and ``index`` live on."""
        if kind == "cpu":
            return Device.cpu()
        if kind == "cuda":
            return _cuda(index)
        return Device(kind, kind, versions=_installed_versions(), present=True)


_KIB, _GIB = 1024, 1024**3


def _gpu(name: str, capability: tuple[int, int], sms: int, memory: int, shared: int) -> Device:
    return Device("cuda", name, capability, sms, memory * _GIB, shared * _KIB)


#: GPUs that plans can be made for without having one: capability, SMs, memory, shared memory per block, from the
#: vendor's data sheets and the CUDA programming guide's table of compute capabilities.
KNOWN = {
    "t4": _gpu("T4", (7, 5), 40, 16, 64),
    "v100": _gpu("V100", (7, 0), 80, 32, 96),
    "a100": _gpu("A100", (8, 0), 108, 80, 163),
    "a10": _gpu("A10", (8, 6), 72, 24, 99),
    "rtx3090": _gpu("RTX 3090", (8, 6), 82, 24, 99),
    "rtx4090": _gpu("RTX 4090", (8, 9), 128, 24, 99),
    "l4": _gpu("L4", (8, 9), 58, 24, 99),
    "l40s": _gpu("L40S", (8, 9), 142, 48, 99),
    "h100": _gpu("H100", (9, 0), 132, 80, 227),
    "h200": _gpu("H200", (9, 0), 132, 141, 227),
    "b200": _gpu("B200", (10, 0), 148, 180, 227),
    "rtx5090": _gpu("RTX 5090", (12, 0), 170, 32, 99),
}


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``"2.11.0+cu130"`` is ``(2, 11, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@functools.cache
def _installed_versions() -> tuple[tuple[str, str], ...]:
    """Versions read from package metadata: importing nothing, and so free of what a broken install would do."""
    from importlib import metadata  # slow to import

    versions = {}
    for software, packages in (("torch", ("torch",)), ("cudnn", ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))):
        for package in packages:
            try:
                # A hypothetical GPU machine would have a GPU build, so the local part (+cpu) is left out.
                versions[software] = metadata.version(package).split("+")[0]
                break
            except metadata.PackageNotFoundError:
                continue
    return tuple(versions.items())


def _processor() -> str:
    """The model of this machine's processor; its architecture where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    if model.strip():
        return in_a_line(model)
    import platform  # slow to import, and seldom needed

    return platform.processor() or platform.machine()


@functools.cache
def _driver() -> dict[str, str]:
    """The version of NVIDIA's driver where Linux says it, as a pair for ``Device.versions``."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as lines:
            version = re.search(r"\s(\d+(?:\.\d+)+)\s", lines.readline())
    except OSError:
        version = None
    return {"driver": version[1]} if version else {}


@functools.cache
def _cuda(index: int) -> Device:
    """Read a GPU through torch, or through CuPy where torch is absent or has no CUDA."""
    causes = []
    # The library whose arrays the caller holds is already imported: ask it first.
    for library in sorted(_READERS, key=lambda library: library not in sys.modules):
        try:
            return _READERS[library](index)
        except Exception as error:  # any library of a machine without a GPU has its own way to fail
            causes.append(f"{library}: {type(error).__name__}: {error}")
    raise InvalidProblem(f"device cuda:{index} cannot be read on this machine ({'; '.join(causes)})")


def _through_torch(index: int) -> Device:
    torch: Any = importlib.import_module("torch")
    facts = torch.cuda.get_device_properties(index)
    versions = {"torch": torch.__version__}
    if torch.version.hip:
        name, memory = facts.name, facts.total_memory
        return Device("rocm", name, memory=memory, versions=tuple(versions.items()), present=True, index=index)
    versions |= {"cuda": torch.version.cuda, **_driver()}
    if cudnn := torch.backends.cudnn.version():
        major, minor = (cudnn // 10000, cudnn // 100 % 100) if cudnn >= 90000 else (cudnn // 1000, cudnn // 100 % 10)
        versions["cudnn"] = f"{major}.{minor}.{cudnn % 100}"
    capability, shared = (facts.major, facts.minor), getattr(facts, "shared_memory_per_block_optin", 0)
    sizes = facts.multi_processor_count, facts.total_memory, shared
    return Device("cuda", facts.name, capability, *sizes, tuple(versions.items()), present=True, index=index)


def _through_cupy(index: int) -> Device:
    files.house_cupy()
    cupy: Any = importlib.import_module("cupy")
    facts = cupy.cuda.runtime.getDeviceProperties(index)
    versions = dict(_installed_versions()) | {"cupy": cupy.__version__, **_driver()}
    name, capability = facts["name"].decode(), (facts["major"], facts["minor"])
    sizes = facts["multiProcessorCount"], facts["totalGlobalMem"], facts["sharedMemPerBlockOptin"]
    return Device("cuda", name, capability, *sizes, tuple(versions.items()), present=True, index=index)


_READERS = {"torch": _through_torch, "cupy": _through_cupy}
