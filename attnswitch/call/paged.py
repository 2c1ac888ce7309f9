"""A cache in pages: what a call of ``attention_paged`` asks, who is chosen, and its launch."""

from __future__ import annotations

import importlib
import inspect
import numbers
import sys
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array, Facts, Intercepted
from attnswitch.call import alike, finite, forms, per_head, scales
from attnswitch.call import options as read
from attnswitch.call.attend import modes_of
from attnswitch.call.describe import INTEGERS, check_alike, check_beside, lengths_beside, swapped
from attnswitch.call.forms import Asked, Call
from attnswitch.call.options import Options, text_of
from attnswitch.call.per_head import NONE, PerHead
from attnswitch.call.varlen import batched, offsets_of, plain
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Inputs, Offsets, Order
from attnswitch.machine.device import Device
from attnswitch.machine.pages import Pages
from attnswitch.names import meant
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem

__all__ = [
    "NO_GRADIENT",
    "ROLES",
    "Beside",
    "as_planned",
    "attend",
    "fitting",
    "problem_of",
    "run_plan",
    "splits_of",
    "unsaid",
]

#: The operands of such a call, in their order.
ROLES = ("query", "key_cache", "value_cache")

#: Keywords of ``attention`` and ``attention_varlen`` that say something that a cache in pages does not have.
_ELSEWHERE = {
    "attn_mask": "a cache in pages takes a tree_mask, of the newest keys, and no other",
    **dict.fromkeys(("dropout_p", "seed"), "a cache in pages takes no dropout"),
    **dict.fromkeys(("key_lengths", "cu_seqlens_k", "max_seqlen_k"), "cache_lengths says how long sequences are"),
    "causal_alignment": "queries are the newest tokens, and the last one stands at the last key",
    "enable_gqa": "unequal head counts need no flag",
    "layout": "arrays are (B, L, H, D), and of packed queries (T, H, D)",
}

NO_GRADIENT = (
    "a tensor of attention_paged requires a gradient, which a cache has none of: call it under torch.no_grad(), or pass"
    " detached tensors"
)


class Beside(NamedTuple):
    """What such a call says beside its operands and options."""

    block_table: Any
    cache_lengths: Any
    cu_seqlens_q: Any = None
    max_seqlen_q: Any = None
    num_splits: Any = None
    tree_mask: Any = None
    key_scale: Any = None
    value_scale: Any = None
    heads: PerHead = NONE


def attend(
    operands: tuple[Array, Array, Array],
    beside: Beside,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
) -> Any:
    """What ``attention_paged`` returns. Raises ``Intercepted`` where torch looks at the call before its tensors do."""

    def general() -> Call:
        return forms.called(_ask(operands, beside, options), backend, policy)

    table, lengths, edges, longest, splits, tree, key_scale, value_scale, (sinks, slopes) = beside
    if type(longest) is not (NoneType if edges is None else int) or type(splits) not in (NoneType, int):
        return forms.run(general())  # the host waits for the longest, or what is said is not plain
    given = *operands, None, lengths, None, edges, None, sinks, slopes, table, key_scale, value_scale, tree
    lacks = edges is None, sinks is None, slopes is None, key_scale is None, value_scale is None, tree is None
    return alike.run(given, ("paged", options, backend, policy, longest, splits, *lacks), general)


def run_plan(plan: Plan, operands: tuple[Array, Array, Array], beside: Beside) -> Any:
    """The same by what ``plan`` chose. Raises ``InvalidProblem`` where it is for another problem."""
    p = plan.problem
    return forms.run(forms.planned(_ask(operands, as_planned(beside, p), read.of_problem(p)), plan))


def as_planned(beside: Beside, p: Problem) -> Beside:
    """``beside`` with what a plan for ``p`` fixes of it."""
    return beside._replace(max_seqlen_q=p.seq_q if p.varlen else None, num_splits=p.splits or None)


