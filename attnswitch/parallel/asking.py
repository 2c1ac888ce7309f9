"""``Asked``: what a call over ranks asks, read and checked on each rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Facts, Intercepted
from attnswitch.call import options as read
from attnswitch.call import per_head
from attnswitch.call.describe import describe, lengths_beside
from attnswitch.call.options import Options, text_of
from attnswitch.call.per_head import PerHead, Read
from attnswitch.call.varlen import check_edges, fitting_rows, offsets_of
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.parallel.dealing import Dealing

__all__ = ["Asked", "batch", "check_rows", "options", "sequences"]

_ROLES = ("query", "key", "value")
#: Keywords that the same call has without ranks, or that another has.
_ELSEWHERE = {
    "attention": dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        "packed sequences, (rows, H, D), are attention_varlen's",
    ),
    "attention_varlen": {
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "the host reads cu_seqlens_q, which tells it"),
        "cu_seqlens_k": "keys begin where queries do, which cu_seqlens_q tells",
        **dict.fromkeys(
            ("attn_mask", "key_lengths", "layout"),
            "sequences are (rows, H, D), as long as cu_seqlens_q tells, without a mask",
        ),
    },
}


class Asked(NamedTuple):
    """A call over ranks. Operands are this rank's rows, (B, H, rows, D); of packed sequences B is 1."""

    operands: tuple[Any, Any, Any]
    options: Options
    rank: int
    queries: Dealing
    keys: Dealing
    heads: Read
    #: Of the whole: (B|1, H|1, Lq|1, Lk|1), and (B,).
    attn_mask: Any = None
    key_lengths: Any = None
    #: Where packed sequences begin in the whole, and the last ends; none where there is a batch.
    cu_seqlens: tuple[int, ...] = ()


def options(unknown: dict[str, Any], function: Callable[..., Any], dropout_p: Any, *given: Any) -> Options:
    """The options of a call of ``function``; ``given`` are all behind ``dropout_p``, in the order of ``Options``.

    Raises ``InvalidProblem`` for what makes no sense, ``Unsupported`` for dropout.
    """
    for name in unknown:
        if why := _ELSEWHERE.get(function.__name__, {}).get(name):
            raise InvalidProblem(f"{function.__name__} over ranks has no {name}: {why}")
        raise read.unknown(name, f"{function.__name__}: there is", function)
    said = read.of_call(dropout_p, *given)
    if said.dropout_p:
        raise Unsupported(
            f"dropout_p={said.dropout_p} over ranks: the dropout mask is a function of the whole, of which a rank"
            " computes parts; leave dropout_p out"
        )
    return said


def batch(
    operands: tuple[Any, Any, Any],
    lengths: tuple[int, int] | None,
    said: Options,
    dealing: Callable[[int], Dealing],
    rank: int,
    *,
    attn_mask: Any,
    key_lengths: Any,
    sinks: Any,
    alibi_slopes: Any,
) -> Asked:
    """What a call of (B, H, rows, D) operands asks, of which ``lengths`` are those of the whole."""
    axis = 2 if said.layout == "BHLD" else 1
    facts = _facts(operands, 4)
    queries, keys = _dealt(facts, axis, lengths, dealing, rank)
    of_whole = [_of_length(one, axis, dealt.length) for one, dealt in zip(facts, (queries, keys, keys), strict=True)]
    mask = None if attn_mask is None else _mask(attn_mask)
    problem = describe((*of_whole, mask and mask[1]), said, lengths=key_lengths is not None, seeded=False)
    heads = per_head.read(PerHead(sinks, alibi_slopes), of_whole[0], problem.heads_q, problem.batch, autograd=True)
    if key_lengths is not None:
        # Signed: what is left of a length after the keys of other ranks may be less than none.
        key_lengths = lengths_beside(key_lengths, of_whole[0], problem.seq_k).long()
    turned = operands if axis == 2 else tuple(x.swapaxes(1, 2) for x in operands)
    return Asked(turned, said, rank, queries, keys, heads, mask and mask[0], key_lengths)


