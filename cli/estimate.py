"""``attnswitch estimate``: what a problem has to cost, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from attnswitch.bench import estimate as estimates
from attnswitch.bench.estimate import Direction, Estimate, Peak
from attnswitch.errors import InvalidProblem
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import render
from .named import first, present

__all__ = ["estimate"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def estimate(
    problem: Annotated[str, typer.Argument(help="For example b1.h1.s4096.d128.fp16; see README.")],
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda:1, or a known GPU such as h200, here or not. Default: what is here.")
    ] = None,
    measured: Annotated[
        bool, typer.Option(help="Measure what the device reaches, in place of its data sheet. It must be here.")
    ] = False,
    configs: Annotated[
        bool, typer.Option(help="The tiles of every config that a backend has, and not of its first choice alone.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work out operations, bytes, memory and the time on the roofline, of the standard and of the tiled algorithm."""
    described = Problem.parse(problem)
    name = device or first()
    where = Device.parse(name)
    peak = None if measured else estimates.published(where, described.dtype)
    if peak is None and (measured or where.present):
        peak = _measured(present(name))
    worked_out = estimates.estimate(described, where, peak, configs=configs)
    if json:
        render.write_json(worked_out.to_json(), None)
    else:
        _show(worked_out)


def _measured(name: str) -> Peak:
    from attnswitch.bench.measure import limits  # torch is slow to import

    try:
        best = limits(name)
    except InvalidProblem:
        raise
    except RuntimeError as error:
        raise InvalidProblem(f"device {name} cannot be measured: {error}") from None
    return Peak(best.tflops, best.gbps, f"measured here, with a {best.dtype} matrix product and a copy")


def _show(estimate: Estimate) -> None:
    peak = estimate.peak
    known = (
        f"{_rate(peak.tflops)}, {peak.gbps:.4g} GB/s ({peak.source})"
        if peak
        else "not known; --measured, if it is here"
    )
    for label, text in (("problem", estimate.problem), ("device", estimate.device), ("peak", known)):
        render.console.print(f"[bold]{label:8}[/] {render.escape(str(text))}", soft_wrap=True)
    rows = render.table(
        "", "operations", "algorithm", "moves", "op/B", "at least", right=("operations", "moves", "op/B")
    )
    _add(rows, "forward", estimate.forward)
    if estimate.backward is not None:
        _add(rows, "backward", estimate.backward)
    render.console.print()
    render.console.print(rows)
    p = estimate.problem
    seen = f"; of the pairs {100 * estimate.visible:.3g} % are visible" if estimate.visible < 1 else ""
    beside = f"standard {_bytes(estimate.extra_standard)}, tiled {_bytes(estimate.extra_tiled)}"
    whose = "" if estimate.device.shared_memory else ", as every GPU from compute capability 8.6 on has"
    lines = (
        f"tiled without a cache: {_bytes(estimate.tiled)} forward, in tiles of {estimate.queries} queries{seen}",
        f"bound on any tiling with {_bytes(estimate.shared)} on the chip{whose}: {_bytes(estimate.sram)} (N^2 D^2 / M)",
        f"memory beside operands and results: {beside}" + (" (backward included)" if p.grads else ""),
    )
    for line in lines:
        render.console.print(line, soft_wrap=True)
    if estimate.tiles:
        tiles = render.table("backend", "kernel", "tile", "stages", "shared memory", right=("stages", "shared memory"))
        for tile in estimate.tiles:
            fits = "" if tile.shared <= estimate.shared else " [red]does not fit[/]"
            shape = f"{tile.queries} x {tile.keys}"
            tiles.add_row(tile.backend, tile.role, shape, str(tile.stages), f"{_bytes(tile.shared)}{fits}")
        render.console.print()
        render.console.print(tiles)


def _add(rows: Table, label: str, direction: Direction) -> None:
    work = f"{direction.flops / 1e9:.4g} G"
    tiled = ("tiled", _bytes(direction.least), f"{direction.intensity:.4g}", _ms(direction.ms))
    standard = (
        "standard",
        _bytes(direction.standard),
        f"{direction.intensity_standard:.4g}",
        _ms(direction.ms_standard),
    )
    rows.add_row(label, work, *tiled)
    rows.add_row("", "", *standard)


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.4g} ms" if ms >= 1 else f"{1e3 * ms:.4g} us"


def _rate(tflops: float) -> str:
    return f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.4g} GFLOP/s"


def _bytes(count: float) -> str:
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.4g} {unit}"
