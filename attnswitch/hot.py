"""Calls like one before: the facts of the tensors are looked up, and the kernel that they came to is launched.

Everything that problem, plan and kernel follow from is in what is looked up. A call that has more to it (arrays of
other libraries, key lengths, a seed, tensors of subclasses or under function transforms) is not for here, and goes
through every step in ``attnswitch.api``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attnswitch import call as calls
from attnswitch import finite, planner, recording
from attnswitch.arrays import Facts
from attnswitch.backend import Inputs, Kernel, native
from attnswitch.call import Call
from attnswitch.device import Device
from attnswitch.options import Options
from attnswitch.planner import Plan
from attnswitch.policy import Policy
from attnswitch.problem import DTYPES, Problem

__all__ = ["Ready", "attend", "ready"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack

#: Shape, strides in elements, dtype, device, requires_grad, and the address modulo 16.
_Seen = tuple[Any, ...]


class Ready(NamedTuple):
    """What the facts of a call came to."""

    problem: Problem
    device: tuple[str, int]
    kernel: Kernel
    #: Whether NaN and inf are looked for.
    reads: bool
    #: Whether gradients go through the kernel's own backward.
    wrapped: bool


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
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN or not options.shared:
        return None
    if _transforms() is not None or forward_ad._current_level >= 0:
        return None
    try:
        mask = None if attn_mask is None else _seen(attn_mask) if type(attn_mask) in _PLAIN else ()
        facts = _seen(query), _seen(key), _seen(value), mask
    except RuntimeError:  # sparse and nested tensors have no strides
        return None
    found = ready(*facts, options, torch.is_grad_enabled(), backend, policy, finite.when(), planner.generation(), plan)
    if found is None:
        return None
    p = found.problem
    turned = options.layout == "BLHD"
    if turned:
        query, key, value = (tensor.swapaxes(1, 2) for tensor in (query, key, value))
    if found.reads and not _finite(p, query, key, value):
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
        out, lse = found.kernel.forward(inputs)
    return (out.swapaxes(1, 2) if turned else out), lse


def _seen(tensor: Any) -> _Seen:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.data_ptr() & 15


def _finite(problem: Problem, *tensors: Any) -> bool:
    if not problem.grads:
        return finite.tensors_are_finite(*tensors)
    with torch.no_grad():
        return finite.tensors_are_finite(*tensors)


@functools.lru_cache(maxsize=1024)
def ready(
    query: _Seen,
    key: _Seen,
    value: _Seen,
    mask: _Seen | None,
    options: Options,
    grad_enabled: bool,
    backend: str | None,
    policy: Policy,
    when: str,
    generation: int,
    plan: Plan | None,
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
    if plan is None:
        plan = planner.make_plan(problem, Device.of(*where), backend, policy)
    if plan.chosen is None or plan.problem != problem or (policy is Policy.MEASURE and plan.open):
        return None
    chosen, kernel = planner.compiled(plan)
    if native(chosen, "torch") != "torch" or (problem.dropout and getattr(chosen, "wants_seed", False)):
        return None
    wrapped = bool(problem.grads) and not chosen.autograd
    return Ready(problem, where, kernel, finite.looked_for(when, where[0]), wrapped)


def _name(facts: _Seen) -> str:
    return str(facts[2]).removeprefix("torch.")


def _facts(seen: _Seen) -> Facts:
    shape, strides, dtype, device, _, address = seen
    in_bytes = tuple(stride * dtype.itemsize for stride in strides)
    return Facts("torch", (device.type, device.index or 0), _name(seen), tuple(shape), in_bytes, address)
