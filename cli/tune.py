"""``attnswitch tune``: verify and time every backend on the problems that matter, and remember the results."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnswitch.bench.measure import Budget
from attnswitch.errors import InvalidProblem
from attnswitch.problem import Problem
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.session.shard import WHOLE, Shard
from attnswitch.wisdom import store
from attnswitch.wisdom.record import Time

from . import files, render
from .named import able, present

if TYPE_CHECKING:
    from attnswitch.tune.trial import Effort

__all__ = ["tune"]

SCHEMA = 1


def tune(
    problem: Annotated[
        list[str] | None, typer.Option(help="Measure this problem, such as b4.h16.s4096.d128.bf16.causal (repeatable).")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Measure the calls of this model, such as llama-3-8b (repeatable).")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a model's longest call.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a model's call. Default: 1.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of a model's calls: bf16 (the default), fp16 or fp32.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Measure a model's calls with gradients.")] = False,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure the problems that attnswitch.record or ATTNSWITCH_RECORD wrote to this file.", exists=True
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Try this backend too, which compiles for so long that it has to be asked for (repeatable)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    budget: Annotated[
        float, typer.Option(min=1, metavar="MS", help="Milliseconds to measure each candidate for.")
    ] = Budget().run / 2,
    search: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Seconds to search the configs of each backend, for each problem. Default: 2 if problems are named, 0"
            " for the catalogue.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Measure part I of N of the problems alone: 2/8. No two parts have one in common."
        ),
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure again what is known already.")] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds that one launch may take while it is verified. A longer one has failed."),
    ] = 120.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Find the fastest backend for each class of problems on this machine, and remember it for every later process.

    Without --problem, --model or --recorded it measures a catalogue of usual sizes. It skips what is known already, so
    the same command continues an interrupted run. Exit code 0: good. 1: a backend was wrong, and is not chosen from now
    on. 2: the tool could not do its work. 3: nothing could be measured.
    """
    where = present(device)
    output = _Output(where, json)
    files.check([json])
    tried = tuple(dict.fromkeys(backend or ()))
    for name in tried:
        able(name, where)
    part = WHOLE if shard is None else Shard.parse(shard)
    every = _problems(where, problem, model, context, batch, dtype, train, recorded)
    asked = list(part.dealt(iter(every)))
    if not every:
        render.error("nothing to measure: what was named holds no problem, or only such whose output is empty")
    elif not asked:
        render.error(f"nothing to measure: shard {part} of {len(every)} problem{'s' * (len(every) > 1)} is empty")
    from attnswitch.tune.trial import Effort  # torch is slow to import

    if search is None:
        search = Effort().search if problem or model or recorded else 0.0
    output.measure(asked, Effort(Budget(budget / 4, budget), search, asked=tried), timeout, again)
    output.show()
    raise typer.Exit(output.exit_code)


def _problems(
    where: str,
    problems: list[str] | None,
    models: list[str] | None,
    context: int | None,
    batch: int | None,
    dtype: str | None,
    train: bool,
    recorded: list[Path] | None,
) -> list[Problem]:
    """The problems that were named, or the catalogue; one of each class. Raises ``InvalidProblem``."""
    from attnswitch.tune import problems as named  # torch is slow to import

    given = {"--context": context, "--batch": batch, "--dtype": dtype, "--train": train or None}
    idle = [option for option, value in given.items() if value is not None and not models]
    if idle:
        raise InvalidProblem(f"{', '.join(idle)}: of a model's calls; name one with --model")
    asked = [Problem.parse(text) for text in problems or ()]
    for model in models or ():
        asked += named.of_model(model, context, batch=batch or 1, dtype=dtype or "bf16", train=train)
    for path in recorded or ():
        asked += named.recorded(path)
    if not (problems or models or recorded):
        asked = named.catalogue(where.partition(":")[0])
    return named.distinct(asked)


