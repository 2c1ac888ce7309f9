"""The case that is verified before a problem is timed: the same problem with fewer sequences and heads."""

from __future__ import annotations

from attnswitch.problem import Problem
from attnswitch.verify.drawing.case import Case

__all__ = ["of"]

#: Above this ``Case.work``, or this many numbers to draw, a case gets fewer sequences, then fewer key heads.
_WORK, _NUMBERS = 2**28, 2**23
#: Key heads that it keeps on a GPU, unless the work is above the second number. With fewer heads a backend may split
#: the keys or take other tiles, and the kernel that is timed would not be the one that was verified.
_FEW, _TOO_MUCH = 4, 2**33
#: The most sequences and key heads of a case on the CPU, where no kernel depends on them.
_ON_CPU = 2


def of(problem: Problem, kind: str) -> Case:
    """The case of ``problem`` on a device of ``kind``. Verifying it takes seconds, unless one head alone takes longer.

    The call is repeated (the check "repeat"). If the backend draws its own dropout mask, it is made once, with few
    keys. Errors that need many heads show when the whole problem is tried out.
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
    for name in ("lengths", "query_lengths"):
        if (lengths := getattr(case, name)) is not None:
            case = case.replace(**{name: _hiding(lengths, case.batch)})
    return case


def _much(case: Case) -> bool:
    rows = case.heads_q * case.seq_q + case.heads_kv * case.seq_k
    return case.work > _WORK or case.batch * rows * (case.dim_qk + case.dim_v) > _NUMBERS


def _hiding(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The first ``count`` of ``lengths``. For one sequence half of its length, as the whole would hide nothing."""
    return lengths[:count] if count > 1 else (-(-lengths[0] // 2),)


def _showing(case: Case) -> Case:
    """``case`` with so few keys that the output shows which of them a backend dropped."""
    keys = min(case.seq_k, case.dim_v)
    lengths = None if case.lengths is None else tuple(min(length, keys) for length in case.lengths)
    return case.replace(seq_k=keys, lengths=lengths)
