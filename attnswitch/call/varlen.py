"""Sequences that lie one after another, without padding: what such a call asks, who is chosen, and its launch."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts, Intercepted
from attnswitch.call import alike, finite, forms, per_head
from attnswitch.call import options as read
from attnswitch.call.attend import modes_of
from attnswitch.call.describe import INTEGERS, check_beside, fitting, result_beside
from attnswitch.call.forms import Asked, Call
from attnswitch.call.options import Options, text_of
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients, Inputs, Offsets, Order
from attnswitch.machine.device import Device
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import GRAD_OPERANDS, Problem

__all__ = [
    "attend",
    "batched",
    "check_counts",
    "check_edges",
    "check_left_out",
    "check_offsets",
    "fitting_rows",
    "gradients",
    "offsets_of",
    "plain",
    "problem_of",
    "results",
    "run_plan",
]

_ROLES = ("query", "key", "value")


def attend(
    operands: tuple[Array, Array, Array],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    heads: PerHead = per_head.NONE,
) -> Any:
    """What ``attention_varlen`` returns. Raises ``Intercepted`` where torch looks at the call before its tensors do."""

    def general() -> Call:
        return forms.called(_ask(operands, cu_seqlens, longest, seed, options, heads), backend, policy)

    (begin, begin_k), (most, most_k), (sinks, slopes) = cu_seqlens, longest, heads
    alone = begin_k is None
    if type(most) is not int or not (type(most_k) is int or (alone and most_k is None)) or seed is not None:
        return forms.run(general())  # the host waits for the longest, or what is said is not plain
    begin_k, same = (None, True) if begin_k is begin else (begin_k, alone)
    given = *operands, None, None, None, begin, begin_k, sinks, slopes, None, None, None, None
    said = "varlen", options, backend, policy, most, most_k, alone, same, sinks is None, slopes is None
    return alike.run(given, said, general)


def run_plan(
    plan: Plan, operands: tuple[Array, Array, Array], cu_seqlens: tuple[Any, Any], seed: int | None, heads: PerHead
) -> Any:
    """The same by what ``plan`` chose. Raises ``InvalidProblem`` where it is for another problem."""
    p = plan.problem
    asked = _ask(operands, cu_seqlens, (p.seq_q, p.seq_k), seed, read.of_problem(p), heads)
    return forms.run(forms.planned(asked, plan))


def problem_of(
    operands: tuple[Array, Array, Array],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    options: Options,
    heads: PerHead,
) -> tuple[Problem, Device]:
    """The problem that a call is, and its device."""
    try:
        asked = _ask(operands, cu_seqlens, longest, seed, options, heads)
    except Intercepted:
        raise InvalidProblem(
            "sequences of tensors that only torch can read (of a mode, on the meta device, of a subclass): their"
            " lengths are not known; describe the problem instead"
        ) from None
    return asked.problem, asked.device


def results(
    operands: tuple[Array, Array, Array],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    wanted: str,
    heads: PerHead = per_head.NONE,
) -> tuple[Array, Array]:
    """Output and lse for ``gradients`` of the same call, by the backend that these are computed by."""
    asked = _ask(operands, cu_seqlens, longest, seed, options, heads, grads=wanted)
    return forms.results(forms.called(asked, backend, policy, restarts=True))


def gradients(
    upstream: tuple[Array, Array | None],
    saved: tuple[Array | None, Array | None],
    operands: tuple[Array, Array, Array],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    wanted: str,
    heads: PerHead = per_head.NONE,
    *,
    sinks_grad: bool = False,
) -> Gradients:
    """Gradients of what ``wanted`` names, and of the sinks if ``sinks_grad``.

    They are made from those ``upstream`` of output and lse, and these two, or None. Raises what
    ``attention_varlen_backward`` raises, and ``Intercepted`` as ``attend`` does.
    """
    asked = _ask(operands, cu_seqlens, longest, seed, options, heads, grads=wanted)
    call = forms.called(asked, backend, policy, restarts=True)
    _, count, rows, _ = call.asked.inputs.query.shape
    wide, narrow = (rows, count, call.asked.problem.dim_v), (count, rows)
    roles = ("grad_out", "grad_lse", "out", "lse")
    given = [
        result_beside(array, role, shape, call.asked.query, call.native, "THD")
        for array, role, shape in zip((*upstream, *saved), roles, (wide, narrow) * 2, strict=True)
    ]
    return forms.gradients(call, *given, of_sinks=sinks_grad)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _ask(
    operands: tuple[Array, Array, Array],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    options: Options,
    heads: PerHead,
    grads: str | None = None,
) -> Asked:
    """``grads`` None means: what torch's autograd would ask for."""
    modes_of(operands[0])
    given, facts = arrays.take_all(operands)
    q, k, v = fitting_rows(facts, options)
    offsets, count, most = _sequences(cu_seqlens, longest, q, k)
    beside = per_head.read(heads, q, q.shape[1], count, autograd=grads is None)
    if grads is None:
        grads = "".join([letter for letter, one in zip(GRAD_OPERANDS, facts, strict=False) if one.grad])
    problem = Problem(
        batch=count,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=most[0],
        seq_k=most[1],
        dim_qk=q.shape[3],
        dim_v=v.shape[3],
        dtype=q.dtype,
        causal=options.is_causal,
        alignment=options.causal_alignment,
        window=options.window,
        scale=options.scale,
        softcap=options.softcap,
        dropout=options.dropout_p,
        seeded=seed is not None and options.dropout_p > 0.0,
        lse=options.return_lse or beside.grad,
        grads=grads,
        deterministic=options.deterministic,
        varlen=True,
        sinks=beside.sinks is not None,
        alibi=beside.alibi_slopes is not None,
        query=q.memory,
        key=k.memory,
        value=v.memory,
    )
    views = [array.swapaxes(0, 1)[None] for array in given]
    inputs = Inputs(views[0], views[1], views[2], seed=seed, offsets=offsets)
    inputs = inputs._replace(sinks=beside.sinks, alibi_slopes=beside.alibi_slopes)
    if finite.looked_for(finite.when(), q.device[0]) and not _finite(problem, inputs, q.device[0]):
        problem = problem.replace(nonfinite=True)
    caller = operands[0] if q.by_dlpack else None
    where = Device.of(*q.device), inputs, arrays.library_of(given[0]), caller, q, Order(turned=True, packed=True)
    return Asked(problem, *where, options.return_lse, beside.given, beside.grad)


