"""Mutants of the parallel layer: faults that attention over ranks has had, each planted in a worker by its name.

A mutant is a function in place of another of the layer: it gets that, as ``true``, and its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from attnswitch.parallel import all_to_all, pieces
from attnswitch.parallel.all_to_all import AllToAll
from attnswitch.parallel.call import Call
from attnswitch.parallel.dealing import Dealing
from attnswitch.parallel.ring import Ring

__all__ = ["FAULTS", "Fault", "planted"]


class Fault(NamedTuple):
    """A mutant: the method that it is of, what goes wrong, and what it replaces."""

    method: str
    what: str
    owner: Any
    name: str
    made: Callable[..., Any]


#: Every mutant by its name.
FAULTS: dict[str, Fault] = {}


@contextlib.contextmanager
def planted(title: str) -> Iterator[None]:
    """Within the context the parallel layer has the fault of this name. Raises ``KeyError`` if there is none."""
    fault = FAULTS[title]
    true = fault.owner.__dict__[fault.name]
    function = getattr(fault.owner, fault.name)

    def faulty(*arguments: Any, **said: Any) -> Any:
        return fault.made(function, *arguments, **said)

    setattr(fault.owner, fault.name, staticmethod(faulty) if isinstance(true, staticmethod) else faulty)
    try:
        yield
    finally:
        setattr(fault.owner, fault.name, true)


def _fault(method: str, owner: Any, name: str, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def known(made: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[made.__name__.strip("_").replace("_", "-")] = Fault(method, what, owner, name, made)
        return made

    return known


# -- merging -----------------------------------------------------------------------------------------------------------


@_fault("ring", Ring, "merge", "what was summed is not rescaled when a part has larger scores")
def _lost_rescale(true: Any, ring: Any, out: Any, lse: Any, rows: range, part: Any, part_lse: Any) -> None:
    some, seen = out[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop]
    before, grown = some.clone(), torch.relu(part_lse.nan_to_num(neginf=-1e30) - seen.nan_to_num(neginf=-1e30))
    true(ring, out, lse, rows, part, part_lse)
    some.add_(before * (1.0 - torch.exp(-grown))[..., None])


@_fault("ring", Ring, "merge", "parts are averaged, whatever their lse")
def _equal_shares(true: Any, ring: Any, out: Any, lse: Any, rows: range, part: Any, part_lse: Any) -> None:
    some, seen = out[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop]
    both = (seen > -torch.inf) & (part_lse > -torch.inf)
    average = (some + part) / 2
    true(ring, out, lse, rows, part, part_lse)
    some.copy_(torch.where(both[..., None], average, some))


@_fault("ring", Ring, "sunk", "the sinks count once for every rank")
def _sinks_of_every_rank(true: Any, ring: Any, lse: Any) -> Any:
    return true(ring, lse) + torch.tensor(float(ring.ranks)).log()


# -- the backward of parts ---------------------------------------------------------------------------------------------


@_fault("ring", Call, "differentiate", "the backward of a part goes by the part's own lse (diffusers#14265)")
def _local_lse(true: Any, call: Any, piece: Any, owner: int, operands: Any, results: Any, upstream: Any) -> Any:
    lse = results[1].clone()
    lse[:, :, piece.rows.start : piece.rows.stop] = call.attend(piece, owner, *operands)[1]
    return true(call, piece, owner, operands, (results[0], lse), upstream)


@_fault("ring", Call, "differentiate", "the backward of a part goes by the part's own output")
def _local_output(true: Any, call: Any, piece: Any, owner: int, operands: Any, results: Any, upstream: Any) -> Any:
    out = results[0].clone()
    out[:, :, piece.rows.start : piece.rows.stop] = call.attend(piece, owner, *operands)[0]
    return true(call, piece, owner, operands, (out, results[1]), upstream)


@_fault("ring", Call, "differentiate", "the gradient of lse is dropped")
def _lost_lse_gradient(true: Any, call: Any, piece: Any, owner: int, operands: Any, results: Any, upstream: Any) -> Any:
    return true(call, piece, owner, operands, results, (upstream[0], None))


@_fault("ring", Ring, "backward", "a sum of gradients of keys is added once more when it is home")
def _gradient_twice(true: Any, ring: Any, *arguments: Any) -> Any:
    of_query, of_key, of_value = true(ring, *arguments)
    return (of_query, 2 * of_key, of_value) if ring.ranks > 1 else (of_query, of_key, of_value)


@_fault("ring", Ring, "backward", "gradients of keys stay with the rank that computed the last of them")
def _gradient_of_another(true: Any, ring: Any, *arguments: Any) -> Any:
    of_query, of_key, of_value = true(ring, *arguments)
    if ring.ranks == 1:
        return of_query, of_key, of_value
    message = ring.send((of_key.contiguous(), of_value.contiguous()), ring.rank - 1).take()
    mine = ring.call.keys.rows(ring.rank)
    filled = [torch.nn.functional.pad(x[:, :, :mine], (0, 0, 0, mine - x[:, :, :mine].shape[2])) for x in message]
    return of_query, *filled


# -- going round -------------------------------------------------------------------------------------------------------


@_fault("ring", Ring, "passing", "the last rank's keys are never looked at")
def _one_step_short(true: Any, ring: Any, tensors: Any) -> Any:
    for owner, held in true(ring, tensors):
        yield owner, [x * 0 - 1e4 if ring.ranks > 1 and ring.step(owner) == ring.ranks - 1 else x for x in held]


@_fault("ring", Ring, "passing", "keys are used before the next have arrived")
def _stale_keys(true: Any, ring: Any, tensors: Any) -> Any:
    before: Any = None
    for owner, held in true(ring, tensors):
        same = before is not None and all(a.shape == b.shape for a, b in zip(before, held, strict=True))
        yield owner, before if same else held
        before = held


# -- positions ---------------------------------------------------------------------------------------------------------


@_fault("ring", pieces, "_between", "rows beyond the first chunk stand one further than they do")
def _shifted_rows(true: Any, rows: range, keys: range, band: Any, at: int, where: int) -> Any:
    if not rows.start:
        return true(rows, keys, band, at, where)
    return true(range(rows.start + 1, rows.stop + 1), keys, band, at, where)


@_fault("ring", Call, "pieces", "rows in zigzag order are taken for contiguous ones, and the other way round")
def _other_order(true: Any, call: Any, owner: int) -> Any:
    def other(dealt: Dealing) -> Dealing:
        return Dealing(dealt.length, dealt.ranks, "contiguous" if dealt.order == "zigzag" else "zigzag")

    return true(Call(call.rank, other(call.queries), other(call.keys), *_rest(call)), owner)


@_fault("ring", Call, "pieces", "a packed sequence is cut where a rank's rows end")
def _cut_sequences(true: Any, call: Any, owner: int) -> Any:
    return [] if call.cu_seqlens and owner != call.rank else true(call, owner)


@_fault("ring", Call, "said", "key lengths count from the first key of each part")
def _lengths_of_parts(true: Any, call: Any, piece: Any, owner: int) -> Any:
    said = true(call, piece, owner)
    if "key_lengths" in said:
        said["key_lengths"] = call.beside["key_lengths"].clamp(0, len(piece.keys))
    return said


@_fault("ring", Call, "said", "a mask begins anew with each part")
def _mask_of_the_corner(true: Any, call: Any, piece: Any, owner: int) -> Any:
    said = true(call, piece, owner)
    if "attn_mask" in said:
        mask = call.beside["attn_mask"]
        said["attn_mask"] = mask[..., : said["attn_mask"].shape[-2], : said["attn_mask"].shape[-1]]
    return said


# -- trading rows for heads --------------------------------------------------------------------------------------------


@_fault("all-to-all", all_to_all, "_in_order", "rows lie in the order of the ranks that they come from")
def _rows_of_ranks(true: Any, parts: Any, dealt: Any) -> Any:
    return torch.cat(parts, 2)


@_fault("all-to-all", AllToAll, "key_heads", "query heads share key heads in turn, not in groups")
def _heads_in_turn(true: Any, trade: Any, rank: int) -> Any:
    return [head % trade.heads_kv for head in trade.heads(rank)]


@_fault("all-to-all", all_to_all, "_heads", "a key head that goes to several ranks has the gradient of one")
def _one_gradient(true: Any, array: Any, heads: Any) -> Any:
    found = true(array, heads)
    return found.detach() if array.shape[1] > len(heads) and heads[0] == 0 else found


@_fault("all-to-all", AllToAll, "back", "heads come back in the order of the other half")
def _heads_turned(true: Any, trade: Any, array: Any) -> Any:
    return true(trade, array).roll(1, 1)


def _rest(asked: Any) -> tuple[Any, ...]:
    return asked.band, asked.options, asked.cu_seqlens, asked.beside
