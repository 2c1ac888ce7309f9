"""``attnswitch wisdom``: show, carry elsewhere and forget the times and mismatches of this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnswitch.errors import InvalidProblem
from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.wisdom import exchange, store, view
from attnswitch.wisdom.classes import covers, representative, speed_class
from attnswitch.wisdom.record import Record, Time, Untimed, Verdict
from attnswitch.wisdom.store import Contents

from . import files, render

__all__ = ["app"]

app = typer.Typer(
    help="Show, export, import, merge or forget the times and mismatches of this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


_NOTHING = "nothing was measured yet: `attnswitch tune` does"


@app.command("show")
def show(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the times and mismatches that hold here, and why the other lines do not hold."""
    source, contents = _read()
    held, unused = exchange.held(contents.records, Device.all())
    if json:
        document = {
            "store": str(source.path),
            "records": [_plain(record) for record in held],
            "unused": dict(unused),
            "damaged": [str(damage) for damage in contents.damaged],
        }
        render.write_json(document, None)
        return
    render.console.print(f"[dim]{render.escape(str(source.path))}[/]", soft_wrap=True)
    _print_times(held)
    for record in held:
        if isinstance(record, Untimed):
            text = f"{record.backend} on {record.signature.device}, {record.problem}: {record.why}"
            render.console.print(f"[yellow]not measured[/] {render.escape(text)}", soft_wrap=True)
        elif isinstance(record, Verdict):
            word = "[green]right again[/]" if record.right else "[bold red]wrong[/]"
            text = f"{record.backend} on {record.signature.device}, {record.problem}: {record.why} (case {record.case})"
            render.console.print(f"{word} {render.escape(text)}", soft_wrap=True)
    _print_counted("not used", unused)
    for damage in contents.damaged:
        word = "not used" if damage.other else "damaged, not used"
        render.console.print(f"[yellow]{word}[/] {render.escape(str(damage))}", soft_wrap=True)
    if not contents.records:
        render.console.print(_NOTHING, soft_wrap=True)


@app.command("export")
def export(
    file: Annotated[
        Path,
        typer.Argument(help="The file to write; - for standard output.", dir_okay=False),
    ],
) -> None:
    """Write what holds on this machine to FILE, for `import` on a machine like it."""
    _, contents = _read()
    records, unused = exchange.held(contents.records, Device.all())
    told = _written(records, file)
    _print_counted("left out", unused, told)
    if not contents.records:
        told.print(_NOTHING, soft_wrap=True)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file of `export` or `merge`.", exists=True, dir_okay=False)],
) -> None:
    """Add FILE to the store. Nothing is added if a line is damaged or was measured on another kind of machine."""
    count = exchange.adopt(file, Device.all())
    render.console.print(f"{render.counted(count, 'line')} taken", soft_wrap=True)


@app.command("merge")
def merge(
    into: Annotated[Path, typer.Argument(help="The file to write; - for standard output.", dir_okay=False)],
    files: Annotated[list[Path], typer.Argument(help="Files of `export` or `merge`.", exists=True, dir_okay=False)],
) -> None:
    """Write the lines of several FILES, of any machines, to INTO. Of lines that say the same, the newest is kept."""
    records = exchange.newest([record for file in files for record in exchange.read(file)])
    _written(records, into)


