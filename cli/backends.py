"""``attnswitch backends``: what this machine has, and what is missing, with the remedy."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

import attnswitch
from attnswitch import files
from attnswitch.machine.device import Device

from . import render

__all__ = ["backends"]

#: Array libraries, with what to install where one is missing.
LIBRARIES = {"numpy": "pip install numpy", "torch": "pip install torch", "cupy": "pip install 'attnswitch[cuda13]'"}


def backends(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List backends, array libraries and devices with their state. Never fails for what is missing."""
    libraries = {name: _library(name, remedy) for name, remedy in LIBRARIES.items()}
    devices = Device.all()
    states = attnswitch.backends()
    distrusted = files.distrust(files.cache_folder())
    if json:
        document = {"backends": states, "libraries": libraries, "devices": [str(device) for device in devices]}
        document["distrusted"] = distrusted
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
    render.console.print(rows)


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
