"""``attnswitch backends``: what this machine has, and what is missing, with the remedy."""

from __future__ import annotations

import importlib
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

import attnswitch
from attnswitch import files
from attnswitch.errors import InvalidProblem
from attnswitch.machine import fleet
from attnswitch.machine.device import Device
from attnswitch.machine.fleet import Fleet

from . import render

__all__ = ["backends"]

#: Array libraries, with what to install where one is missing.
LIBRARIES = {"numpy": "pip install numpy", "torch": "pip install torch", "cupy": "pip install 'attnswitch[cuda13]'"}

_COLOURS = {"ready": "green", "not ready": "yellow", "not listed": "dim"}


def backends(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    join: Annotated[
        bool, typer.Option("--join", help="Look at nothing here: one table of what --json wrote on each machine.")
    ] = False,
    documents: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="With --join: the files.")] = None,
) -> None:
    """List backends, array libraries and devices with their state. Never fails for what is missing."""
    if documents and not join:
        raise InvalidProblem(f"{documents[0]}: backends takes a file only with --join")
    if join:
        machines = fleet.joined(documents or [])
        if json:
            render.write_json(machines.to_json(), None)
        else:
            _joined(machines)
        return
    libraries = {name: _library(name, remedy) for name, remedy in LIBRARIES.items()}
    devices = Device.all()
    states = attnswitch.backends()
    distrusted = files.distrust(files.cache_folder())
    if json:
        document: dict[str, Any] = {
            "backends": states,
            "libraries": libraries,
            "devices": [str(device) for device in devices],
        }
        document |= {"distrusted": distrusted, "host": platform.node(), "version": attnswitch.__version__}
        document["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        render.write_json(document, None)
        return
    rows = render.table("", "name", "state")
    for label, entries in (("backend", states), ("library", libraries)):
        for name, state in entries.items():
            bad = state is not None and not state[:1].isdigit()
            text = render.escape(state or "ready")
            rows.add_row(label, name, f"[yellow]{text}[/]" if bad else f"[green]{text}[/]")
            label = ""
        rows.add_section()
    for number, device in enumerate(devices):
        rows.add_row("" if number else "device", device.kind, render.escape(str(device)))
    if not any(device.kind == "cuda" for device in devices):
        rows.add_row("", "cuda", "[yellow]no GPU was found by torch or CuPy; a driver and an NVIDIA GPU are needed[/]")
    if distrusted:
        rows.add_row("cache", "compiled", f"[yellow]{render.escape(distrusted)} by ATTNSWITCH_CACHE_DIR[/]")
    render.show(rows)


def _joined(machines: Fleet) -> None:
    """A row for each backend and library, a column for each machine."""
    rows = render.table("", "name", *map(render.escape, machines.machines))
    devices = ["\n".join(map(render.escape, machine.devices)) for machine in machines.machines.values()]
    rows.add_row("device", "", *devices)
    rows.add_row("date", "", *(render.escape(machine.date or "-") for machine in machines.machines.values()))
    for label, entries in (("backend", machines.backends()), ("library", machines.libraries())):
        rows.add_section()
        for name, cells in entries.items():
            texts = (f"[{_COLOURS[cell.state]}]{render.escape(cell.text)}[/]" for cell in cells)
            rows.add_row(label, render.escape(name), *texts)
            label = ""
    if any(machine.distrusted for machine in machines.machines.values()):
        told = (render.escape(machine.distrusted or "") for machine in machines.machines.values())
        rows.add_section()
        rows.add_row("cache", "compiled", *(f"[yellow]{text}[/]" if text else "" for text in told))
    render.whole(rows)


def _library(name: str, remedy: str) -> str:
    """Its version, or why it is not there."""
    files.house_cupy()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return f"not installed; {remedy}"
    except Exception as error:  # a broken install may fail in any way; that is what this command is for
        return f"installed but broken: {type(error).__name__}: {error}"
    version = str(getattr(module, "__version__", "0"))
    if name != "cupy":
        return version
    try:
        count = module.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError without a driver or a GPU
        return f"installed ({version}), but it finds no GPU: {error}"
    return f"{version}, {count} GPU" + ("s" if count != 1 else "")
