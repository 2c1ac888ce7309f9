"""``attnswitch replay``: run saved cases again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from attnswitch.errors import InvalidProblem, VerificationError
from attnswitch.parallel import METHODS
from attnswitch.verify import emulation, terms
from attnswitch.verify.demands.precision import read as level
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.judge import check
from attnswitch.verify.outcome import Failure, Outcome
from attnswitch.verify.report import to_pytest
from attnswitch.verify.report.facts import element
from attnswitch.verify.session import apart
from attnswitch.verify.session.corpus import Saved, load
from attnswitch.verify.session.pool import Isolated
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.terms import Terms

from . import render
from .court import COURT, FORBID, seat
from .named import named, present

__all__ = ["replay"]

WORDS = {"verified": "FIXED", "mismatch": "FAILED", "refused": "REFUSED", "unavailable": "ABSENT"}
COLOURS = {"FIXED": "green", "FAILED": "bold red", "ERROR": "bold red"}


def replay(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Saved cases, or folders of them.", exists=True)],
    backend: Annotated[
        str | None,
        typer.Option(help="Run with this backend instead of the one that failed. A target must be named here."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Run on this device instead of the one it failed on.")] = None,
    isolate: Annotated[
        bool, typer.Option(help="Run in a process of its own: a crash is an answer. Without it, a debugger can look.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one launch may take; longer has failed. Needs --isolate.")
    ] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    emit_pytest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the case, which must be one, to FILE as a test without Hypothesis."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Hold the backend to this precision, as verify --precision.")
    ] = None,
    court: Annotated[bool | None, COURT] = None,
    forbid: Annotated[str | None, FORBID] = None,
) -> None:
    """Run saved cases: FIXED, FAILED, REFUSED (the backend does not take it now), ABSENT or ERROR (not judged).

    Exit code 1 if one failed; else 2 if one could not be judged for an error; else 3 if none was verified.
    """
    device = None if device is None else present(device)
    seated = seat(context, backend and [backend], court, isolate=isolate, timeout=timeout, forbid=forbid)
    backend = None if backend is None else named(backend)
    paths = _paths(files)
    if emit_pytest is not None and len(paths) > 1:
        raise InvalidProblem(f"--emit-pytest takes one case, and {len(paths)} were named")
    demanded = Terms(None if precision is None else level(precision), seated)
    words, documents = [], []
    with _Again(isolate, timeout, demanded) as again:
        for path in paths:
            outcome, error = None, ""
            try:
                saved = load(path)
                outcome = _run(again, saved, backend, device)
            except (InvalidProblem, VerificationError, OSError) as problem:
                error = str(problem)
            except Exception as mistake:  # the verifier's own: the other cases can still be judged
                error = f"{type(mistake).__name__}: {mistake}"
            words.append("ERROR" if outcome is None else WORDS[outcome.verdict])
            if json:
                documents.append(_document(path, words[-1], outcome, error))
            else:
                _print(path, words[-1], outcome, error)
            if emit_pytest is not None and outcome is not None:
                _write_test(emit_pytest, saved, outcome, demanded)
    if json:
        render.write_json(documents, None)
    raise typer.Exit(1 if "FAILED" in words else 2 if "ERROR" in words else 0 if "FIXED" in words else 3)


def _paths(named: list[Path]) -> list[Path]:
    """The files, with those of each folder in its place."""
    paths = []
    for path in named:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise InvalidProblem(f"{path} holds no saved cases: expected files that end in .json")
        paths += inside
    return paths


def _run(again: _Again, saved: Saved, backend: str | None, device: str | None) -> Outcome:
    name, where = backend or saved.backend, device or saved.device
    if backend is None and ":" in name:  # a file is data: what it names is not run for its sake
        raise InvalidProblem(
            f"{saved.path} is of the target {name}, which is code to import: name it yourself, --backend {name}"
        )
    if name in METHODS:
        raise InvalidProblem(
            f"{saved.path} is of attention over ranks, which needs their processes: torchrun --nproc-per-node N"
            f" -m attnswitch verify --ranks {name} --corpus {saved.path.parent.parent}"
        )
    named(name)
    if saved.check == "conduct" and name not in again.demanded.court.on(where).backends:
        raise InvalidProblem(f"{saved.path} is of the check conduct, which is looked at before the court: add --court")
    if device is None:
        try:
            where = present(where)
        except InvalidProblem as absence:
            if not where.startswith("cuda"):
                raise
            return Outcome(saved.case, name, where, "unavailable", reasons=(str(absence),))
    return again(saved.case, name, where)


@dataclass(slots=True)
class _Again:
    """Runs saved cases; a process for each device, and emulation there, is kept from one to the next."""

    isolate: bool
    timeout: float
    demanded: Terms
    _pools: dict[tuple[str, str], Isolated] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __call__(self, case: Case, backend: str, device: str) -> Outcome:
        wanted = emulation.variables((backend,), device)
        if not self.isolate:
            emulation.begin(wanted)
            with terms.within(self.demanded):
                return check(case, backend, device)
        place = device, emulation.text(wanted)
        if place not in self._pools:
            self._pools[place] = self._stack.enter_context(apart.pool(device, backend, self.timeout, self.demanded))
        return self._pools[place].attempt(case, backend, device)

    def __enter__(self) -> _Again:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _document(path: Path, word: str, outcome: Outcome | None, error: str) -> dict[str, Any]:
    if outcome is None:
        return {"file": str(path), "result": word, "error": error}
    return {
        "file": str(path),
        "result": word,
        "backend": outcome.backend,
        "device": outcome.device,
        "emulated": emulation.variables((outcome.backend,), outcome.device),
        "case": str(outcome.case),
        "failure": None if outcome.failure is None else f"{outcome.failure.title}: {outcome.failure.message}",
        "reasons": list(outcome.reasons),
        "worst_error_over_bound": max(outcome.ratios.values(), default=0.0),
    }


def _print(path: Path, word: str, outcome: Outcome | None, error: str) -> None:
    where = f": {outcome.backend} on {outcome.device}" if outcome is not None else ""
    if outcome is not None and emulation.variables((outcome.backend,), outcome.device):
        where += ", emulated"
    head = f"[{COLOURS.get(word, 'yellow')}]{word}[/] {render.escape(path.name + where)}"
    render.console.print(head, soft_wrap=True)
    lines = [error]
    if outcome is not None:
        failure = outcome.failure
        wrong = [f"{failure.title}: {failure.message}", element(failure)] if failure is not None else []
        lines = [str(outcome.case), *outcome.reasons, *wrong]
    for line in filter(None, lines):
        render.console.print(f"  {render.escape(line)}", soft_wrap=True)


def _write_test(path: Path, saved: Saved, outcome: Outcome, demanded: Terms) -> None:
    """The failure as it is now, or as it was saved where it is fixed."""
    failure = outcome.failure or Failure(saved.check or "reference", "it failed when it was saved")
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = emulation.fact(emulation.variables((outcome.backend,), outcome.device))
    environment = {**provenance(), **facts}
    test = to_pytest(saved.case, outcome.backend, outcome.device, failure, environment, demanded)
    path.write_text(test, encoding="utf-8", errors="replace")
