"""``attnswitch verify``: fuzz this machine's kernels against float64."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import attnswitch
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.verify import emulation
from attnswitch.verify.demands import precision as demanded
from attnswitch.verify.demands.steering import EACH
from attnswitch.verify.drawing import provider
from attnswitch.verify.outcome import AUTO
from attnswitch.verify.report import to_html
from attnswitch.verify.session.corpus import default_folder
from attnswitch.verify.session.plan import EMULATED, EXAMPLES, RECIPES, Plan, Target, targets
from attnswitch.verify.session.tally import INTERRUPTED, Report
from attnswitch.verify.session.whole import run
from attnswitch.verify.terms import Terms

from . import demands, files, ranks, render, said, shards
from . import mutants as measured
from . import report as shown
from . import speed as speeds
from .court import COURT, FORBID, again, seat
from .named import functions, named, present
from .outputs import Outputs
from .watching import watched

__all__ = ["verify"]


def verify(
    context: typer.Context,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Verify this backend (repeatable): a name, a target such as package.module:Class, or auto, the"
            " dispatcher's own choice. Default: all."
        ),
    ] = None,
    function: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:NAME", help="Verify this function, called as its signature says (repeatable)."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="What it is called like: torch, flash-attn, flash-attn-varlen, paged, bhsd, bshd, attnswitch."
        ),
    ] = None,
    device: Annotated[list[str] | None, typer.Option(help="cpu, cuda:0, ... (repeatable). Default: all here.")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Cases to draw for each device. Default: {EXAMPLES}, or {EMULATED} where kernels are emulated; with"
            " --time, as many as there is time for.",
        ),
    ] = None,
    time: Annotated[str | None, typer.Option(help="Stop after this long: 90, 90s, 10m, 1h.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same cases and the same bits.")] = 0,
    secret: Annotated[bool, typer.Option("--secret", help="Draw the seed, and tell it at the end.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Drawn cases only: no fixed ones at tile edges and great lengths, no search."),
    ] = False,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence drawn. Default: 1,100 on the CPU, 2,100 on a GPU.")
    ] = None,
    recipes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Data recipes for each problem. Default: {RECIPES} where a backend builds something for a shape.",
        ),
    ] = None,
    max_failures: Annotated[int, typer.Option(min=1, help="Stop at this many distinct failures.")] = 10,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes for each device. Default: 1 a core; at most 8, of a GPU 16."),
    ] = None,
    isolate: Annotated[
        bool, typer.Option(help="Run kernels in processes of their own: a crash is a finding, and not the end.")
    ] = True,
    court: Annotated[bool | None, COURT] = None,
    forbid: Annotated[str | None, FORBID] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one launch may take; longer is a finding. Needs --isolate.")
    ] = 120.0,
    corpus: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of saved cases, replayed first; failures go there.")
    ] = None,
    no_corpus: Annotated[bool, typer.Option("--no-corpus", help="Neither replay nor save cases.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JUnit XML.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as a page that needs no other.")
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the results to FILE as Markdown.", envvar="GITHUB_STEP_SUMMARY"),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Carry out part I of N of the run alone: 2/8. The parts have no case in common."
        ),
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Run nothing: make one report of the logs that --ndjson wrote, named behind.")
    ] = False,
    logs: Annotated[list[Path] | None, typer.Argument(metavar="LOG", help="With --join: the logs.")] = None,
    ndjson: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every outcome to FILE as it comes, a line of JSON each.")
    ] = None,
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants",
            help="Try the verifier instead, on backends that are wrong on purpose: which check catches which.",
        ),
    ] = False,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="With --mutants: let every check look alone too, and tell which sees which."),
    ] = False,
    keep_worst: Annotated[
        bool, typer.Option("--keep-worst", help="Save each backend's worst case in the corpus, where it got worse.")
    ] = False,
    emit_pytest: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a test for each failure to FOLDER, which needs no Hypothesis."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="Hold every backend to this precision, whatever it declares: bf16, fp16, tf32, fp32, or a TOML file.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Problems that each backend named, else the dispatcher, has to take (repeatable), such as"
            " causal,gqa,mask=bool,D<=128,dtype=bf16: these features, alone and together. A refusal is a failure."
            " Or a definition of FlashInfer-Bench (FILE.json) or KernelBench (FILE.py), of which nothing is run.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The same under a name (repeatable): llm-training, serving-paged, ..."),
    ] = None,
    each: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --require or --profile: cases of each of its words, at least; one counts for all of its words."
            f" Default: {EACH}; fewer where kernels are emulated.",
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            metavar="METHODS",
            help="Verify attention over the ranks of torchrun, which starts this command: ring,all-to-all, or one.",
        ),
    ] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROBLEM",
            help="Then time what was named and is right on this problem, beside the fastest other (repeatable).",
        ),
    ] = None,
) -> None:
    """Fuzz every attention kernel of this machine against float64, outputs and gradients, and report.

    Exit code 0: all that ran was right. 1: a mismatch was found, or a demanded case refused. 2: the tool could not do
    its work. 3: nothing was verified, or a demanded class never tried.
    """
    seconds = None if time is None else _seconds(time)
    backend = [*(backend or ()), *functions(function, like)] or None
    if join or logs:
        raise typer.Exit(shards.join(context, logs or [], Outputs(json, junit, html, summary, None)))
    if no_corpus and (of_corpus := said.first(context, ("corpus", "keep_worst"))):
        raise InvalidProblem(f"--no-corpus beside {said.option(context, of_corpus)}: expected one of them")
    if over is not None:
        to = Outputs(json, junit, html, summary, None)
        raise typer.Exit(ranks.verify(context, over, to, seconds, None if no_corpus else corpus or default_folder()))
    timed = speeds.read(speed, backend)
    devices = _devices(device)
    asked = seat(context, backend, court, isolate=isolate, timeout=timeout, forbid=forbid)
    backends = _backends(backend)
    emulate = backend is not None and (device is not None or devices == ["cpu"])
    if not emulate and all(emulation.variables((name,), "cpu") for name in backends):
        devices = [name for name in devices if name != "cpu"]  # a GPU here runs them
    aims = targets(devices, backends, longest, recipes, emulate=emulate)
    plan = Plan(
        _fewer_emulated(aims) if examples is None and seconds is None else aims,
        examples if examples is not None or seconds is not None else EXAMPLES,
        _drawn(seed) if secret else seed,
        seconds,
        max_failures=max_failures,
        corpus=None if no_corpus else corpus or default_folder(),
        pass_over=corpus is None,
        isolate=isolate,
        workers=workers,
        timeout=timeout,
        lattice=not quick,
        targeted=not quick,
        keep_worst=keep_worst,
        # A backend that is wrong by a stricter measure is not wrong for its callers.
        remember=precision is None and forbid is None,
        terms=Terms(None if precision is None else demanded.read(precision), asked),
        requirements=demands.read(require, profile, longest),
        held=tuple(backends) if backend is not None else (AUTO,),
        each=demands.each(each, require, profile),
        replayed_with=(*(() if precision is None else ("--precision", precision)), *again(court, forbid)),
        secret=secret,
        shard=shards.part(shard, secret=secret),
    )
    outputs = Outputs(json, junit, html, summary, emit_pytest, plan.terms)
    outputs.check(plan.corpus, ndjson)
    os.environ.update(provider.storage())  # where this process draws: without --isolate, and with --mutants
    if mutants:
        _only_mutants(
            *(backend, device, time, junit, ndjson, emit_pytest, precision, require, profile, each),
            *(court, forbid, speed, shard),
        )
        raise typer.Exit(_mutants(plan, outputs, matrix))
    if matrix:
        raise InvalidProblem("--matrix is of the verifier's own test: add --mutants")
    if not outputs.quiet:
        render.notices(backends)
        render.emulated(plan)
    report = watched(plan, outputs.quiet, ndjson, run)
    if not (report.broke or report.stopped == INTERRUPTED):
        speeds.measure(report, timed, backends, asked)
    if not outputs.quiet:
        shown.show(report)
    outputs.write(report)
    raise typer.Exit(report.exit_code)


def _only_mutants(*others: object) -> None:
    """Refuse what has no meaning beside ``--mutants``."""
    if any(others):
        raise InvalidProblem(
            "--mutants tries the verifier itself: of the other options it takes --matrix, --seed, --examples,"
            " --workers, --json and --html"
        )


def _mutants(plan: Plan, outputs: Outputs, alone: bool) -> int:
    """The exit code of the verifier's own test: 1 if a mutant survives."""
    matrix = measured.run(plan.seed, plan.examples or EXAMPLES, plan.workers, alone, outputs.quiet)
    if outputs.json is not None:
        render.write_json(matrix.to_json(), outputs.json)
    if outputs.html is not None:
        files.write(to_html(Report(plan.seed), matrix), outputs.html)
    if not outputs.quiet:
        measured.show(matrix)
    return 1 if matrix.survivors else 0


