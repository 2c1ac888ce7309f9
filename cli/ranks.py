"""``attnswitch verify --ranks``: attention over the processes of a launcher."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from attnswitch.errors import InvalidProblem
from attnswitch.verify import ranks
from attnswitch.verify.drawing import provider
from attnswitch.verify.session.plan import Plan
from attnswitch.verify.session.tally import Report
from attnswitch.verify.session.whole import Progress

from . import mutants, render, said
from . import report as shown
from .outputs import Outputs
from .watching import watched

__all__ = ["verify"]

#: Cases of a run that says neither how many nor how long.
_EXAMPLES = 1000
#: What can be said beside ``--ranks``.
_BESIDE = (
    "over", "device", "examples", "time", "seed", "max_failures", "corpus", "no_corpus", "timeout", "mutants",
    "json", "junit", "html", "summary", "ndjson",
)  # fmt: skip
#: And what of that says nothing to ``--mutants``.
_OF_RUNS = ("time", "max_failures", "corpus", "no_corpus", "junit", "html", "summary", "ndjson")


def verify(context: typer.Context, methods: str, outputs: Outputs, seconds: float | None, corpus: Path | None) -> int:
    """The exit code of this process: that of the run on rank 0, and 0 on all others. Raises ``InvalidProblem``."""
    given = context.params
    if other := said.first(context, [name for name in given if name not in _BESIDE]):
        raise InvalidProblem(
            f"{said.option(context, other)}: --ranks verifies what is computed over ranks, and takes no such option"
        )
    names = ranks.methods_of(methods)
    devices = given["device"] or [None]
    if len(devices) > 1:
        raise InvalidProblem("--device with --ranks: name one, cpu or cuda")
    os.environ.update(provider.storage())
    with ranks.joined(devices[0], given["timeout"]) as conductor:
        if conductor is None:
            return 0
        outputs.check(corpus, given["ndjson"])
        if given["mutants"]:
            if unused := said.first(context, _OF_RUNS):
                raise InvalidProblem(
                    f"{said.option(context, unused)}: --mutants over ranks takes --seed, --examples, --json"
                )
            return _mutants(conductor, names, outputs, given["seed"], given["examples"] or _EXAMPLES)
        examples = given["examples"] if given["examples"] is not None or seconds is not None else _EXAMPLES
        limits = examples, given["seed"], seconds
        plan = ranks.plan(names, conductor, *limits, corpus, max_failures=given["max_failures"])

        def carry_out(plan: Plan, progress: Progress) -> Report:
            return ranks.run(plan, conductor, progress)

        report = watched(plan, outputs.quiet, given["ndjson"], carry_out)
    outputs.write(report)
    if not outputs.quiet:
        shown.show(report)
    return report.exit_code


def _mutants(conductor: ranks.Conductor, names: tuple[str, ...], outputs: Outputs, seed: int, examples: int) -> int:
    """The exit code of the verifier's own test over ranks: 1 if a mutant survives."""
    with mutants.bar(outputs.quiet) as progress:
        matrix = ranks.measure(conductor, names, seed, examples, progress=progress)
    if outputs.json is not None:
        render.write_json(matrix.to_json(), outputs.json)
    if not outputs.quiet:
        mutants.show(matrix)
    return 1 if matrix.survivors else 0
