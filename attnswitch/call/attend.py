"""Calls of dense operands, and maybe of a mask and lengths: their facts find a launch, or build one, and that is run.

Calls with sinks, slopes, offsets or pages go by ``forms``, and by ``alike`` once one like them is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Intercepted
from attnswitch.call import finite, recording
from attnswitch.call.describe import describe, lengths_beside
from attnswitch.call.launch import DUAL, Launch, Request, lies_alike
from attnswitch.call.options import Options, no_name
from attnswitch.call.run import run, run_prepared
from attnswitch.call.seeds import drawn_seed
from attnswitch.errors import InvalidProblem
from attnswitch.machine.device import Device
from attnswitch.planning import policy as policies
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem
from attnswitch.wisdom import view

__all__ = ["attend", "forget", "modes_of", "problem_of", "request"]

#: Requests that are remembered; beyond, all are forgotten.
_MOST = 1024
_policy_of_context, _look_of_context, _recording = policies.of_context, finite.of_context, recording.of_context
_requests: dict[tuple[Any, ...], Request] = {}


def attend(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    plan: Plan | None = None,
) -> tuple[Array, Array | None]:
    """Output and lse in the caller's library and layout; with ``plan``, by what that chose.

    Raises what ``attention`` raises.
    """
    # The key of ``request``, made here: every call needs it.
    said = (
        options,
        seed is None,
        attn_mask is None,
        key_lengths is None,
        backend,
        policy,
        plan,
        None,
        (_MODES.get(type(query)) or _modes_of(query))(),
        _policy_of_context(),
        _look_of_context(),
        view.generation,
    )
    try:
        asked = _requests.get(said) or _requested(said)
    except TypeError:  # what is not hashable is no name
        raise _unhashable(backend, policy) from None
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    launch = asked.latest
    given: Sequence[Array] = operands
    if launch is None or not lies_alike(launch.alike, *operands):
        launch, given = asked.find(operands, key_lengths)
    look, shown = launch.look, launch.shown
    if look is not None and shown is None and not look(*given[:3]):
        return _poisoned(asked, launch, operands, given, key_lengths, seed)
    if launch.run is None:
        result = run(asked, launch, operands, given, key_lengths, seed)
    elif launch.plain:
        result = launch.run(*given)
        if look is not None and shown is not None and shown(*result) and not look(*given[:3]):
            return _poisoned(asked, launch, operands, given, key_lengths, seed)
    else:
        result = run_prepared(asked, launch, operands, given, key_lengths, seed)
    if launch.recorded or _recording() is not None:
        recording.note(launch.problem)
    return result


def request(
    query: Array,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    *,
    seeded: bool,
    masked: bool,
    lengths: bool,
    grads: str,
) -> Request:
    """The request that a call for gradients is, one for equal calls in equal contexts. Raises ``InvalidProblem``."""
    context = modes_of(query), _policy_of_context(), _look_of_context(), view.generation
    said = options, not seeded, not masked, not lengths, backend, policy, None, grads, *context
    try:
        return _requests.get(said) or _requested(said)
    except TypeError:
        raise _unhashable(backend, policy) from None


def _requested(said: tuple[Any, ...]) -> Request:
    options, seedless, _, lengthless, backend, policy, plan, grads, modes, *_ = said
    quick = modes not in (None, DUAL)
    hash(said)  # before anything else is found wrong with it
    asked = Request(options, not seedless, not lengthless, backend, policies.effective(policy), plan, grads, quick)
    if len(_requests) >= _MOST:
        _requests.clear()
    _requests[said] = asked
    return asked


def _unhashable(backend: Any, policy: Any) -> InvalidProblem:
    policies.effective(policy)
    return no_name(backend)


def forget() -> None:
    """Drop every launch."""
    _requests.clear()


def problem_of(
    query: Array, key: Array, value: Array, attn_mask: Any, key_lengths: Any, options: Options, seed: int | None
) -> tuple[Problem, Device]:
    """The problem that a call is, its operands looked at where that is done, and its device."""
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    try:
        taken, facts = arrays.take_all(operands)
        looked = finite.when()
    except Intercepted:  # of tensors that only torch can read
        for role, tensor in zip(arrays.ROLES, operands, strict=False):
            arrays.check_dense(tensor, role)
        taken, facts, looked = operands, tuple([arrays.outline(x) for x in operands]), "never"
    whole = facts if len(facts) == 4 else (*facts, None)
    problem = describe(whole, options, lengths=key_lengths is not None, seeded=seed is not None)
    if key_lengths is not None:
        lengths_beside(key_lengths, facts[0], problem.seq_k)
    kind = facts[0].device[0]
    if finite.looked_for(looked, kind) and not finite.finite(problem, kind, tuple(taken[:3])):
        problem = problem.replace(nonfinite=True)
    return problem, Device.of(*facts[0].device)


def _poisoned(
    asked: Request,
    launch: Launch,
    operands: Sequence[Array],
    given: Sequence[Array],
    key_lengths: Any,
    seed: int | None,
) -> tuple[Array, Array | None]:
    """The same where NaN, inf, or what overflows was seen: another problem, and maybe another backend."""
    launch = asked.poisoned(launch)
    if launch.problem.seeded and seed is None:
        seed = drawn_seed(given[0])
    out, lse = run(asked, launch, operands, given, key_lengths, seed)
    recording.note(launch.problem)
    if launch.facts[0].library == "torch":  # type: ignore[union-attr]
        # As the others lay it: a program that views the result otherwise goes on.
        out = import_module("attnswitch.call.operators.memory").laid(out, operands[0], asked.options.layout)
    return out, lse


# -- what torch is asked, once there are tensors -----------------------------------------------------------------------

#: What of its library's modes a call depends on, by the type of query.
_MODES: dict[type, Callable[[], Hashable]] = {}


def modes_of(query: Array) -> Hashable:
    """What of its library's modes a call with ``query`` depends on. Raises ``Intercepted`` where one looks at calls."""
    return (_MODES.get(type(query)) or _modes_of(query))()


def _modes_of(query: Array) -> Callable[[], Hashable]:
    library = arrays.library_of(query)
    modes = _modeless
    if library == "torch":
        torch_modes = import_module("attnswitch.call.torch_modes")
        modes = torch_modes.intercepted if arrays.dispatches(type(query)) else torch_modes.modes
    if library:
        _MODES[type(query)] = modes
    return modes


def _modeless() -> None:
    """Arrays of other libraries have none."""