def _drawn(seed: int) -> int:
    """A seed that nobody knows yet."""
    if seed:
        raise InvalidProblem(f"--seed {seed} and --secret: name one of them")
    return secrets.randbelow(2**63)


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


def _fewer_emulated(aims: tuple[Target, ...]) -> tuple[Target, ...]:
    """With a number of cases of their own where kernels are emulated."""
    return tuple(replace(target, examples=EMULATED) if target.emulation else target for target in aims)


def _devices(names: list[str] | None) -> list[str]:
    """The devices named, checked; or the CPU and every GPU that torch sees."""
    if names is not None:
        return list(dict.fromkeys(present(name) for name in names))
    return ["cpu", *(f"cuda:{index}" for index in range(len(Device.all()) - 1))]


def _backends(names: list[str] | None) -> list[str]:
    """The backends named, checked; or the dispatcher's choice and every backend that can run here.

    One that waits to be asked for is left out: each case would take it seconds to compile, or gets no verdict.
    """
    if names is None:
        here = Device.all()
        able = [name for name, why in attnswitch.backends().items() if why is None]
        return [AUTO, *(name for name in able if any(_unasked(name, device) for device in here))]
    for name in dict.fromkeys(names):
        named(name)
    return list(dict.fromkeys(names))


def _unasked(name: str, device: Device) -> bool:
    """Whether a backend that can run here is tried though nobody names it. A broken plug-in is."""
    try:
        return registry.loaded(name).standing(device).unasked
    except Exception:  # the verifier tells what it was
        return True
