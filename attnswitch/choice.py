"""The choice of a backend without its run: ``plan``, ``explain``, ``backends``."""

from __future__ import annotations

from typing import Any, overload

from attnswitch.arrays import Array
from attnswitch.call import call as calls
from attnswitch.call.call import Call
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner
from attnswitch.planning.planner import Plan
from attnswitch.planning.policy import Policy, effective
from attnswitch.problem import Problem
from attnswitch.problem.options import Options

__all__ = ["backends", "explain", "plan", "plan_of"]


@overload
def plan(
    query: Problem | str, *, device: Device | str = ..., backend: str | None = ..., policy: Policy | str | None = ...
) -> Plan: ...
@overload
def plan(
    query: Array,
    key: Array,
    value: Array,
    *,
    backend: str | None = ...,
    policy: Policy | str | None = ...,
    **options: Any,
) -> Plan: ...
def plan(
    query: Any,
    key: Array = None,
    value: Array = None,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Plan:
    """The plan for a call (``plan(query, key, value, is_causal=True)``) or a described problem (``plan(problem)``).

    Called with arrays of its problem, it is the attention: ``plan(query, key, value)(query, key, value)``.

    Args:
        query: the array, or a ``Problem`` or its text form, which then stands alone.
        key: as for ``attention``, like value and the options.
        value: see key.
        **options: see key.
        device: for a described problem: a ``Device``, or text such as "cpu" (the default), "cuda:0" or "h200", here or
            not. Arrays bring their own.
        backend: as for ``attention``.
        policy: as for ``attention``.

    Raises:
        InvalidProblem, Unsupported, BackendUnavailable: as ``attention``.
    """
    found = explain(query, key, value, device=device, backend=backend, policy=policy, **options)
    return planner.require(found, backend)


def explain(
    query: Any,
    key: Array = None,
    value: Array = None,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Plan:
    """As ``plan``, but where nothing fits it returns the plan that says so. Print it to read every reason."""
    if isinstance(query, (Problem, str)):
        if key is not None or value is not None or options:
            raise InvalidProblem("a described problem stands alone: put options such as causal into the problem")
        problem = Problem.parse(query) if isinstance(query, str) else query
        place, where = _device(device)
        return _made(problem, place, where, backend, policy)
    if device is not None:
        raise InvalidProblem(
            f"device={device!r} with arrays: they are planned for where they are; describe the problem"
        )
    if key is None or value is None:
        raise InvalidProblem("query stands without key and value; a problem without arrays is a Problem or its text")
    masks = {name: options.pop(name, None) for name in ("attn_mask", "key_lengths")}
    try:
        read = Options(**options)
    except TypeError as error:
        raise InvalidProblem(
            f"{error}; the keywords are those of attention".replace("Options.__init__()", "the call")
        ) from None
    call = calls.read(query, key, value, masks["attn_mask"], masks["key_lengths"], read)
    return _made(call.problem, Device.of(*call.device), _where(call), backend, policy)


def _device(device: Device | str | None) -> tuple[Device, str]:
    """The device, and how torch spells it if it is here."""
    if device is not None and not isinstance(device, (Device, str)):
        raise InvalidProblem(f"device={device!r}: expected a Device or text such as cpu, cuda:0 or h200")
    found = device if isinstance(device, Device) else Device.parse(device or "cpu")
    return found, found.where


def backends() -> dict[str, str | None]:
    """Every backend by name, in order of preference, with why it cannot run on this machine (None if it can)."""
    found: dict[str, str | None] = {}
    for name in registry.names():
        backend = registry.load(name)
        if isinstance(backend, Missing):
            found[name] = backend.reason
            continue
        try:
            found[name] = backend.unavailable()
        except Exception as error:  # a plug-in may fail in any way; that is a fact about it
            found[name] = f"{type(error).__name__}: {error}"
    return found


def plan_of(call: Call, backend: str | None, policy: Policy | str | None) -> Plan:
    """The plan of a call that was read, which chose something. Raises what ``plan`` raises."""
    plan = _made(call.problem, Device.of(*call.device), _where(call), backend, policy)
    return planner.require(plan, backend)


def _where(call: Call) -> str:
    """The call's device as torch spells it."""
    kind, index = call.device
    return f"{kind}:{index}" if kind == "cuda" else kind


def _made(problem: Problem, device: Device, where: str, backend: str | None, policy: Policy | str | None) -> Plan:
    """The plan; under MEASURE, after what it lacks was measured."""
    policy = effective(policy)
    plan = planner.make_plan(problem, device, backend, policy)
    if policy is Policy.MEASURE and plan.open:
        from attnswitch.tune import sight  # torch is slow to import

        if sight.measure(plan, where):
            plan = planner.make_plan(problem, device, backend, policy)
    return plan