def sequences(
    operands: tuple[Any, Any, Any],
    lengths: tuple[int, int] | None,
    said: Options,
    dealing: Callable[[int], Dealing],
    rank: int,
    *,
    cu_seqlens: Any,
    sinks: Any,
    alibi_slopes: Any,
) -> Asked:
    """What a call of (rows, H, D) operands asks."""
    facts = _facts(operands, 3)
    queries, keys = _dealt(facts, 0, lengths, dealing, rank)
    if queries != keys:
        raise InvalidProblem(
            f"query has {queries.length} rows in all and key {keys.length}: packed sequences over ranks have the same"
        )
    whole = fitting_rows([_of_length(one, 0, queries.length) for one in facts], said)
    describe((*whole, None), said, lengths=False, seeded=False)
    offsets, _ = offsets_of(cu_seqlens, None, "q", queries.length, whole[0])
    edges = [int(edge) for edge in offsets.tolist()]
    check_edges(edges, "cu_seqlens_q", queries.length, None, "")  # those of a GPU were not looked at
    turned = tuple(x.swapaxes(0, 1)[None] for x in operands)
    heads = per_head.read(PerHead(sinks, alibi_slopes), facts[0], facts[0].shape[1], len(edges) - 1, autograd=True)
    return Asked(turned, said, rank, queries, keys, heads, cu_seqlens=tuple(edges))


def check_rows(role: str, rows: int, dealt: Dealing, rank: int) -> None:
    """Raises ``InvalidProblem`` where ``role`` does not have the rows that ``rank`` holds."""
    if rows != dealt.rows(rank):
        raise InvalidProblem(
            f"{role} has {rows} rows: rank {rank} of {dealt.ranks} holds {dealt.rows(rank)} of {dealt.length}"
            f" ({dealt.order}); pass what shard() gives of the whole, and the whole's length"
        )


def _facts(operands: Sequence[Any], axes: int) -> tuple[Facts, ...]:
    for role, operand in zip(_ROLES, operands, strict=True):
        if arrays.library_of(operand) != "torch":
            raise InvalidProblem(f"{role} is {text_of(type(operand))}: expected a tensor of torch")
        if operand.dim() != axes:
            expected = "(rows, H, D)" if axes == 3 else "four axes"
            raise InvalidProblem(f"{role} has shape {tuple(operand.shape)}: expected {expected}")
    try:
        return arrays.take_all(operands)[1]
    except Intercepted:
        raise Unsupported(
            "context parallelism of tensors that only torch can read (of a mode, torch.func, or a subclass): pass"
            " the rows of this rank as plain tensors"
        ) from None


def _dealt(
    facts: Sequence[Facts],
    axis: int,
    lengths: tuple[int, int] | None,
    dealing: Callable[[int], Dealing],
    rank: int,
) -> tuple[Dealing, Dealing]:
    """How queries and keys are dealt, of which this rank has the rows that ``facts`` tell."""
    rows = [one.shape[axis] for one in facts]
    ranks = dealing(0).ranks
    lengths = (rows[0] * ranks, rows[1] * ranks) if lengths is None else lengths
    queries, keys = map(dealing, lengths)
    for role, held, dealt in zip(_ROLES, rows, (queries, keys, keys), strict=True):
        check_rows(role, held, dealt, rank)
    return queries, keys


def _of_length(facts: Facts, axis: int, length: int) -> Facts:
    shape = [*facts.shape]
    shape[axis] = length
    return facts._replace(shape=tuple(shape))


def _mask(attn_mask: Any) -> tuple[Any, Facts]:
    """The mask with four axes, and its facts."""
    array, facts = arrays.take(attn_mask, "attn_mask")
    if facts.grad:
        raise Unsupported(
            "attn_mask requires_grad: over ranks it gets no gradient, of which each rank would have a part; pass"
            " attn_mask.detach()"
        )
    return array[(None,) * max(0, 4 - array.dim())], facts
