"""What a benchmark measured, as tables: a bar for each candidate, the longest for the fastest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.bar import Bar
from rich.table import Table

from attnswitch.bench.document import means, regrets
from attnswitch.bench.measure import Limits
from attnswitch.bench.record import Record

from . import render
from .units import of_tflops

__all__ = ["show"]

_BAR = 20
_COLOURS = {"measured": "green", "wrong": "red", "refused": "yellow", "unavailable": "yellow", "failed": "red"}


def show(records: list[Record], limits: Limits, stopped: str | None) -> None:
    """A table for each suite, why some candidates have no figure, and the means."""
    for suite, found in groupby(records, key=lambda record: record.suite):
        rows = list(found)
        render.console.print(f"\n[bold]{render.escape(suite)}[/]")
        render.whole(_memory(rows) if rows[0].kind == "memory" else _speeds(rows))
    _reasons(records)
    render.console.print(
        f"\n[dim]limits here: a {limits.dtype} matrix product of {limits.size} x {limits.size}"
        f" {of_tflops(limits.tflops)}, a copy {limits.gbps:.4g} GB/s; ±: half of the range from the"
        " 20th to the 80th percentile; deviation: from the answer in a wider type (without dropout, where there is"
        " any), relative[/]",
        soft_wrap=True,
    )
    for mean in means(records):
        render.console.print(
            f"{mean['suite']} {mean['direction']}: {mean['other']} takes [bold]{mean['ratio']:.2f}[/] times as long as"
            f" {mean['of']} (geometric mean, rows: {mean['rows']})",
            soft_wrap=True,
        )
    for regret in regrets(records):
        render.console.print(
            f"{regret['suite']} {regret['direction']}: {regret['of']} takes [bold]{regret['regret']:.3f}[/] times as"
            f" long as the fastest backend of each row (geometric mean, rows: {regret['rows']}; at most"
            f" {regret['worst']:.2f}, {render.escape(regret['worst_row'])})",
            soft_wrap=True,
        )
    counts = {status: sum(record.status == status for record in records) for status in _COLOURS}
    told = [f"[{_COLOURS[status]}]{count} {status}[/]" for status, count in counts.items() if count]
    render.console.print(", ".join(told) + (f"; {stopped}" if stopped else ""), soft_wrap=True)


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    return [list(found) for _, found in groupby(records, key=lambda record: record.group)]


def _speeds(records: list[Record]) -> Table:
    columns = ("row", "", "candidate", "ms", "±", "rate", "of limit", "speed", "deviation")
    rows = render.table(*columns, right=("ms", "±", "rate", "of limit", "deviation"))
    for group in _groups(records):
        fastest = min((record.ms for record in group if record.ms), default=0.0)
        labels = [group[0].row, group[0].direction]
        for record in group:
            rows.add_row(*map(render.escape, labels), *_figures(record, fastest))
            labels = ["", ""]
        rows.add_section()
    return rows


def _figures(record: Record, fastest: float) -> list[str | Bar]:
    name = f"[{_COLOURS[record.status]}]{render.escape(record.candidate)}[/]"
    if record.ms is None or record.ms_low is None or record.ms_high is None or record.percent is None:
        return [name, f"[dim]{record.status}[/]", "", "", "", "", ""]
    return [
        name,
        f"{record.ms:.4g}",
        f"{(record.ms_high - record.ms_low) / 2:.2g}",
        f"{record.gbps:.4g} GB/s" if record.gbps is not None else of_tflops(record.tflops or 0.0),
        f"{record.percent:.0f} %",
        Bar(size=record.ms, begin=0, end=fastest, width=_BAR, color=_COLOURS[record.status]),
        _deviation(record),
    ]


def _memory(records: list[Record]) -> Table:
    rows = render.table("row", "candidate", "MiB", "memory", "deviation", right=("MiB", "deviation"))
    for group in _groups(records):
        most = max((record.memory or 0 for record in group), default=0)
        label = group[0].row
        for record in group:
            name = f"[{_COLOURS[record.status]}]{render.escape(record.candidate)}[/]"
            if record.memory is None:
                rows.add_row(render.escape(label), name, f"[dim]{record.status}[/]")
            else:
                bar = Bar(size=most, begin=0, end=record.memory, width=_BAR, color=_COLOURS[record.status])
                rows.add_row(render.escape(label), name, f"{record.memory / 2**20:.4g}", bar, _deviation(record))
            label = ""
        rows.add_section()
    return rows


def _deviation(record: Record) -> str:
    if record.deviation is None:
        return "[dim]not compared[/]"
    text = f"{record.deviation:.1e}"
    return f"[bold red]{text}[/]" if record.status == "wrong" else text


def _reasons(records: list[Record]) -> None:
    """Each reason once, with how many figures are missing or wrong for it."""
    counted: dict[tuple[str, str, str], int] = {}
    for record in records:
        if record.why:
            key = (record.candidate, record.status, record.why)
            counted[key] = counted.get(key, 0) + 1
    for (candidate, status, why), count in counted.items():
        times = f" ({count} times)" if count > 1 else ""
        render.console.print(
            f"[{_COLOURS[status]}]{render.escape(candidate)} {status}[/]{times}: {render.escape(why)}", soft_wrap=True
        )
