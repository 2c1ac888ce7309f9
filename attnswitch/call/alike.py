"""Calls of other forms that are like one before go straight to its kernel, as ``attend`` has those of operands alone.

What such a call comes to follows from what it says, from its context, and from how its tensors lie: torch's guards tell
that in less time than facts, checks and a choice take. What tensors hold is not looked at on this way, so it is for
those on a GPU, of which nobody reads any; lists, lengths on the CPU and the like go the way of any call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from attnswitch.arrays import Intercepted
from attnswitch.call import finite, forms, recording
from attnswitch.call.attend import modes_of
from attnswitch.call.forms import Call
from attnswitch.call.launch import DUAL, lies_alike
from attnswitch.machine.backend import Forward, Order
from attnswitch.planning import policy as policies
from attnswitch.wisdom import view

__all__ = ["forget", "kept", "knows_again", "run"]

#: Kinds of calls that are remembered; beyond, all are forgotten. And of each kind ways to lie.
_MOST, _LIES = 1024, 4
#: Of what a call gives, in the order of ``Inputs.flat``.
_OFFSETS_K, _SINKS, _TABLE = 7, 8, 10
_policy_of_context, _look_of_context, _recording = policies.of_context, finite.of_context, recording.of_context


class _Way:
    """From tensors that lie as ``alike`` guards to the results."""

    __slots__ = ("alike", "problem", "recorded", "returns_lse", "run")

    def __init__(self, alike: Callable[..., bool], call: Call, run: Forward) -> None:
        self.alike, self.run = alike, run
        self.problem, self.returns_lse = call.asked.problem, call.asked.returns_lse
        #: Whether all calls of this process are noted.
        self.recorded = recording.whole_process() is not None

    def __call__(self, given: Sequence[Any]) -> Any:
        if self.recorded or _recording() is not None:
            recording.note(self.problem)
        out, lse = self.run(*given)
        return (out, lse) if self.returns_lse else out


#: By all that calls say and their context says, and the sizes of the tensors that grow from call to call.
_ways: dict[tuple[Any, ...], list[_Way]] = {}


def forget() -> None:
    """Drop every way."""
    _ways.clear()


def knows_again(query: Any) -> bool:
    """Whether calls of such a tensor may be known again: nobody looks at what tensors beside it hold, unless asked."""
    return query.is_cuda  # type: ignore[no-any-return]


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Behind it the ways are those before it, whatever was forgotten or learnt in between."""
    before = dict(_ways)
    try:
        yield
    finally:
        _ways.clear()
        _ways.update(before)


def run(given: tuple[Any, ...], said: tuple[Any, ...], general: Callable[[], Call]) -> Any:
    """What a call returns; ``general`` finds out what it asks and who is chosen, if it is like none before.

    ``given`` is what it has of ``Inputs.flat``, as the caller has it. ``said`` is all else, and what of ``given`` is
    None. Raises what ``general`` raises.
    """
    kind = _kind(given, said)
    try:
        ways = _ways.get(kind)  # type: ignore[arg-type]
    except TypeError:  # what is not hashable
        kind = ways = None
    if kind is None:
        return forms.run(general())
    tensors = [x for x in given if x is not None]
    if ways is not None:
        for way in ways:
            if lies_alike(way.alike, *tensors):
                return way(given)
    call = general()
    results = forms.run(call)
    if ways is None and not sys.modules["torch"].jit.is_tracing():
        if len(_ways) >= _MOST:
            _ways.clear()
        ways = _ways[kind] = []
        if not call.asked.problem.grads:  # it may come once; a step has several layers
            return results
    if ways is not None:
        _learn(ways, given, tensors, call)
    return results


