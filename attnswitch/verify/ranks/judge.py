"""The verdict on what ranks computed of a case: put together, and held against the exact answer of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnswitch.machine import registry
from attnswitch.machine.backend import Precision
from attnswitch.machine.device import Device
from attnswitch.parallel.dealing import Dealing
from attnswitch.verify.checks.compare import elements
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch import sequences
from attnswitch.verify.outcome import Failure, Outcome
from attnswitch.verify.ranks.task import Answer, Task
from attnswitch.verify.trial import Subject
from attnswitch.verify.truth import oracle, parts
from attnswitch.verify.truth.bounds import TINY, UNITS

__all__ = ["judged"]


def judged(task: Task, name: str, device: str, answers: Sequence[Answer]) -> Outcome:
    """The outcome of a task that every rank answered."""
    case, chosen = task.case, ", ".join(sorted({backend for answer in answers for _, backend in answer.calls}))
    try:
        results = _whole(task, answers)
    except ValueError as odd:
        return Outcome(case, name, device, "mismatch", chosen, failure=Failure("form", str(odd)))
    subject = Subject(case)
    exact, limits = subject.exact, _limits(task, subject, device, answers)
    failure, ratios = elements(exact, results, limits)
    verdict = "mismatch" if failure else "verified"
    worst, where = ({key: found[n] for key, found in ratios.items()} for n in (0, 1))
    return Outcome(case, name, device, verdict, chosen, (), worst, failure, ("reference",), where)  # type: ignore[arg-type]


# -- one result of all -------------------------------------------------------------------------------------------------


def _whole(task: Task, answers: Sequence[Answer]) -> dict[str, Any]:
    """Results (B, H, L, ...) of the rows that ranks have. Raises ``ValueError`` where shapes are not theirs."""
    queries, keys = task.dealt(len(answers))
    found = {}
    for name in answers[0].results:
        each = [answer.results[name] for answer in answers]
        if name == "grad sinks":
            found[name] = np.sum(each, 0, dtype=np.float64)
            continue
        dealt = keys if name in sequences.OF_KEYS else queries
        found[name] = _padded(task.case, name, _joined(name, each, dealt))
    return found


def _joined(name: str, each: Sequence[Any], dealt: Dealing) -> Any:
    first = each[0]
    for rank, rows in enumerate(each):
        wanted = (*first.shape[:2], dealt.rows(rank), *first.shape[3:])
        if rows.shape != wanted:
            raise ValueError(f"{name} of rank {rank} has shape {rows.shape}, expected {wanted}")
    whole = np.empty((*first.shape[:2], dealt.length, *first.shape[3:]))
    whole[:, :, dealt.positions()] = np.concatenate(each, 2)
    return whole


def _padded(case: Case, name: str, whole: Any) -> Any:
    """Rows (1, H, T, ...) of packed sequences, as (B, H, L, ...)."""
    if not case.varlen:
        return whole
    return sequences.padded(case, name, whole[0] if name == "lse" else whole[0].swapaxes(0, 1))


# -- how far rounding lets it be ---------------------------------------------------------------------------------------


def _limits(task: Task, subject: Subject, device: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The bounds of the least precise of the calls that ranks made of it."""
    calls, where = {call for answer in answers for call in answer.calls}, Device.parse(device)
    precisions = {registry.loaded(name).precision(problem, where) for problem, name in calls} or {Precision()}
    found = [_of_precision(task, subject, precision, len(answers)) for precision in sorted(precisions, key=str)]
    return {name: np.maximum.reduce([limits[name] for limits in found]) for name in found[0]}


def _of_precision(task: Task, subject: Subject, precision: Precision, ranks: int) -> dict[str, Any]:
    (answer,) = subject.exact.answers
    if task.method == "all-to-all":
        return _of_shared_heads(answer, subject.exact.limits(precision), ranks)
    queries, keys = task.dealt(ranks)
    by_owner, by_range = (
        (_parts(task.case, keys, "key", named), _parts(task.case, queries, "query", named))
        for named in (lambda rank, n: rank, lambda rank, n: (rank, n))
    )
    # A call is of all the keys that a rank has, or of one of its ranges: whichever lets results be further off.
    both = [parts.limits(answer, subject.data, precision, *made) for made in (by_owner, by_range)]
    return {name: np.maximum(both[0][name], both[1][name]) for name in both[0]}


def _of_shared_heads(answer: oracle.Answer, limits: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Gradients of a key head that several ranks had are stored by each, and summed in the type of the operands."""
    case = answer.case
    if case.group == 1 or not case.grads:
        return limits
    u, tiny, scale = UNITS[case.dtype], TINY[case.dtype], abs(case.softmax_scale)
    of_heads = {"key": scale * answer.ds.mT @ answer.q, "value": answer.p.mT @ answer.grad_out}
    stored = {name: (ranks + 1) * (u * oracle.grouped(case, np.abs(x)) + tiny) for name, x in of_heads.items()}
    return {name: limit + stored.get(name, 0.0) for name, limit in limits.items()}


def _parts(case: Case, dealt: Dealing, role: str, named: Callable[[int, int], Any]) -> list[Any]:
    """Which rows (B|1, L) of a role each part has; ``named`` says which part the n-th range of a rank is in."""
    length = case.seq_k if role in sequences.OF_KEYS else case.seq_q
    starts = np.array(sequences.offsets(case, role)[:-1] if case.varlen else [0])
    at, found = starts[:, None] + np.arange(length), dict[Any, Any]()
    for rank in range(dealt.ranks):
        for n, part in enumerate(dealt.held(rank)):
            inside = (at >= part.start) & (at < part.stop)
            found[named(rank, n)] = found.get(named(rank, n), False) | inside
    return list(found.values())
