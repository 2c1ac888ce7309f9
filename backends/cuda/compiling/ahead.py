"""Kernels compiled before anyone asks: those of usual problems (``usual.toml``), as packs hold them."""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from attnswitch.errors import CompileError, InvalidProblem
from attnswitch.machine.backend import Packed, Progress
from attnswitch.machine.builds import cores
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import cache, nvrtc, packs
from .variant import Variant

__all__ = ["architecture", "pack", "usual", "variants"]


def usual() -> Iterator[Problem]:
    """The problems whose kernels a pack holds."""
    text = resources.files(__package__).joinpath("usual.toml").read_text(encoding="utf-8")
    for group in tomllib.loads(text)["usual"]:
        for dtype, dim, notation in itertools.product(group["dtype"], group["dim"], group["problem"]):
            yield Problem.parse(notation.format(dtype=dtype, dim=dim))


def architecture(device: Device) -> str:
    """That of the pack for ``device``; GPUs of capability 8.6 and 8.9 run what is compiled for 8.0."""
    assert device.capability is not None
    major, minor = device.capability
    return f"sm_{major}{minor}a" if major >= 9 else "sm_80" if major == 8 else f"sm_{major}{minor}"


def variants(
    devices: Iterable[Device],
    refused: Callable[[Problem, Device], Iterator[str]],
    launched: Callable[[Problem, Device], Iterable[Variant]],
) -> dict[str, list[Variant]]:
    """By architecture, what those of the usual problems have ``launched`` that nothing is ``refused`` of.

    Raises ``InvalidProblem`` for a device of which all are.
    """
    found: dict[str, dict[Variant, None]] = {}
    for device in devices:
        taken: dict[Variant, None] = {}
        reasons = []
        for problem in usual():
            reason = next(refused(problem, device), None)
            if reason is None:
                taken.update(dict.fromkeys(launched(problem, device)))
            else:
                reasons.append(reason)
        if not taken:
            raise InvalidProblem(f"there are no kernels for {device}: {reasons[0]}")
        found.setdefault(architecture(device), {}).update(taken)
    return {arch: list(each) for arch, each in found.items()}


def pack(by_architecture: dict[str, list[Variant]], folder: Path | None, progress: Progress) -> Iterator[Packed]:
    """Compile them, as many at a time as there are cores, and write a pack for each architecture into ``folder``.

    None is the cache folder. A pack that is there keeps its kernels of the same sources and compiler: another
    GPU of its architecture may have other tiles. Raises ``CompileError``.
    """
    if why := nvrtc.unavailable():
        raise CompileError(why)
    if folder is None and (why := cache.distrust()):
        raise CompileError(f"{why}, or a folder for packs")
    if unknown := [arch for arch in by_architecture if not nvrtc.honours(arch)]:
        raise CompileError(f"{nvrtc.full_name()} does not compile for {', '.join(unknown)}: install a newer one")
    done, of_all = itertools.count(1), sum(map(len, by_architecture.values()))
    with ThreadPoolExecutor(cores(), "attnswitch-build") as pool:
        for arch, each in by_architecture.items():
            kernels = {}
            for variant, cubin in zip(each, pool.map(functools.partial(nvrtc.cubin, arch=arch), each), strict=True):
                kernels[nvrtc.digest(variant, arch)] = cubin
                progress(next(done), of_all, f"{arch} {variant}")
            path = (folder or packs.cached()) / f"{arch}.zip"
            kernels = packs.kept(path, nvrtc.full_name(), nvrtc.headers()) | kernels
            packs.write(path, nvrtc.full_name(), nvrtc.headers(), kernels)
            yield Packed(path, arch, len(kernels), sum(map(len, kernels.values())), nvrtc.full_name())
