"""Reads beside operands, which no result need show: memory is let end where they do."""

from __future__ import annotations

from attnswitch.verify import court
from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case, Placing
from attnswitch.verify.drawing.placings import FENCED
from attnswitch.verify.launch import fenced
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import KernelFailed, NotApplicable, Subject, Trial

__all__ = ["CHECKS"]


def _applies(case: Case) -> bool:
    return not case.unseeded and case.work > 0


def _fenced(subject: Subject, placing: str) -> Subject:
    """The same with every operand at a fence."""
    return subject.derive(placing, lambda: (subject.case.replace(placing=Placing(*[placing] * 5)), subject.data))


def _fences(trial: Trial) -> Failure | None:
    """A read beyond ends the process, or raises on a GPU: that is a crash, and its case says what was looked at."""
    if court.seated(trial.chosen):
        raise NotApplicable("its operands are copied into a process of its own")
    if why := fenced.lacking(trial.device):
        raise NotApplicable(why)
    return first_of(*(_at(trial, *fence) for fence in FENCED.items()))


def _at(trial: Trial, placing: str, lies: str) -> Failure | None:
    try:
        got = trial.run(_fenced(trial.subject, placing))
    except KernelFailed as failed:
        if isinstance(failed.__cause__, fenced.NoFence):
            raise NotApplicable(str(failed)) from None
        raise
    return within(trial, "fences", got, trial.results, f"operands of which each {lies} give another")


CHECKS = (
    Check(
        "fences",
        "it reads nothing beside its operands, where there may be no memory",
        "Junk around operands shows what a result takes in; NumPy, in which mutants are written, reads nothing else.",
        _applies,
        _fences,
        varlen=True,
    ),
)