def _kind(given: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What calls have in common that are told apart by guards; None for one that is not to be known again."""
    query = given[0]
    try:
        if not knows_again(query):
            return None
        grows = given[1] if given[_TABLE] is None else given[_TABLE]
        context = _policy_of_context(), _look_of_context(), view.generation, modes_of(query)
        kind = *said, query.get_device(), query.shape, grows.shape, *context
    except Intercepted:
        return None  # where that matters, the way of any call says so
    except (AttributeError, RuntimeError):  # no tensors, or such as have no sizes
        return None
    return None if kind[-1] in (None, DUAL) else kind


def _learn(ways: list[_Way], given: tuple[Any, ...], tensors: Sequence[Any], call: Call) -> None:
    """Know calls again that are like this one, if all that they come to follows from that."""
    asked, problem, kind = call.asked, call.asked.problem, call.asked.query.device[0]
    if (
        not call.lasting
        or problem.dropout
        or (call.backend.autograd and (problem.grads or asked.sinks_grad))
        or finite.looked_for(finite.when(), kind)
    ):
        return
    if not asked.library == asked.query.library == call.native == "torch":
        return
    if not lies_alike(lambda *_: True, *tensors) or len(set(map(id, tensors))) < len(tensors):
        return  # what no guard would let pass, and one tensor in two places
    if any(tensor.device != tensors[0].device for tensor in tensors):
        return
    changes = _changes(given, call.inputs.flat())
    if changes is None:
        return
    guards = import_module("attnswitch.call.torch_modes").guards(tensors)
    if guards is None or not guards(*tensors):
        return
    ways.insert(0, _Way(guards, call, _prepared(call, changes)))
    del ways[_LIES:]


def _prepared(call: Call, changes: Sequence[tuple[int, Any]]) -> Forward:
    """The way from tensors that lie as those of ``call`` to its results in the caller's order."""
    asked, order = call.asked, call.asked.order
    if asked.problem.grads:
        autograd = import_module("attnswitch.call.autograd")
        run: Forward = autograd.prepared_form(asked.problem, call.kernel, call.inputs, order)
    else:
        run = call.kernel.prepared_form(call.inputs, order)
    if changes:
        run = _converted(run, changes)
    if asked.sinks_grad:
        run = _with_sinks(run, order)
    if order.turned and not _is_dense(call.inputs.query):  # as which the output lies
        run = _contiguous(run)
    return run


def _changes(given: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[tuple[int, Any]] | None:
    """Which of a call's tensors kernels take in memory of their own, and their dtype; None if more becomes of one."""
    changes = []
    for at, (one, other) in enumerate(zip(given, inputs, strict=True)):
        if one is None:
            if other is not None and at != _OFFSETS_K:
                return None
        elif one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
            changes.append((at, other.dtype))
    return changes


def _is_dense(query: Any) -> bool:
    """Whether (B, H, L, D) lies in memory with rows before heads or heads before rows, and nothing between."""
    return query.is_contiguous() or query.swapaxes(1, 2).is_contiguous()  # type: ignore[no-any-return]


def _contiguous(run: Forward) -> Forward:
    """``run``, whose output is contiguous."""

    def contiguous(*given: Any) -> tuple[Any, Any]:
        out, lse = run(*given)
        return out.contiguous(), lse

    return contiguous


def _with_sinks(run: Forward, order: Order) -> Forward:
    """``run``, which knows of no gradient of the sinks, with theirs."""
    with_sinks = import_module("attnswitch.call.autograd").with_sinks

    def with_gradient(*given: Any) -> tuple[Any, Any]:
        whole = list(given)
        whole[_SINKS] = given[_SINKS].detach()
        both: tuple[Any, Any] = with_sinks(*run(*whole), given[_SINKS], order)
        return both

    return with_gradient


def _converted(run: Forward, changes: Sequence[tuple[int, Any]]) -> Forward:
    """``run`` of tensors of which some are converted first, as the way of any call converts them."""

    def converted(*given: Any) -> tuple[Any, Any]:
        whole = list(given)
        for at, dtype in changes:
            whole[at] = whole[at].to(dtype).contiguous()
        return run(*whole)

    return converted
