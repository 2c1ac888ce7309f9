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

from attnswitch import call as calls
from attnswitch import finite, planner, recording
from attnswitch.arrays import Facts
from attnswitch.backend import Inputs, Kernel, native, prepared
from attnswitch.call import Call
from attnswitch.device import Device
from attnswitch.options import Options
from attnswitch.planner import Plan
from attnswitch.policy import Policy
from attnswitch.problem import DTYPES, Problem

__all__ = ["Ready", "attend", "forget", "ready"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack

#: Shape, strides in elements, dtype, device, requires_grad, and the address modulo 16.
_Seen = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Ready:
    """What the facts of a call came to."""

    problem: Problem
    device: tuple[str, int]
    kernel: Kernel
    #: Looks for NaN and inf, where that is done.
    look: finite.Look | None
    #: Whether gradients go through the kernel's own backward.
    wrapped: bool
    #: The kernel's forward for operands that lie as these do, once there were some.
    forward: Callable[[Inputs], tuple[Any, Any]] | None = None
    #: Whether operands have these facts, but for addresses: what can be asked faster than the facts can be looked up.
    alike: Callable[..., bool] | None = None


#: What the last call came to, by all that is no fact of its operands: most calls are like the one before.
_latest: dict[tuple[Any, ...], Ready] = {}
_MOST = 256


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    options: Options,
    backend: str | None,
    policy: Policy,
    plan: Plan | None = None,
) -> tuple[Any, Any] | None:
    """Output and lse, or None where the call has to go through every step; with ``plan``, by what that chose.

    Raises what the kernel raises.
    """
    if not options.shared or forward_ad._current_level >= 0:
        return None
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    asked = options, len(operands), torch.is_grad_enabled(), backend, policy, finite.when(), planner.generation(), plan
    try:
        found = _latest.get(asked)
    except TypeError:  # what is not hashable is no name of a backend
        return None
    if found is None or not found.alike(*operands) or not _aligned(*operands):  # type: ignore[misc]
        found = _looked_up(operands, asked)
        if found is None:
            return None
    p = found.problem
    turned = options.layout == "BLHD"
    if turned:
        query, key, value = (tensor.swapaxes(1, 2) for tensor in (query, key, value))
    if found.look is not None and not found.look(query, key, value):
        return None
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    inputs = Inputs(query, key, value, attn_mask)
    recording.note(p)
    if found.wrapped:
        from attnswitch import torch_op

        call = Call(p, "torch", "torch", found.device, inputs, "BHLD", query)
        out, lse = torch_op.differentiable(call, found.kernel, "torch")
    else:
        if found.forward is None:
            found.forward = prepared(found.kernel, inputs)
        out, lse = found.forward(inputs)
    return (out.swapaxes(1, 2) if turned else out), lse


def _aligned(query: Any, key: Any, value: Any, mask: Any = None) -> bool:
    addresses: int = query.data_ptr() | key.data_ptr() | value.data_ptr() | (0 if mask is None else mask.data_ptr())
    return addresses & 15 == 0


def _looked_up(operands: tuple[Any, ...], asked: tuple[Any, ...]) -> Ready | None:
    """What a call comes to, by all its facts; None where it is not for here."""
    if any(type(operand) not in _PLAIN for operand in operands) or _transforms() is not None:
        return None
    try:
        query, key, value, *mask = (_seen(operand) for operand in operands)
    except RuntimeError:  # sparse and nested tensors have no strides
        return None
    found = ready(query, key, value, mask[0] if mask else None, *asked)
    if found is not None and _aligned(*operands):
        if found.alike is None or not found.alike(*operands):  # or what dispatches on them has changed
            found.alike = _alike(operands)
        if len(_latest) >= _MOST:
            _latest.clear()
        _latest[asked] = found
    return found


def _seen(tensor: Any) -> _Seen:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.data_ptr() & 15


def _alike(operands: tuple[Any, ...]) -> Callable[..., bool]:
    """Whether others are like ``operands`` in all but their elements and addresses, by what guards compiled graphs.

    That is: their types, what dispatches on them here and now, dtypes, devices, shapes, strides and requires_grad.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *operands,
            dynamic_dims_sizes=[list(operand.shape) for operand in operands],  # type: ignore[misc]
            dynamic_dims_strides=[list(operand.stride()) for operand in operands],  # type: ignore[misc]
        )
    except (AttributeError, TypeError):  # no such thing in this torch: every call is looked up
        return lambda *_: False
    check: Callable[..., bool] = guards.check
    return check


@functools.lru_cache(maxsize=1024)
def ready(
    query: _Seen,
    key: _Seen,
    value: _Seen,
    mask: _Seen | None,
    options: Options,
    count: int,
    grad_enabled: bool,
    backend: str | None,
    policy: Policy,
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
    plan = asked_for or planner.make_plan(problem, Device.of(*where), backend, policy)
    if plan.chosen is None or plan.problem != problem or (policy is Policy.MEASURE and plan.open):
        return None
    look = finite.look(problem) if finite.looked_for(when, where[0]) else None
    if look is not None and asked_for is None:
        poisoned = planner.make_plan(problem.replace(nonfinite=True), Device.of(*where), backend, policy)
        if poisoned.chosen == plan.chosen:  # the choice is the same, whatever a look would find
            plan, look = poisoned, None
    chosen, kernel = planner.compiled(plan)
    if native(chosen, "torch") != "torch" or (problem.dropout and getattr(chosen, "wants_seed", False)):
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
