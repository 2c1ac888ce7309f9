"""``attnswitch estimate --ranks``: what a problem takes that is dealt among ranks, and which split of them is best."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnswitch.bench import links, pace, ranks
from attnswitch.bench.estimate import Peak
from attnswitch.bench.pace import Pace
from attnswitch.bench.ranks import Covered, Phase, Planned, Ranks
from attnswitch.errors import Unsupported
from attnswitch.machine.device import Device
from attnswitch.parallel.dealing import Order
from attnswitch.problem import Problem

from . import render
from .units import of_bytes, of_ms

__all__ = ["plan", "show"]

#: How the lines of sources begin.
_SPOKE = {
    "measured": "measured",
    "forecast": "forecast",
    "roofline": "roofline, a lower bound that no kernel reaches",
}


def plan(
    problem: Problem,
    device: Device,
    peak: Peak | None,
    count: int,
    rate: str | None,
    latency: str,
    order: Order | None,
    timed: str | None,
) -> Ranks:
    """Work ``problem`` out over ``count`` ranks; by calls timed on the device ``timed`` of this machine, if named.

    Raises ``InvalidProblem`` and ``Unsupported``.
    """
    link = links.of_device(device, count, latency) if rate is None else links.link(rate, latency)
    if peak is None:
        raise Unsupported(f"what {device} reaches is in no table here; --measured says it, if it is here")
    if timed is None:
        return ranks.estimate(
            problem, device, count, link, lambda call: pace.expected(call, device, peak), peak.gbps, order=order
        )
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        clock = _timing(timed, progress)
        return ranks.estimate(problem, device, count, link, clock, peak.gbps, order=order)


def _timing(where: str, progress: Progress) -> Callable[[Problem], Pace]:
    from attnswitch.bench.timed import timed  # torch is slow to import

    task = progress.add_task("timing")

    def one(call: Problem) -> Pace:
        progress.update(task, description=f"timing {render.escape(str(call))}")
        return timed(call, where)

    return one


def show(found: Ranks) -> None:
    """Print it."""
    link = found.link
    ranks_ = f"{found.ranks}, of up to {found.rows:,} rows each; in a ring dealt {found.order}"
    joined = f"{link.gbps:.4g} GB/s each way ({link.source}), {link.latency_us:g} us a message"
    for label, text in (("problem", found.problem), ("device", found.device), ("ranks", ranks_), ("link", joined)):
        _line(label, str(text))
    for source, basis, backends in found.paces:
        _line("times", f"{_SPOKE[source]}: {basis}" + (f"; {', '.join(backends)}" if backends else ""))
    render.console.print()
    render.whole(_splits(found))
    render.console.print()
    for text in _sentences(found):
        render.console.print(render.escape(text), soft_wrap=True)


def _line(label: str, text: str) -> None:
    render.console.print(f"[bold]{label:8}[/] {render.escape(text)}", soft_wrap=True)


def _splits(found: Ranks) -> Table:
    columns = ("time", "compute", "link", "exposed", "sent", "a step")
    rows = render.table("split", "", *columns, "memory a rank", right=(*columns, "memory a rank"))
    for split in found.splits:
        best = "[bold green]" if split is found.best else ""
        name = f"{best}{split.name}{'[/]' if best else ''}"
        if split.why_not:
            rows.add_row(name, "[yellow]no[/]", *[""] * len(columns), "")
            continue
        for label, phase in (("forward", split.forward), ("backward", split.backward)):
            if phase is not None:
                rows.add_row(name, label, *_cells(phase), _memory(split, label, found.device))
                name = ""
    return rows


def _cells(phase: Phase) -> tuple[str, ...]:
    times = (phase.ms, phase.compute, phase.link, phase.exposed)
    return (*map(of_ms, times), of_bytes(phase.sent), of_bytes(phase.step) if phase.step else "-")


def _memory(split: Planned, label: str, device: Device) -> str:
    held = sum(dict(split.memory)[label].values())
    fits = not device.memory or held <= device.memory
    return of_bytes(held) if fits else f"[red]{of_bytes(held)}, more than there is[/]"


def _sentences(found: Ranks) -> list[str]:
    best = found.best
    said = [f"{split.name}: {split.why_not}" for split in found.splits if split.why_not]
    if best is None:
        return [*said, "no split of these ranks takes it"]
    none = "" if found.fits(best) else "no split fits in memory; the least time is that of "
    said.append(f"best: {none}{best.name}, {of_ms(best.ms)} in all")
    if 1 < best.heads_over < found.ranks:
        said.append("context_parallel has the ring and all-to-all; a split between them is one of yunchang's (USP)")
    for label, covered in zip(("forward", "backward"), found.covered or (), strict=False):
        said.append(f"{label}: {_hidden(covered)}")
    return said


def _hidden(covered: Covered) -> str:
    if covered.rows is None:
        return "the ring never hides its traffic: a step computes for less time than its messages take"
    return (
        f"a step of the ring covers what is on its way from {covered.rows:,} rows a rank on, or fewer; this problem has"
        f" so many up to {covered.ranks:,} ranks"
    )
