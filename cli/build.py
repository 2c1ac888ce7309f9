"""``attnswitch build``: kernels compiled before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.backend import Packed
from attnswitch.machine.device import KNOWN, Device
from attnswitch.machine.registry import Missing

from . import render

__all__ = ["build"]

#: Stands for every GPU that is known by name, from this compute capability on.
_ALL, _LEAST = "all", (8, 0)


def build(
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU by name, here or not, such as h200; may be repeated. all: from 8.0 on. Default: those here."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where packs go. Default: the cache folder, where they are found.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Compile the kernels of usual problems ahead, into packs. Needs no GPU.

    A process whose kernels are in a pack compiles nothing. Usual are prompts, training and decoding with head
    dimensions of 64 and 128, and a few others.
    """
    devices = _devices(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before anything is compiled for it
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=render.console, transient=True, disable=quiet or json) as bar:
        task = bar.add_task("kernels", total=None)

        def progress(done: int, of_all: int, what: str) -> None:
            bar.update(task, completed=done, total=of_all, description=what)

        packed = [
            pack
            for name in registry.names()
            if not isinstance(backend := registry.load(name), Missing)
            for pack in backend.pack(devices, out, progress)
        ]
    if not packed:
        raise InvalidProblem(f"no backend compiles kernels ahead for {', '.join(map(str, devices))}")
    if json:
        render.write_json([_json(pack) for pack in packed], None)
        return
    rows = render.table("pack", "kernels", "MB", "compressed", "compiler", right=("kernels", "MB", "compressed"))
    for pack in packed:
        sizes = (f"{size / 1e6:.1f}" for size in (pack.bytes, pack.path.stat().st_size))
        rows.add_row(render.escape(str(pack.path)), str(pack.kernels), *sizes, pack.compiler)
    render.show(rows)


def _devices(names: list[str] | None) -> list[Device]:
    """Raises ``InvalidProblem``."""
    if names is None:
        here = [device for device in Device.all() if device.kind == "cuda"]
        if not here:
            raise InvalidProblem("no NVIDIA GPU is here; name one for which to compile, such as --device h200")
        return list(dict.fromkeys(here))
    single = [name for name in names if name != _ALL]
    devices = [Device.parse(name) for name in single]
    for name, device in zip(single, devices, strict=True):
        if device.kind != "cuda" or device.capability is None:
            raise InvalidProblem(f"--device {name}: expected an NVIDIA GPU, by one of {', '.join(KNOWN)}, or {_ALL}")
    if _ALL in names:
        devices += [device for device in map(Device.named, KNOWN) if (device.capability or (0, 0)) >= _LEAST]
    return list(dict.fromkeys(devices))


def _json(pack: Packed) -> dict[str, object]:
    return {**pack._asdict(), "path": str(pack.path), "compressed": pack.path.stat().st_size}
