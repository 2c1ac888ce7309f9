"""What surrounds a call in an application: autocast, streams under load, CUDA graphs, another current device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from attnswitch.verify import court
from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import elements
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch.call import Returned, call, hosted, place_operands
from attnswitch.verify.launch.graph import captured
from attnswitch.verify.launch.surroundings import Surroundings, surrounded
from attnswitch.verify.outcome import Failure
from attnswitch.verify.trial import KernelFailed, NotApplicable, Subject, Trial

__all__ = ["CHECKS"]

#: Blocks of a result's size, more than are free.
_STALE = 8


def _torch_case(case: Case) -> bool:
    return case.library == "torch" and not case.unseeded and not case.poison and case.work > 0


def _same(trial: Trial, check: str, around: Callable[[Callable[[], Any]], Any], message: str) -> Failure | None:
    return within(trial, check, trial.run(trial.subject, around), trial.results, message)


def _autocast(trial: Trial) -> Failure | None:
    """Forward and backward in an autocast region: the caller's dtype stays, and so do the numbers."""

    def around(run: Callable[[], Any]) -> Any:
        with surrounded(Surroundings(autocast="bfloat16"), trial.device):
            returned = run()
        for name, result in returned.results.items():
            if result.dtype != trial.returned.results[name].dtype:
                raise _Cast(name, str(result.dtype))
        return returned

    try:
        return _same(trial, "autocast", around, "it differs in an autocast region")
    except KernelFailed as failed:
        if not isinstance(failed.__cause__, _Cast):
            raise
        name, dtype = failed.__cause__.args
        return Failure("autocast", f"autocast changed its dtype to {dtype}", name)


class _Cast(Exception):
    pass


def _stream(trial: Trial) -> Failure | None:
    """On a side stream, while the default stream and another one are busy; its results are read there at once."""
    torch: Any = importlib.import_module("torch")

    def around(run: Callable[[], Any]) -> Any:
        # Free memory of their sizes has no right results of calls before.
        stale = [torch.full_like(x, math.nan) for x in trial.returned.results.values() for _ in range(_STALE)]
        del stale
        with surrounded(Surroundings(side=True), trial.device):
            returned = run()
            return Returned({name: result.clone() for name, result in returned.results.items()}, returned.chosen)

    return _same(trial, "stream", around, "it differs on a side stream under load")


def _graph_applies(case: Case) -> bool:
    return _torch_case(case) and not case.dropout and case.lengths is None


def _other_numbers(subject: Subject) -> tuple[Case, dict[str, Any]]:
    other = subject.case.replace(data_seed=(subject.case.data_seed + 1) % 2**64, grads="", lse=False)
    return other, Subject(other).data


def _graph(trial: Trial) -> Failure | None:
    """Captured in a CUDA graph, then replayed with other numbers in the same memory."""
    case, subject = trial.case, trial.subject
    first = subject.derive("graph", lambda: (case.replace(grads="", lse=False), subject.data))
    other = subject.derive("graph with other numbers", lambda: _other_numbers(subject))
    placed, fresh = (place_operands(s.case, s.data, trial.device) for s in (first, other))
    try:
        if court.seated(trial.chosen):
            with court.replayed(trial.chosen) as replay:
                call(first.case, placed, trial.chosen)
                replay()
                returned = call(first.case, fresh, trial.chosen)
        else:
            returned = captured(first.case, placed, fresh, trial.chosen)
    except Exception as error:
        raise KernelFailed(str(error)) from error
    found, _ = elements(other.exact, hosted(returned.results), trial.limits(other))
    if found is not None:
        message = f"a CUDA graph replayed with other numbers: {found.message}"
        return Failure("graph", message, found.result, found.index, found.got, found.expected, found.bound)
    return None


def _elsewhere(trial: Trial) -> Failure | None:
    """While another GPU is the current device."""
    torch: Any = importlib.import_module("torch")
    if torch.cuda.device_count() < 2:
        raise NotApplicable("one GPU")
    mine = int(trial.device.partition(":")[2] or 0)
    other = (mine + 1) % torch.cuda.device_count()

    def around(run: Callable[[], Any]) -> Any:
        with surrounded(Surroundings(current=other), trial.device):
            return run()

    return _same(trial, "elsewhere", around, f"it differs while cuda:{other} is the current device")


CHECKS = (
    Check(
        "autocast",
        "an autocast region changes neither dtype nor numbers",
        "Its faults are in the glue around a kernel: no mutant of a NumPy kernel can have them.",
        _torch_case,
        _autocast,
    ),
    Check(
        "stream",
        "a side stream under load gives the same",
        "Streams exist on GPUs only: no mutant of a NumPy kernel can have its faults.",
        _torch_case,
        _stream,
        gpu=True,
    ),
    Check(
        "graph",
        "a CUDA graph replayed with other numbers gives the answer to those",
        "Graphs exist on GPUs only: no mutant of a NumPy kernel can have its faults.",
        _graph_applies,
        _graph,
        gpu=True,
    ),
    Check(
        "elsewhere",
        "it does not depend on which GPU is the current one",
        "It takes two GPUs: no mutant of a NumPy kernel can have its faults.",
        _torch_case,
        _elsewhere,
        gpu=True,
    ),
)
