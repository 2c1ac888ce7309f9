"""``attnswitch estimate``: what a problem has to cost, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from attnswitch.bench import estimate as estimates
from attnswitch.bench.estimate import Direction, Estimate, Peak
from attnswitch.errors import InvalidProblem
from attnswitch.machine.device import Device
from attnswitch.parallel.dealing import Order
from attnswitch.problem import Problem

from . import ranks_estimate, render, said
from .named import first, present
from .units import of_bytes, of_ms, of_tflops

__all__ = ["estimate"]

#: What can be said of ranks alone, and what of one device.
_OF_RANKS = ("link", "latency", "order")


def estimate(
    context: typer.Context,
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
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Deal the sequence among N such devices: times, bytes and memory.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="With --ranks: what a rank sends to another, one way: 450GB/s, 50GiB/s, or in bits 400Gb/s or"
            " 400Gbps. Default: NVLink by the data sheet, for as many as a board has.",
        ),
    ] = None,
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="With --ranks: what each message takes beside its bytes, such as 10us.")
    ] = "0us",
    order: Annotated[
        Order | None,
        typer.Option(help="With --ranks: how a ring's rows are dealt, zigzag (the default) or contiguous."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work out operations, bytes, memory and the time on the roofline, of the standard and of the tiled algorithm."""
    _check(context, ranks)
    described = Problem.parse(problem)
    name = device or first()
    where = Device.parse(name)
    peak = None if measured else estimates.published(where, described.dtype)
    if peak is None and (measured or where.present):
        peak = _measured(present(name))
    if ranks is not None:
        timed = present(name) if measured else None
        planned = ranks_estimate.plan(described, where, peak, ranks, link, latency, order, timed)
        if json:
            render.write_json(planned.to_json(), None)
        else:
            ranks_estimate.show(planned)
        return
    worked_out = estimates.estimate(described, where, peak, configs=configs)
    if json:
        render.write_json(worked_out.to_json(), None)
    else:
        _show(worked_out)


def _check(context: typer.Context, ranks: int | None) -> None:
    """Raises ``InvalidProblem`` for an option that has no use beside the others."""
    if name := said.first(context, _OF_RANKS if ranks is None else ("configs",)):
        why = "it is of ranks, of which --ranks says how many" if ranks is None else "--ranks tells of no tiles"
        raise InvalidProblem(f"{said.option(context, name)}: {why}")


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
        f"{of_tflops(peak.tflops)}, {peak.gbps:.4g} GB/s ({peak.source})"
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
    render.show(rows)
    p = estimate.problem
    seen = f"; of the pairs {100 * estimate.visible:.3g} % are visible" if estimate.visible < 1 else ""
    beside = f"standard {of_bytes(estimate.extra_standard)}, tiled {of_bytes(estimate.extra_tiled)}"
    whose = "" if estimate.device.shared_memory else ", as every GPU from compute capability 8.6 on has"
    bound = of_bytes(estimate.sram)
    lines = (
        f"tiled without a cache: {of_bytes(estimate.tiled)} forward, in tiles of {estimate.queries} queries{seen}",
        f"bound on any tiling with {of_bytes(estimate.shared)} on the chip{whose}: {bound} (N^2 D^2 / M)",
        f"memory beside operands and results: {beside}" + (" (backward included)" if p.grads else ""),
    )
    for line in lines:
        render.console.print(line, soft_wrap=True)
    if estimate.tiles:
        tiles = render.table("backend", "kernel", "tile", "stages", "shared memory", right=("stages", "shared memory"))
        for tile in estimate.tiles:
            fits = "" if tile.shared <= estimate.shared else " [red]does not fit[/]"
            shape = f"{tile.queries} x {tile.keys}"
            tiles.add_row(tile.backend, tile.role, shape, str(tile.stages), f"{of_bytes(tile.shared)}{fits}")
        render.console.print()
        render.show(tiles)


def _add(rows: Table, label: str, direction: Direction) -> None:
    work = f"{direction.flops / 1e9:.4g} G"
    tiled = ("tiled", of_bytes(direction.least), f"{direction.intensity:.4g}", of_ms(direction.ms))
    standard = (
        "standard",
        of_bytes(direction.standard),
        f"{direction.intensity_standard:.4g}",
        of_ms(direction.ms_standard),
    )
    rows.add_row(label, work, *tiled)
    rows.add_row("", "", *standard)
