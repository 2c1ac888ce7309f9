"""``attnswitch bench``: backends timed side by side with their peers, in one run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnswitch.bench import document
from attnswitch.bench.measure import Budget, Limits, limits
from attnswitch.bench.record import Direction, Record
from attnswitch.bench.suites import Row, ad_hoc, suites
from attnswitch.bench.table import to_csv
from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of
from attnswitch.verify.session.provenance import provenance

from . import files, render, timings
from .named import named, present

__all__ = ["bench"]

#: Stands for an empty list where the suite names backends or peers.
NONE = "none"
#: Suites where none is named, by kind of device.
_DEFAULT = {"cuda": "grid", "cpu": "quick"}


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Argument(
            help="grid, forward, backward, features, decode, serving, memory, quick, unseen-cpu, unseen-gpu."
            " Default: grid, quick on a CPU"
        ),
    ] = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="Measure this problem, such as b4.h16.s4096.d128.bf16.causal (repeatable)."),
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name contains this, such as 'causal' (repeatable).")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this backend in place of the suite's (repeatable): a name, a target, auto, or none."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Measure this peer in place of the suite's (repeatable): torch, flex, fa4, or none."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="Beside each backend's own choice, measure its configs whose text has PART (repeatable); '' is all.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    direction: Annotated[
        Literal["forward", "backward", "training", "all"],
        typer.Option(help="Backward is the gradients alone, training both in one call; all is what the suite has."),
    ] = "all",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the results to FILE as JSON, row by row; - for standard output."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the results to FILE as comma-separated values, row by row; - for standard output.",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1, metavar="MS", help="Milliseconds that each candidate is measured in.")
    ] = Budget().run,
) -> None:
    """Time backends and peers in turn on this machine, hold each result against the answer, and report.

    Exit code 0: good. 1: a result was wrong. 2: the tool could not do its work. 3: nothing was measured.
    """
    where = present(device)
    rows = [
        _chosen(found, _backends(backend), _peers(peer), tuple(config or ()))
        for found in _rows(suite, problem, row, where, None if direction == "all" else direction)
    ]
    output = _Output(json, csv, where, Budget(budget / 4, budget))
    files.check((json, csv))
    output.measure(rows, get_args(Direction) if direction == "all" else (direction,))
    if not output.quiet:
        assert output.limits is not None
        timings.show(output.records, output.limits, output.stopped)
    raise typer.Exit(output.exit_code)


@dataclass(slots=True)
class _Output:
    """A run and where it is written."""

    json: Path | None
    csv: Path | None
    device: str
    budget: Budget
    limits: Limits | None = None
    records: list[Record] = field(default_factory=list)
    stopped: str | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def quiet(self) -> bool:
        """Whether standard output is for a document alone."""
        return any(map(files.is_standard, (self.json, self.csv)))

    @property
    def exit_code(self) -> int:
        """0 good, 1 a wrong result, 2 interrupted, 3 nothing was measured."""
        states = {record.status for record in self.records}
        if self.stopped:
            return 2
        return 1 if "wrong" in states else 0 if "measured" in states else 3

    def measure(self, rows: Iterable[Row], directions: tuple[Direction, ...]) -> None:
        """Run every step with a bar that moves; what an interrupted run has measured is kept."""
        from attnswitch.bench.run import idle_configs, run, steps  # torch is slow to import

        todo = steps(rows, directions)
        if not todo:
            raise InvalidProblem("no row of the suites named is left to measure: see --row and --direction")
        if idle := idle_configs(todo, self.device):
            parts = ", ".join(map(repr, idle))
            raise InvalidProblem(f"--config {parts}: no config that a backend has for these rows has it in its text")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=render.console, transient=True, disable=self.quiet) as bar:
            task = bar.add_task("the limits of the device", total=len(todo))
            self.limits = limits(self.device, self.budget)
            try:
                for step in todo:
                    bar.update(task, description=str(step))
                    self.records += run(step, self.device, self.limits, self.budget)
                    self.write(last=step is todo[-1])
                    bar.advance(task)
            except KeyboardInterrupt:
                self.stopped = "interrupted"
                self.write(last=True)

    def write(self, *, last: bool) -> None:
        """Write the results: to files after every step, so that a run that is killed leaves what it had."""
        if self.csv is not None and (last or not files.at_the_end(self.csv)):
            files.write(to_csv(self.records), self.csv)
        if self.json is None or self.limits is None or (files.at_the_end(self.json) and not last):
            return
        made = document.to_json(
            self.records,
            device=self.device,
            limits=self.limits,
            budget=self.budget,
            environment=provenance(),
            command=render.command(self.json),
            seconds=time.monotonic() - self.start,
            stopped=self.stopped,
        )
        render.write_json(made, self.json)


def _rows(
    names: list[str] | None,
    problems: list[str] | None,
    parts: list[str] | None,
    device: str,
    direction: Direction | None,
) -> list[Row]:
    """The rows asked for: of the suites, then the problems; the default suite where neither is named."""
    known = suites()
    if not names and not problems:
        names = [_DEFAULT["cpu" if device == "cpu" else "cuda"]]
    for name in names or ():
        if name not in known:
            raise InvalidProblem(f"suite {name!r} is not known; {one_of(name, known)}")
    rows = [row for name in dict.fromkeys(names or ()) for row in known[name].rows]
    for part in parts or ():
        if not any(part in row.name for row in rows):
            raise InvalidProblem(f"--row {part!r}: no row of the suites named has it in its name")
    rows = [row for row in rows if not parts or any(part in row.name for part in parts)]
    return rows + [ad_hoc(text, direction) for text in dict.fromkeys(problems or ())]


def _backends(names: list[str] | None) -> tuple[str, ...] | None:
    """The backends named, checked; None for the suite's own."""
    if names is None:
        return None
    return tuple(named(name) for name in dict.fromkeys(names) if name != NONE)


def _peers(names: list[str] | None) -> tuple[str, ...] | None:
    """The peers named, checked; None for the suite's own."""
    if names is None:
        return None
    from attnswitch.bench.peers import PEERS  # torch is slow to import

    for name in names:
        if name not in (*PEERS, NONE):
            raise InvalidProblem(f"peer {name!r} is not known; {one_of(name, (*PEERS, NONE))}")
    return tuple(name for name in dict.fromkeys(names) if name != NONE)


def _chosen(row: Row, backends: tuple[str, ...] | None, peers: tuple[str, ...] | None, configs: tuple[str, ...]) -> Row:
    """``row`` with the candidates asked for in place of its own."""
    return row.replace(
        backends=row.backends if backends is None else backends,
        peers=row.peers if peers is None else peers,
        configs=configs,
    )
