"""Calls like one before: the facts of the tensors are looked up, and the kernel that they came to is launched.

Everything that problem, plan and kernel follow from is in what is looked up. A call that has more to it (arrays of
other libraries, key lengths, a seed, tensors of subclasses or under function transforms) is not for here, and goes
through every step in ``attnswitch.api``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from attnswitch.arrays import Facts
from attnswitch.call import call as calls
from attnswitch.call import finite, recording
from attnswitch.machine.backend import Forward, Inputs, Kernel, Shows
from attnswitch.machine.device import Device
from attnswitch.planning import planner, policy
from attnswitch.planning.planner import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import DTYPES, Problem
from attnswitch.problem.options import Options

__all__ = ["Like", "Ready", "attend", "forget", "ready"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_policy_chosen, _look_chosen, _recording = policy.chosen, finite.chosen, recording.chosen

#: Shape, strides in elements, dtype, device, requires_grad, and the address modulo 16.
_Seen = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Like:
    """What calls come to that are like one before."""

    problem: Problem
    #: Whether all calls of this process are recorded.
    recorded: bool
    #: Looks for NaN and inf, where that is done.
    look: finite.Look | None
    #: Whether lse shows that there is need to look; None where that is done before the launch.
    shown: Callable[[Any], bool] | None
    #: Output and lse of operands as the caller lays them out.
    run: Forward
    #: Whether operands have the same facts but for addresses, and torch is in the same modes: what can be asked faster
    #: than the facts can be looked up.
    alike: Callable[..., bool]


@dataclass(slots=True, eq=False)
class Ready:
    """What the facts of a call came to."""

    problem: Problem
    device: tuple[str, int]
    kernel: Kernel
    look: finite.Look | None
    #: Whether gradients go through the kernel's own backward.
    wrapped: bool
    #: The same for calls like the last one.
    like: Like | None = None


#: What the last call came to, by all that is no fact of its operands: most calls are like the one before.
_latest: dict[tuple[Any, ...], Like] = {}
_MOST = 256


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    options: Options,
    backend: str | None,
    named: Policy | str | None,
    plan: Plan | None = None,
) -> tuple[Any, Any] | None:
    """Output and lse, or None where the call has to go through every step; with ``plan``, by what that chose.

    Raises what the kernel raises, and ``InvalidProblem`` for what is no policy.
    """
    if not options.shared or forward_ad._current_level >= 0:
        return None
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    # What the context says stands for itself here: what it falls back on never changes.
    context = _policy_chosen(), _look_chosen(), _grad_enabled(), planner.generation()
    asked = options, attn_mask is None, backend, named, plan, context
    try:
        found = _latest.get(asked)
        # Guards end the process where an operand has no sizes, so that those come last.
        if found is not None and (
            (query.data_ptr() | key.data_ptr() | value.data_ptr() | (0 if attn_mask is None else attn_mask.data_ptr()))
            & 15
            or (query.is_nested or key.is_nested or value.is_nested or (attn_mask is not None and attn_mask.is_nested))
            or not found.alike(*operands)
        ):
            found = None
    except TypeError:  # what is not hashable is no name of a backend
        return None
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        found = None
    if found is None:
        found = _looked_up(operands, asked)
        if found is None:
            return None
    look, shown = found.look, found.shown
    if look is not None and shown is None and not look(query, key, value):
        return None
    result = found.run(*operands)
    if look is not None and shown is not None:
        lse = result[1]
        if (lse is None or shown(lse)) and not look(query, key, value):
            return None
    if found.recorded or _recording() is not None:
        recording.note(found.problem)
    return result


def _looked_up(operands: tuple[Any, ...], asked: tuple[Any, ...]) -> Like | None:
    """What a call comes to, by all its facts; None where it is not for here."""
    if any(type(operand) not in _PLAIN for operand in operands) or _transforms() is not None:
        return None
    try:
        seen = [_seen(operand) for operand in operands]
    except RuntimeError:  # sparse and nested tensors have no strides
        return None
    options, _, backend, named, plan, (_, _, grad_enabled, generation) = asked
    settled = grad_enabled, backend, policy.effective(named), finite.when(), generation, plan
    query, key, value, mask = seen if len(seen) > 3 else (*seen, None)
    found = ready(query, key, value, mask, options, *settled)
    if found is None:
        return None
    like = found.like
    if like is None or not like.alike(*operands):
        alike = _alike(operands)
        run = _run(found, operands, options.layout == "BLHD", prepare=alike is not None)
        tells = found.look is not None and alike is not None and found.device[0] == "cpu"
        shown = finite.shows(found.problem) if tells and found.kernel.shows is Shows.LSE else None
        recorded = recording.environment() is not None
        like = found.like = Like(found.problem, recorded, found.look, shown, run, alike or _never)
    if not any(facts[-1] for facts in seen):  # addresses, as ``attend`` asks for them
        if len(_latest) >= _MOST:
            _latest.clear()
        _latest[asked] = like
    return like


def _run(found: Ready, operands: tuple[Any, ...], turned: bool, *, prepare: bool) -> Forward:
    """The way from ``operands``, and such as are like them if it is to ``prepare`` for these, to the results."""
    missing = 4 - operands[3].dim() if len(operands) > 3 else 0

    def straight(query: Any, key: Any, value: Any, mask: Any = None) -> Inputs:
        if turned:
            query, key, value = (tensor.swapaxes(1, 2) for tensor in (query, key, value))
        return Inputs(query, key, value, mask[(None,) * missing] if missing else mask)

    forward = (
        found.kernel.prepared(straight(*operands)) if prepare else Kernel.prepared(found.kernel, straight(*operands))
    )
    if found.wrapped:
        from attnswitch.call import torch_op

        forward = torch_op.prepared(found.problem, found.kernel, forward)
    if not turned and not missing:
        return forward

    def run(*operands: Any) -> tuple[Any, Any]:
        out, lse = forward(*straight(*operands)[: len(operands)])
        return (out.swapaxes(1, 2) if turned else out), lse

    return run


def _seen(tensor: Any) -> _Seen:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.data_ptr() & 15


def _alike(operands: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Whether others are like ``operands`` in all but their elements and addresses, by what guards compiled graphs.

    That is: their types, what dispatches on them here and now (autocast among it), dtypes, devices, shapes, strides
    and requires_grad. Whether gradients are enabled is not asked.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *operands,
            dynamic_dims_sizes=[list(operand.shape) for operand in operands],  # type: ignore[misc]
            dynamic_dims_strides=[list(operand.stride()) for operand in operands],  # type: ignore[misc]
        )
    except (AttributeError, TypeError):  # no such thing in this torch: every call is looked up
        return None
    check: Callable[..., bool] = guards.check
    return check


def _never(*_: Any) -> bool:
    return False


@functools.lru_cache(maxsize=1024)
def ready(
    query: _Seen,
    key: _Seen,
    value: _Seen,
    mask: _Seen | None,
    options: Options,
    grad_enabled: bool,
    backend: str | None,
    settled: Policy,
    when: str,
    generation: int,
    asked_for: Plan | None,
) -> Ready | None:
    """What a call with these facts comes to; None where it is not for here, or nothing is chosen for it.

    Raises ``InvalidProblem`` as the call would, and ``CompileError``.
    """
    seen = [query, key, value] + ([] if mask is None else [mask])
    kinds = {facts[3].type for facts in seen if facts}
    if not all(seen) or not kinds <= {"cpu", "cuda"} or any(_name(facts) not in DTYPES for facts in seen[:3]):
        return None
    q, k, v = (_facts(facts) for facts in seen[:3])
    m = None if mask is None else _facts(mask)
    letters = zip("qkvm", seen, strict=False)
    grads = "".join(letter for letter, facts in letters if grad_enabled and facts[4])
    problem = calls.describe(q, k, v, m, False, options, grads)
    where = q.device
    plan = asked_for or planner.make_plan(problem, Device.of(*where), backend, settled)
    if plan.chosen is None or plan.problem != problem or (settled is Policy.MEASURE and plan.open):
        return None
    look = finite.look(problem, where[0]) if finite.looked_for(when, where[0]) else None
    if look is not None and asked_for is None:
        poisoned = planner.make_plan(problem.replace(nonfinite=True), Device.of(*where), backend, settled)
        if poisoned.chosen == plan.chosen:  # the choice is the same, whatever a look would find
            plan, look = poisoned, None
    chosen, kernel = planner.compiled(plan)
    if chosen.native("torch") != "torch" or (problem.dropout and chosen.wants_seed):
        return None
    wrapped = bool(problem.grads) and not chosen.autograd
    return Ready(problem, where, kernel, look, wrapped)


def forget() -> None:
    """Drop what calls came to."""
    ready.cache_clear()
    _latest.clear()


def _name(facts: _Seen) -> str:
    return str(facts[2]).removeprefix("torch.")


def _facts(seen: _Seen) -> Facts:
    shape, strides, dtype, device, _, address = seen
    in_bytes = tuple(stride * dtype.itemsize for stride in strides)
    return Facts("torch", (device.type, device.index or 0), _name(seen), tuple(shape), in_bytes, address)
