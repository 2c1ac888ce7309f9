"""``attnswitch verify``: fuzz this machine's kernels against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import attnswitch
from attnswitch import registry
from attnswitch.device import Device
from attnswitch.errors import InvalidProblem
from attnswitch.verify import AUTO, EXAMPLES, Plan, Report, default_folder, run, targets, to_json, to_junit

from . import render

__all__ = ["present", "verify"]


def verify(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Verify this backend (repeatable); auto is the dispatcher's own choice. Default: all."),
    ] = None,
    device: Annotated[list[str] | None, typer.Option(help="cpu, cuda:0, ... (repeatable). Default: all here.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Cases to draw for each device.")] = EXAMPLES,
    time: Annotated[str | None, typer.Option(help="Stop after this long: 90, 90s, 10m, 1h.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same cases and the same bits.")] = 0,
    max_failures: Annotated[int, typer.Option(min=1, help="Stop at this many distinct failures.")] = 10,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of saved cases, replayed first; failures go there.")
    ] = None,
    no_corpus: Annotated[bool, typer.Option("--no-corpus", help="Neither replay nor save cases.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to FILE as JSON; - for standard output.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the results to FILE as JUnit XML.")] = None,
) -> None:
    """Fuzz every attention kernel of this machine against float64, outputs and gradients, and report.

    Exit code 0: all that ran was right. 1: a mismatch was found. 2: the tool could not do its work. 3: nothing was
    verified.
    """
    seconds = None if time is None else _seconds(time)
    folder = None if no_corpus else corpus or default_folder()
    plan = Plan(
        targets([present(name) for name in device] if device else _devices(), _backends(backend)),
        examples,
        seed,
        seconds,
        max_failures=max_failures,
        corpus=folder,
    )
    quiet = str(json) == "-"
    _check_targets(folder, *(path for path in (json, junit) if path is not None and not quiet))
    report = _run(plan, quiet)
    if json is not None:
        render.write_json(to_json(report), json)
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(to_junit(report))
    if not quiet:
        _print(report)
    raise typer.Exit(report.exit_code)


def _run(plan: Plan, quiet: bool) -> Report:
    total = plan.examples * len(plan.targets)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cases, [green]{task.fields[verified]} verified[/]{task.fields[bad]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=render.console, transient=True, disable=quiet) as bar:
        task = bar.add_task("starting", total=total, verified=0, bad="")

        def progress(report: Report, doing: str) -> None:
            bad = f", [red]{len(report.failures)} mismatches[/]" if report.failures else ""
            bar.update(task, completed=report.cases, description=doing, verified=report.verified, bad=bad)

        return run(plan, progress)


def _print(report: Report) -> None:
    render.console.print(render.counts(report))
    render.console.print(
        "[dim]grads: verified with gradients; error/bound: the worst element, right up to 1; refused: not run, with a"
        " reason[/]",
        soft_wrap=True,
    )
    render.failures(report.failures)
    rate = report.cases / report.seconds if report.seconds else 0.0
    stopped = f", stopped: {report.stopped}" if report.stopped else ""
    replayed = f", {report.replayed} saved cases replayed" if report.replayed else ""
    render.console.print(
        f"\n{report.cases} cases{replayed}; {report.verified} results verified in {report.seconds:.0f} s"
        f" ({rate:.0f} cases/s), seed {report.seed}{stopped}",
        soft_wrap=True,
    )
    verdict = {
        0: "[bold green]every result is within its error bound[/]",
        2: "[bold yellow]interrupted; what ran is within its error bound[/]",
        1: f"[bold red]{len(report.failures)} distinct mismatches[/]",
        3: "[bold yellow]nothing was verified[/]",
    }
    render.console.print(verdict[report.exit_code])


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidProblem(f"--time {text!r}: expected a duration such as 90, 90s, 10m or 1h")
    return seconds


def _check_targets(folder: Path | None, *files: Path) -> None:
    """Find out before a long run, not after it, that a result could not be written."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidProblem(f"--corpus {folder} is a file: expected a folder")
    for path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise InvalidProblem(f"{path} cannot be written: {error}") from None


def present(name: str) -> str:
    """``name`` as torch spells it, if it is a device of this machine. Raises ``InvalidProblem`` if not."""
    device = Device.parse(name)
    if not device.present:
        raise InvalidProblem(f"device {name!r} is not in this machine: kernels can be planned for it, not run")
    return "cuda:0" if name == "cuda" else name


def _devices() -> list[str]:
    """The CPU and every GPU that torch sees."""
    return ["cpu", *(f"cuda:{index}" for index in range(len(Device.all()) - 1))]


def _backends(named: list[str] | None) -> list[str]:
    """The names given, checked; or the dispatcher's choice and every backend that can run here."""
    if named is None:
        return [AUTO, *(name for name, why in attnswitch.backends().items() if why is None)]
    known = (AUTO, *registry.names())
    for name in named:
        if name not in known:
            raise InvalidProblem(f"backend {name!r} is not known; expected one of {', '.join(known)}")
    return named
