"""``attnswitch replay``: run saved cases again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnswitch.errors import InvalidProblem
from attnswitch.verify import Outcome, check, load

from . import render
from .verify import present

__all__ = ["replay"]


def replay(
    files: Annotated[list[Path], typer.Argument(help="Saved cases.", exists=True, dir_okay=False)],
    backend: Annotated[str | None, typer.Option(help="Run with this backend instead of the one that failed.")] = None,
    device: Annotated[str | None, typer.Option(help="Run on this device instead of the one it failed on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run saved cases: FIXED, FAILED, REFUSED (the backend does not take it now) or ABSENT.

    Exit code 1 if one failed; 3 if none could be judged.
    """
    words = {"verified": "FIXED", "mismatch": "FAILED", "refused": "REFUSED", "unavailable": "ABSENT"}
    documents, verdicts = [], []
    for path in files:
        saved = load(path)
        where = device or saved.device
        try:
            where = present(where)
        except InvalidProblem as absence:
            if device is not None or not where.startswith("cuda"):
                raise
            outcome = Outcome(saved.case, backend or saved.backend, where, "unavailable", reasons=(str(absence),))
        else:
            outcome = check(saved.case, backend or saved.backend, where)
        word = words[outcome.verdict]
        verdicts.append(outcome.verdict)
        documents.append(
            {
                "file": str(path),
                "result": word,
                "backend": outcome.backend,
                "device": outcome.device,
                "case": str(saved.case),
                "failure": None if outcome.failure is None else f"{outcome.failure.check}: {outcome.failure.message}",
                "reasons": list(outcome.reasons),
                "worst_error_over_bound": max(outcome.ratios.values(), default=0.0),
            }
        )
        if json:
            continue
        colour = {"FIXED": "green", "FAILED": "bold red"}.get(word, "yellow")
        render.console.print(f"[{colour}]{word}[/] {path.name}: {outcome.backend} on {outcome.device}", soft_wrap=True)
        render.console.print(f"  {render.escape(str(saved.case))}", soft_wrap=True)
        failure = outcome.failure
        for line in (*outcome.reasons, *([f"{failure.check}: {failure.message}"] if failure else [])):
            render.console.print(f"  {render.escape(line)}", soft_wrap=True)
        if failure and failure.expected is not None:
            render.console.print(
                f"  element {list(failure.index or ())} is {failure.got!r}, expected {failure.expected!r}"
                f" within {failure.bound:.3g}",
                soft_wrap=True,
            )
    if json:
        render.write_json(documents, None)
    if "mismatch" in verdicts:
        raise typer.Exit(1)
    if "verified" not in verdicts:
        raise typer.Exit(3)
