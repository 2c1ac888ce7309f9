"""What the verifier is given of a problem before it is timed: the same, with fewer of its sequences and heads."""

from __future__ import annotations

from attnswitch.problem import Problem
from attnswitch.verify.drawing.case import Case

__all__ = ["of"]

#: ``Case.work`` of a case, and the numbers drawn for it, from which on it has fewer sequences, then fewer key heads.
_WORK, _NUMBERS = 2**28, 2**23
#: Those that it keeps then on a GPU, and the work from which on it does not: of fewer a backend splits the keys, or
#: takes other tiles, and what is verified would not be what is timed.
_FEW, _TOO_MUCH = 4, 2**33
#: Sequences and key heads of a case on the CPU, where no kernel depends on them, at most.
_ON_CPU = 2


def of(problem: Problem, kind: str) -> Case:
    """The case of ``problem`` on a device of ``kind``, which takes the verifier seconds, unless one head is much.

    The call is made again and again on it (the check "repeat"); but where the backend draws the dropout mask, once and
    with few keys. What many heads do beside each other is seen where the whole problem is tried out.
    """
    case = Case.of(problem)
    case = _showing(case) if case.unseeded else case.replace(check="repeat")
    fewest = min(_FEW, case.heads_kv)
    if kind == "cpu":
        case, fewest = case.replace(batch=min(case.batch, _ON_CPU), heads_kv=min(case.heads_kv, _ON_CPU)), 1
    while _much(case) and case.batch > 1:
        case = case.replace(batch=-(-case.batch // 2))
    while _much(case) and case.heads_kv > fewest:
        case = case.replace(heads_kv=max(fewest, case.heads_kv // 2))
    while case.work > _TOO_MUCH and case.heads_kv > 1:
        case = case.replace(heads_kv=case.heads_kv // 2)
    return case if case.lengths is None else case.replace(lengths=_hiding(case.lengths, case.batch))


def _much(case: Case) -> bool:
    rows = case.heads_q * case.seq_q + case.heads_kv * case.seq_k
    return case.work > _WORK or case.batch * rows * (case.dim_qk + case.dim_v) > _NUMBERS


def _hiding(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The first of ``lengths``; for one alone half of the first, which is whole and hides nothing."""
    return lengths[:count] if count > 1 else (-(-lengths[0] // 2),)


def _showing(case: Case) -> Case:
    """``case`` with so few keys that its output shows which of them a backend dropped."""
    keys = min(case.seq_k, case.dim_v)
    lengths = None if case.lengths is None else tuple(min(length, keys) for length in case.lengths)
    return case.replace(seq_k=keys, lengths=lengths)