def _finite(problem: Problem, inputs: Inputs, kind: str) -> bool:
    """Whether no sequence holds what a kernel could lose or let leak; what lies past the last is none of them."""
    queries, keys = (int(offsets[-1]) for offsets in inputs.offsets or ())
    query, key, value = inputs.query[:, :, :queries], inputs.key[:, :, :keys], inputs.value[:, :, :keys]
    return not (queries and keys) or finite.finite(problem, kind, (query, key, value))


def fitting_rows(facts: Sequence[Facts], options: Options) -> tuple[Facts, Facts, Facts]:
    """Query, key and value as (1, H, T, D). Raises ``InvalidProblem`` where they do not go together."""
    q, k, v = (batched(one, role) for one, role in zip(facts, _ROLES, strict=True))
    return fitting(q, k, v, None, options)[:3]


def batched(facts: Facts, role: str) -> Facts:
    """Facts of (T, H, D) as those of (1, H, T, D)."""
    if len(facts.shape) != 3:
        raise InvalidProblem(
            f"{role} has shape {facts.shape}: expected three axes, (T, H, D), the rows of all sequences in their order"
        )
    (rows, heads, dim), (by_row, by_head, by_column) = facts.shape, facts.strides
    return facts._replace(shape=(1, heads, rows, dim), strides=(rows * by_row, by_head, by_row, by_column))


def _sequences(
    cu_seqlens: tuple[Any, Any], longest: tuple[Any, Any], query: Facts, key: Facts
) -> tuple[Offsets, int, tuple[int, int]]:
    """Offsets beside query, how many sequences they tell apart, and the most queries and keys of any.

    Those of the keys are those of the queries where they are left out.
    """
    if cu_seqlens[1] is None:
        check_left_out(query, key)
        cu_seqlens = cu_seqlens[0], cu_seqlens[0]
        longest = longest[0], longest[0] if longest[1] is None else longest[1]
    found: list[Array] = []
    most: list[int] = []
    for name, given, limit, facts in zip("qk", cu_seqlens, longest, (query, key), strict=True):
        offsets, longest_one = offsets_of(given, limit, name, facts.shape[2], query)
        found.append(found[0] if found and given is cu_seqlens[0] else offsets)
        most.append(longest_one)
    counts = [array.shape[0] - 1 for array in found]
    check_counts(*counts)
    return Offsets(*found), counts[0], (most[0], most[1])


def check_left_out(query: Facts, key: Facts) -> None:
    """Raises ``InvalidProblem`` where cu_seqlens_k cannot be left out."""
    if query.shape[2] != key.shape[2]:
        raise InvalidProblem(
            f"query has {query.shape[2]} rows and key {key.shape[2]}: pass cu_seqlens_k, which is left out where keys"
            " begin as queries do"
        )