def problem_of(
    operands: tuple[Array, Array, Array], beside: Beside, keywords: dict[str, Any], function: Callable[..., Any]
) -> tuple[Problem, Device]:
    """The problem that a call with such ``keywords`` of ``function`` is, and its device."""
    if beside.block_table is None or beside.cache_lengths is None:
        raise InvalidProblem(
            "tree_mask, num_splits, key_scale and value_scale are for a cache in pages: pass block_table and"
            " cache_lengths as well"
        )
    for name in keywords:
        if name in _ELSEWHERE:
            raise unsaid(name, function)
    options = read.of_keywords({"is_causal": True} | keywords, "the call has", function)
    try:
        asked = _ask(operands, beside, options)
    except Intercepted:
        raise InvalidProblem(
            "a cache in pages of tensors that only torch can read (of a mode, on the meta device, of a subclass): a"
            " plan needs tensors with memory, or a described problem"
        ) from None
    return asked.problem, asked.device


def unsaid(name: str, function: Callable[..., Any]) -> InvalidProblem:
    """The error about a keyword that a call of a cache in pages does not have."""
    if name in _ELSEWHERE:
        return InvalidProblem(f"attention_paged has no {name}: {_ELSEWHERE[name]}")
    parameters = inspect.signature(function).parameters
    own = [key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    return InvalidProblem(
        f"{function.__name__}: there is an unexpected keyword {name!r}; the keywords are {', '.join(own)}"
        f"{meant(name, parameters)}"
    )


# -- what is asked -----------------------------------------------------------------------------------------------------


def _ask(operands: tuple[Array, Array, Array], beside: Beside, options: Options) -> Asked:
    modes_of(operands[0])
    given, facts = arrays.take_all(operands)
    q, k, v = fitting(facts, options, packed=beside.cu_seqlens_q is not None)
    inputs, batch, seq_q, seq_k = _inputs(given, q, k, beside)
    said = beside.key_scale, beside.value_scale
    inputs = inputs._replace(**scales.read(said, q, k) if k.dtype != q.dtype else scales.none(said, k))
    heads = per_head.read(beside.heads, q, q.shape[1], batch, autograd=True)
    if heads.grad:
        raise InvalidProblem(NO_GRADIENT)
    inputs = inputs._replace(sinks=heads.sinks, alibi_slopes=heads.alibi_slopes)
    if beside.tree_mask is not None:
        inputs = inputs._replace(tree_mask=_bits(beside.tree_mask, facts[0], seq_q))
    problem = Problem(
        batch=batch,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=seq_q,
        seq_k=seq_k,
        dim_qk=q.shape[3],
        dim_v=v.shape[3],
        dtype=q.dtype,
        causal=options.is_causal,
        alignment="bottom_right",
        window=options.window,
        key_lengths=True,
        scale=options.scale,
        softcap=options.softcap,
        lse=options.return_lse,
        deterministic=options.deterministic,
        varlen=inputs.offsets is not None,
        sinks=heads.sinks is not None,
        alibi=heads.alibi_slopes is not None,
        page=k.shape[2],
        splits=splits_of(beside.num_splits),
        cache=k.dtype if k.dtype != q.dtype else "",
        tree=inputs.tree_mask is not None,
        query=q.memory,
        key=k.memory,
        value=v.memory,
    )
    if finite.looked_for(finite.when(), q.device[0]) and not _finite(problem, inputs, q.device[0]):
        problem = problem.replace(nonfinite=True)
    caller = operands[0] if q.by_dlpack else None
    where = Device.of(*q.device), inputs, arrays.library_of(given[0]), caller, q
    return Asked(problem, *where, Order(turned=True, packed=problem.varlen), options.return_lse)


def fitting(facts: Sequence[Facts], options: Options, *, packed: bool) -> tuple[Facts, Facts, Facts]:
    """Facts of query (B, Hq, Lq, D), or (1, Hq, T, D), and of the caches (P, Hkv, page, D or Dv).

    Raises ``InvalidProblem`` where they do not go together.
    """
    q, k, v = facts
    check_alike(q, *scales.widened(q, k, v))
    if q.grad or k.grad or v.grad:
        raise InvalidProblem(NO_GRADIENT)
    shapes = f"query {q.shape}, key_cache {k.shape}, value_cache {v.shape}"
    rows = "(T, Hq, D) with cu_seqlens_q" if packed else "(B, Lq, Hq, D), or (T, Hq, D) with cu_seqlens_q"
    expected = f"; expected query {rows}, key_cache (P, page, Hkv, D), value_cache (P, page, Hkv, Dv)"
    if len(q.shape) != (3 if packed else 4) or not len(k.shape) == len(v.shape) == 4:
        raise InvalidProblem(shapes + ": another number of axes" + expected)
    if k.shape[:3] != v.shape[:3]:
        raise InvalidProblem(shapes + ": the pages, their rows and the heads of both caches must agree" + expected)
    if q.shape[-1] != k.shape[-1]:
        raise InvalidProblem(shapes + ": the head dimension of query and key_cache must agree" + expected)
    if not k.shape[1]:
        raise InvalidProblem(shapes + ": a page has one row at least" + expected)
    return batched(q, "query") if packed else swapped(q), swapped(k), swapped(v)


def _inputs(given: Sequence[Array], query: Facts, cache: Facts, beside: Beside) -> tuple[Inputs, int, int, int]:
    """Arrays as kernels take them, and how many sequences there are, of how many queries and keys at most."""
    count, page = cache.shape[0], cache.shape[2]
    table, named = _table(beside.block_table, query)
    batch, width = table.shape
    offsets, seq_q = None, query.shape[2]
    if beside.cu_seqlens_q is not None:
        edges, seq_q = offsets_of(beside.cu_seqlens_q, beside.max_seqlen_q, "q", query.shape[2], query)
        offsets = Offsets(edges, edges)
        if edges.shape[0] - 1 != batch:
            raise InvalidProblem(
                f"cu_seqlens_q tells {edges.shape[0] - 1} sequences apart, and block_table has {batch} rows: expected"
                " as many"
            )
    elif beside.max_seqlen_q is not None:
        raise InvalidProblem("max_seqlen_q without cu_seqlens_q, which says where sequences begin")
    elif query.shape[0] != batch:
        raise InvalidProblem(
            f"query has {query.shape[0]} batch entries, and block_table {batch} rows: expected one for each"
        )
    entries = query._replace(shape=(batch, *query.shape[1:]))
    lengths = lengths_beside(beside.cache_lengths, entries, width * page, "cache_lengths", f"{width} pages of {page}")
    if named is not None and (known := _on_host(beside.cache_lengths)) is not None:
        _check_pages(named, known, count, page)
    queries = given[0].swapaxes(1, 2) if offsets is None else given[0].swapaxes(0, 1)[None]
    key, value = (array.swapaxes(1, 2) for array in given[1:])
    inputs = Inputs(queries, key, value, key_lengths=lengths, offsets=offsets, block_table=table)
    return inputs, batch, seq_q, width * page


def _bits(given: Any, query: Facts, longest: int) -> Array:
    """A tree_mask beside query as it is, (B, Lq, W) or (T, W), as bytes with three axes."""
    rows = query.shape[:-2]
    expected = (*rows, f"{-(-longest // 8)} or more")
    what = (
        f"expected bytes (uint8) of shape ({', '.join(map(str, expected))}), with a bit for each of {longest} queries"
    )
    if not arrays.library_of(given):
        raise InvalidProblem(f"tree_mask={text_of(given)}: {what}")
    array, facts = arrays.take(given, "tree_mask")
    if facts.dtype != "uint8" or facts.shape[:-1] != rows or facts.shape[-1] * 8 < longest:
        raise InvalidProblem(f"tree_mask has dtype {facts.dtype} and shape {facts.shape}: {what}")
    check_beside(facts, "tree_mask", query)
    library = arrays.library_of(array)
    if library != "torch":
        array = sys.modules[library].ascontiguousarray(array)
    elif facts.shape[-1] > 1 and array.stride(-1) != 1:  # rows may lie as they do, and be one for all sequences
        array = array.contiguous()
    return array if len(rows) == 2 else array[None]


def _table(given: Any, query: Facts) -> tuple[Array, Any]:
    """The block table beside query, (B, M), and as NumPy's where it is read without waiting."""
    numpy: Any = importlib.import_module("numpy")
    what = "expected integers (B, M), the pages of each sequence"
    if arrays.library_of(given):
        array, facts = arrays.take(given, "block_table")
        if facts.dtype not in INTEGERS:
            raise InvalidProblem(f"block_table has dtype {facts.dtype}: {what}")
        if len(facts.shape) != 2:
            raise InvalidProblem(f"block_table has shape {facts.shape}: {what}")
        if facts.device[0] != "cpu" or query.device[0] == "cpu":
            check_beside(facts, "block_table", query)
            array = plain(array, facts)
            on_cpu = facts.device[0] == "cpu"
            return array, arrays.passage(array, arrays.library_of(array), "numpy") if on_cpu else None
        host = arrays.passage(array, arrays.library_of(array), "numpy")
    else:
        try:
            host = numpy.asarray(given)
        except ValueError:  # rows of unlike lengths
            host = numpy.asarray(None)
        if host.shape == (0,):
            host = host.reshape(0, 0)
        if len(host.shape) != 2 or (host.size and host.dtype.kind not in "iu"):
            raise InvalidProblem(f"block_table={text_of(given)}: {what}")
    host = host.astype("int64")
    return arrays.numbers_as_array(host, query.taken_as, query.device), host


def _on_host(lengths: Any) -> list[int] | None:
    """Lengths that were found to make sense, where they are read without waiting."""
    if not arrays.library_of(lengths):
        return [int(length) for length in lengths]
    array, facts = arrays.take(lengths, "cache_lengths")
    return array.tolist() if facts.device[0] == "cpu" else None


def _check_pages(table: Any, lengths: list[int], count: int, page: int) -> None:
    """Each entry that a sequence uses names a page that there is; the others are not looked at."""
    for b, length in enumerate(lengths):
        used = table[b, : -(-length // page)]
        wrong = (used < 0) | (used >= count)
        if wrong.any():
            at = int(wrong.argmax())
            raise InvalidProblem(
                f"block_table[{b}, {at}] is {used[at]}: expected one of the {count} pages, as sequence {b} has {length}"
                f" keys in pages of {page}"
            )


def splits_of(given: Any) -> int:
    """``num_splits``, 0 where it is left open. Raises ``InvalidProblem`` for what is no number of parts."""
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise InvalidProblem(
            f"num_splits={text_of(given)}: expected into how many parts to divide the keys, or None to leave it open"
        )
    return int(given)


def _finite(problem: Problem, inputs: Inputs, kind: str) -> bool:
    """Whether no sequence holds what a kernel could lose or let leak.

    Of the caches its own rows alone are looked at, a sequence at a time: what lies elsewhere is nobody's.
    """
    query, lengths, table = inputs.query, inputs.key_lengths, inputs.block_table
    assert lengths is not None
    assert table is not None
    edges = None if inputs.offsets is None else inputs.offsets.query.tolist()
    for b, length in enumerate(lengths.tolist()):
        own = query[b : b + 1] if edges is None else query[:, :, edges[b] : edges[b + 1]]
        if length and own.shape[2]:
            caches = (inputs.key, inputs.key_scale), (inputs.value, inputs.value_scale)
            key, value = (Pages(cache, table[b], scale).rows(0, length) for cache, scale in caches)
            if not finite.finite(problem, kind, (own, key, value)):
                return False
    return True