@app.command("forget")
def forget(
    everything: Annotated[bool, typer.Option("--all", help="Forget everything.")] = False,
    stale: Annotated[bool, typer.Option(help="Forget what does not hold here, and what a newer line repeats.")] = False,
    backend: Annotated[list[str] | None, typer.Option(help="Forget all lines of this backend (repeatable).")] = None,
    problem: Annotated[
        list[str] | None, typer.Option(help="Forget the times of this problem's class (repeatable).")
    ] = None,
) -> None:
    """Remove lines from the store. A backend whose mismatch is forgotten may be chosen again.

    The administrator's file is never changed. Exit code 2 if it holds lines of what was named.
    """
    if not (everything or stale or backend or problem):
        raise InvalidProblem("say what to forget: --all, --stale, --backend NAME or --problem TEXT")
    if everything and (stale or backend or problem):
        raise InvalidProblem("--all forgets every line: leave it out, or --stale, --backend and --problem")
    classes = {speed_class(Problem.parse(text)) for text in problem or ()}
    devices, source = Device.all(), store.here()
    lower = source.lower().records

    def named(record: Record) -> bool:
        timed = not isinstance(record, Verdict) and speed_class(record.problem) in classes
        return everything or timed or record.backend in (backend or ())

    def holding(records: list[Record], among: view.Wisdom) -> list[Record]:
        return [record for record in records if exchange.foreign(record, devices, among) is None]

    def kept(records: list[Record]) -> list[Record]:
        if stale:
            records = holding(exchange.newest(records), view.indexed([*lower, *records]))
        return [record for record in records if not named(record)]

    count = source.change(kept, others=not everything)
    view.reload()
    render.console.print(f"{render.counted(count, 'line')} forgotten", soft_wrap=True)
    if left := len(holding([record for record in lower if named(record)], view.current())):
        what = "1 line holds here that stands" if left == 1 else f"{left} lines hold here that stand"
        raise InvalidProblem(
            f"{what} in {', '.join(map(str, source.beneath))}, which is for all users and left as it is:"
            " who may write that file can take them out"
        )


def _read() -> tuple[store.Store, Contents]:
    source = store.here()
    return source, source.read()


def _written(records: list[Record], file: Path) -> Console:
    """Write ``records`` to ``file`` or standard output; return the console for messages, which is then another."""
    if files.is_standard(file):
        typer.echo(exchange.content(records), nl=False)
        return Console(stderr=True, highlight=False, emoji=False)
    source = store.here()
    if file.resolve() in {path.resolve() for path in (source.path, *source.beneath)}:
        raise InvalidProblem(
            f"{file} is the store itself, which would lose what does not hold here: expected another file"
        )
    exchange.write(records, file)
    render.console.print(
        f"{render.counted(len(records), 'line')} written to {render.escape(str(file))}", soft_wrap=True
    )
    return render.console


def _print_counted(what: str, reasons: Counter[str], console: Console = render.console) -> None:
    for why, count in reasons.items():
        console.print(f"[yellow]{render.counted(count, 'line')} {what}[/] {render.escape(why)}", soft_wrap=True)


def _print_times(held: list[Record]) -> None:
    """The times of each class, ranked as the planner does. The fastest backend that is right is marked."""
    times = [record for record in held if isinstance(record, Time)]
    wrong = [record for record in held if isinstance(record, Verdict) and not record.right]

    def trusted(time: Time) -> bool:
        about = (verdict for verdict in wrong if verdict.backend == time.backend)
        same = (verdict for verdict in about if verdict.signature.device == time.signature.device)
        return not any(covers(verdict.problem, time.problem) for verdict in same)

    rows = render.table("device", "problem", "backend", "ms", "±", "measured", right=("ms", "±"))
    groups: dict[tuple[str, str], list[Time]] = {}
    for time in times:
        groups.setdefault((time.signature.device, str(representative(time.problem))), []).append(time)
    before: tuple[str, Problem] | None = None
    for (where, _), group in sorted(groups.items()):
        group.sort(key=lambda time: time.pace)
        best = next(filter(trusted, group), None)
        for time in group:
            label = ["" if before and before[0] == where else where]
            label += ["" if before == (where, time.problem) else str(time.problem)]
            before = where, time.problem
            name = render.escape(time.backend)
            spread = f"{(time.high - time.low) / 2:.2g}"
            cells = [
                f"[green]{name}[/]" if time is best else name,
                f"{time.ms:.4g}",
                spread,
                render.escape(time.date[:10]),
            ]
            rows.add_row(*map(render.escape, label), *cells)
    if times:
        render.whole(rows)


def _plain(record: Record) -> dict[str, Any]:
    shared = {"problem": str(record.problem), "backend": record.backend, "device": record.signature.device}
    dated = {"versions": dict(record.signature.versions), "source": record.signature.source, "date": record.date}
    if isinstance(record, Time):
        times = {"ms": record.ms, "ms_low": record.low, "ms_high": record.high, "runs": record.runs}
        return {**shared, "config": record.config, **times, "threads": record.threads, **dated}
    if isinstance(record, Untimed):
        return {**shared, "untimed": record.why, **dated}
    return {**shared, "right": record.right, "case": record.case, "why": record.why, **dated}