@dataclass(slots=True)
class _Output:
    """A run and its output."""

    where: str
    json: Path | None
    tuned: list[Any] = field(default_factory=list)
    left_out: int = 0
    stopped: bool = False
    start: float = field(default_factory=time.monotonic)

    @property
    def quiet(self) -> bool:
        """Whether standard output takes the JSON document alone."""
        return files.is_standard(self.json)

    @property
    def exit_code(self) -> int:
        """0 good, 1 a backend was wrong, 2 interrupted, 3 nothing could be measured."""
        if any(tuned.trial.wrong for tuned in self.tuned):
            return 1
        if self.stopped:
            return 2
        return 0 if self.left_out or any(tuned.trial.times for tuned in self.tuned) else 3

    def measure(self, problems: list[Problem], effort: Effort, timeout: float, again: bool) -> None:
        """Measure under a progress bar. The results of an interrupted run are kept."""
        from attnswitch.tune import session

        todo = [problem for problem in problems if again or not session.known(problem, self.where, effort.asked)]
        self.left_out = len(problems) - len(todo)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *left, console=render.console, transient=True, disable=self.quiet) as bar:
            task = bar.add_task(str(todo[0]) if todo else "", total=len(todo))
            try:
                for number, tuned in enumerate(session.run(todo, self.where, effort, timeout), 1):
                    self.tuned.append(tuned)
                    bar.update(task, advance=1, description=str(todo[min(number, len(todo) - 1)]))
                    self.write(last=number == len(todo))
            except KeyboardInterrupt:
                self.stopped = True
        if not todo or self.stopped:
            self.write(last=True)

    def write(self, *, last: bool) -> None:
        """Write the JSON document. A file is written after every problem, so that a killed run leaves its results."""
        if self.json is None or (files.at_the_end(self.json) and not last):
            return
        document = {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": render.command(self.json),
            "device": self.where,
            "environment": provenance(),
            "seconds": round(time.monotonic() - self.start, 3),
            "stopped": self.stopped,
            "known_before": self.left_out,
            "problems": [_plain(tuned) for tuned in self.tuned],
        }
        render.write_json(document, self.json)

    def show(self) -> None:
        """Print each problem with its candidates, the fastest first, and what was wrong or failed."""
        if self.quiet:
            return
        rows = render.table("problem", "backend", "ms", "±", "device", "config", "before", right=("ms", "±", "device"))
        for tuned in self.tuned:
            label = str(tuned.problem)
            for rank, t in enumerate(tuned.trial.times):
                name = render.escape(t.backend)
                before = "[dim]chosen before[/]" if t.backend == tuned.before else ""
                spread = f"{(t.high - t.low) / 2:.2g}"
                name = name if rank else f"[bold green]{name}[/]"
                on_device = tuned.trial.device_ms.get(t.backend)
                figures = f"{t.ms:.4g}", spread, "" if on_device is None else f"{on_device:.4g}"
                rows.add_row(render.escape(label), name, *figures, render.escape(t.config), before)
                label = ""
            for name, ratio in tuned.trial.hopeless.items():
                cells = (f"[dim]{render.escape(name)}[/]", "-", "", "", f"[dim]{ratio:.3g} times the fastest[/]", "")
                rows.add_row(render.escape(label), *cells)
                label = ""
        if self.tuned:
            render.whole(rows)
        for tuned in self.tuned:
            for verdict in tuned.trial.wrong:
                text = f"{verdict.backend} on {tuned.problem}: {verdict.why}"
                render.console.print(f"[bold red]wrong, left out from now on[/] {render.escape(text)}", soft_wrap=True)
            wrong = {verdict.backend for verdict in tuned.trial.wrong}
            for name, why in tuned.trial.failed.items():
                if name not in wrong:
                    text = f"{name} on {tuned.problem}: {why}"
                    render.console.print(f"[yellow]not measured[/] {render.escape(text)}", soft_wrap=True)
        changed = sum(tuned.before != tuned.after for tuned in self.tuned)
        measured = sum(bool(tuned.trial.times) for tuned in self.tuned)
        known = f", {self.left_out} known before" if self.left_out else ""
        ending = "; interrupted: the same command goes on" if self.stopped else ""
        render.console.print(
            f"{render.counted(measured, 'problem')} measured{known}; the choice changed for {changed};"
            f" {render.escape(str(store.here().path))}{ending}",
            soft_wrap=True,
        )


def _plain(tuned: Any) -> dict[str, Any]:
    return {
        "problem": str(tuned.problem),
        "before": tuned.before,
        "after": tuned.after,
        "times": [_time(record, tuned.trial.device_ms.get(record.backend)) for record in tuned.trial.times],
        "wrong": [{"backend": verdict.backend, "why": verdict.why} for verdict in tuned.trial.wrong],
        "failed": tuned.trial.failed,
        "hopeless": tuned.trial.hopeless,
    }


def _time(record: Time, on_device: float | None) -> dict[str, Any]:
    """Milliseconds by the application's clock, and by the device's."""
    spread = {"ms_low": record.low, "ms_high": record.high, "runs": record.runs}
    return {"backend": record.backend, "config": record.config, "ms": record.ms, **spread, "device_ms": on_device}