def check_counts(queries: int, keys: int) -> None:
    """Raises ``InvalidProblem`` where offsets of queries and of keys tell unlike numbers of sequences apart."""
    if queries != keys:
        raise InvalidProblem(
            f"cu_seqlens_q tells {queries} sequences apart and cu_seqlens_k {keys}: expected as many; a sequence"
            " without queries, or without keys, begins where it ends"
        )


def check_offsets(facts: Facts, role: str, query: Facts) -> bool:
    """Whether offsets are to be taken like a list. Raises ``InvalidProblem`` where they are none, or not beside query.

    Those on the CPU beside arrays elsewhere are.
    """
    if facts.dtype not in INTEGERS:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected integers of 8 to 64 bits")
    if len(facts.shape) != 1 or not facts.shape[0]:
        raise InvalidProblem(f"{role} has shape {facts.shape}: expected (B + 1,), for B sequences")
    if facts.device[0] == "cpu" and query.device[0] != "cpu":
        return True
    check_beside(facts, role, query)
    return False


def offsets_of(given: Any, limit: Any, name: str, rows: int, query: Facts) -> tuple[Array, int]:
    """Offsets beside query of sequences in ``rows`` rows, of the queries or keys (``name``), and the most of any."""
    role, asked = f"cu_seqlens_{name}", _most(limit, f"max_seqlen_{name}")
    offsets, edges = _offsets(given, role, query)
    if edges is not None:
        check_edges(edges, role, rows, asked, f"max_seqlen_{name}")
        asked = _longest(edges) if asked is None else asked
    if offsets is None:
        offsets = arrays.numbers_as_array(edges or (), query.taken_as, query.device)
    if asked is None:  # for which the host waits
        asked = int((offsets[1:] - offsets[:-1]).max()) if len(offsets) > 1 else 0
    return offsets, asked


def _offsets(given: Any, role: str, query: Facts) -> tuple[Array | None, list[int] | None]:
    """Offsets as an array beside query, if they are one, and as numbers, where these are read without waiting."""
    if arrays.library_of(given):
        array, facts = arrays.take(given, role)
        if check_offsets(facts, role, query):
            return None, array.tolist()
        return plain(array, facts), (array.tolist() if facts.device[0] == "cpu" else None)
    if not isinstance(given, Sequence) or not given or not all(_is_count(n) for n in given):
        raise InvalidProblem(f"{role}={text_of(given)}: expected B + 1 integers, from 0 to the rows of all sequences")
    return None, [int(n) for n in given]


def _is_count(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def plain(array: Array, facts: Facts) -> Array:
    """Integers side by side, of 32 or 64 bits with a sign."""
    size, wide = {"int32": 4, "int64": 8}.get(facts.dtype, 0), 1
    for length, stride in zip(facts.shape[::-1], facts.strides[::-1], strict=True):
        if length > 1 and stride != size * wide:
            size = 0
        wide *= length
    if size:
        return array
    if arrays.library_of(array) == "torch":
        return array.long().contiguous()
    return array.astype("int64")


def _most(limit: Any, name: str) -> int | None:
    if limit is None:
        return None
    try:
        most = limit.item() if arrays.library_of(limit) and limit.shape == () else limit
    except (RuntimeError, TypeError, ValueError):  # without numbers
        most = None
    if not _is_count(most) or most < 0:
        raise InvalidProblem(
            f"{name}={text_of(limit)}: expected an integer, the rows of the longest sequence or more, or None"
        )
    return int(most)


def _longest(edges: list[int] | None) -> int:
    return max((end - begin for begin, end in itertools.pairwise(edges or ())), default=0)


def check_edges(edges: list[int], role: str, rows: int, most: int | None, name: str) -> None:
    """Raises ``InvalidProblem`` where ``edges`` are no offsets of sequences in ``rows``, of at most ``most`` each."""
    if edges[0] != 0 or edges[-1] > rows or any(end < begin for begin, end in itertools.pairwise(edges)):
        raise InvalidProblem(
            f"{role}={edges if len(edges) < 20 else [*edges[:19], '...']}: expected 0 first, none less than the one"
            f" before it, and none beyond the {rows} rows that there are"
        )
    if most is not None and _longest(edges) > most:
        longest = _longest(edges)
        raise InvalidProblem(f"{name}={most}: a sequence of {longest} rows is in {role}; expected {longest} or more")
