"""``attnswitch verify --speed``: how fast the backends that were named are, beside the fastest of the others here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnswitch.errors import InvalidProblem
from attnswitch.problem import Problem
from attnswitch.verify.court import Court, sitting
from attnswitch.verify.outcome import AUTO
from attnswitch.verify.report import demands
from attnswitch.verify.session.tally import Report, Speed

from . import render

if TYPE_CHECKING:
    from attnswitch.bench.beside import Beside

__all__ = ["measure", "read", "show"]


def read(texts: list[str] | None, backends: list[str] | None) -> tuple[Problem, ...]:
    """The problems of ``--speed``. Raises ``InvalidProblem``."""
    if texts and not any(name != AUTO for name in backends or ()):
        raise InvalidProblem("--speed times the backends that are named beside the others: add --backend or --function")
    return tuple(dict.fromkeys(map(Problem.parse, texts or ())))


def measure(report: Report, problems: Sequence[Problem], named: Sequence[str], court: Court) -> None:
    """Time on each problem those of ``named`` that ``report`` has nothing against, and note it there.

    Targets are timed before the court alone, and the others stand before it too: all are timed in the same way.
    """
    judged = demands.verdict(report)["backends"]
    for device in dict.fromkeys(each["device"] for each in judged):
        seated = court.on(device).backends
        mine = {each["backend"]: each["correct"] for each in judged if each["device"] == device}
        for problem in problems:
            asked = []
            for name in (name for name in mine if name in named and name != AUTO):
                why = _against(name, mine[name], seated, device)
                if why:
                    report.speeds.setdefault((device, name), []).append(Speed(str(problem), why=why))
                else:
                    asked.append(name)
            before = [name for name in asked if name in seated]
            for names, others_seated in ((before, True), ([name for name in asked if name not in before], False)):
                if names:
                    _note(report, device, names, _timed(problem, device, names, named, court, others_seated))


def _against(name: str, correct: bool, seated: Sequence[str], device: str) -> str:
    """Why a backend is not timed."""
    if not correct:
        return "not correct"
    if ":" in name and name not in seated:
        return f"it is timed before the court, and does not stand before it on {device}: add --court"
    return ""


def _timed(
    problem: Problem, device: str, names: Sequence[str], named: Sequence[str], court: Court, others_seated: bool
) -> Beside:
    from attnswitch.bench import workload  # torch is slow to import
    from attnswitch.bench.beside import Beside, beside
    from attnswitch.bench.candidates import fitting
    from attnswitch.bench.steps import first_line

    try:
        others = [name for name in fitting(workload.of(problem, device)) if name not in named]
        with sitting(Court(tuple(others) if others_seated else (), court.timeout, everywhere=True)):
            return beside(problem, device, names, others)
    except (InvalidProblem, MemoryError, RuntimeError) as error:  # there may be no room for the operands, or the answer
        return Beside(problem, failed=dict.fromkeys(names, first_line(error)))


def _note(report: Report, device: str, names: Sequence[str], found: Beside) -> None:
    best = found.fastest(apart_from=names)
    for name in names:
        speed = Speed(str(found.problem), why=found.failed.get(name, ""))
        if name in found.milliseconds:
            other = None if best is None else found.milliseconds[best]
            speed = Speed(str(found.problem), found.milliseconds[name], best, other)
        report.speeds.setdefault((device, name), []).append(speed)


def show(report: Report) -> None:
    """A line for each backend and problem."""
    for (device, backend), speeds in report.speeds.items():
        for speed in speeds:
            said = speed.why and f"not timed: {speed.why}"
            if speed.milliseconds is not None:
                said = f"{speed.milliseconds:.3g} ms a call"
                if speed.ratio is not None:
                    said += f", {speed.ratio:.2f} times as fast as {speed.beside} ({speed.milliseconds_beside:.3g} ms)"
            text = f"speed of {backend} on {device}, {speed.problem}: {said}"
            render.console.print(render.escape(text), soft_wrap=True)
