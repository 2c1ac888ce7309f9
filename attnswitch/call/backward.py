"""Gradients for callers without autograd: ``attention_backward`` by the launch that its call comes to."""

from __future__ import annotations

from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.call import recording
from attnswitch.call.attend import request
from attnswitch.call.describe import check_beside, swap_heads, swapped
from attnswitch.call.launch import Launch
from attnswitch.call.options import Options
from attnswitch.call.run import caller_of, inputs_of, to_caller, to_native
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients
from attnswitch.planning.policy import Policy
from attnswitch.problem import DTYPES

__all__ = ["gradients"]


def gradients(
    grad_out: Array,
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    *,
    out: Array | None,
    lse: Array | None,
    grad_lse: Array | None,
    wanted: str,
) -> Gradients:
    """Gradients of ``operands`` (query, key, value and maybe a mask) that ``wanted`` asks for, in the caller's library.

    Raises what ``attention_backward`` raises.
    """
    if grad_out is None:
        raise InvalidProblem("grad_out is None: expected the upstream gradient of the output, (B, Hq, Lq, Dv)")
    asked = request(
        operands[0],
        options,
        backend,
        policy,
        seeded=seed is not None,
        masked=len(operands) > 3,
        lengths=key_lengths is not None,
        grads=wanted,
    )
    launch, given = asked.find(operands, key_lengths)
    if launch.look is not None and not launch.look(*given[:3]):
        launch = asked.poisoned(launch)
    problem = launch.problem
    recording.note(problem)
    library = arrays.library_of(given[0])
    native = launch.backend.native(library)
    turned = options.layout == "BLHD"
    inputs = to_native(inputs_of(asked, launch, given, key_lengths, seed), library, native)
    rows = problem.batch, problem.heads_q, problem.seq_q

    def beside(array: Array | None, role: str, shape: tuple[int, ...]) -> Array | None:
        return _beside(array, role, shape, launch, turned and len(shape) == 4, library, native)

    upstream = beside(grad_out, "grad_out", (*rows, problem.dim_v))
    upstream_lse = beside(grad_lse, "grad_lse", rows)
    saved = beside(out, "out", (*rows, problem.dim_v)), beside(lse, "lse", rows)
    if saved[0] is None or saved[1] is None:
        # What torch differentiates runs the forward again with its backward.
        saved = (None, None) if launch.backend.autograd else launch.kernel.forward(inputs)
    grads = launch.kernel.backward(inputs, *saved, upstream, upstream_lse)
    mask = grads.attn_mask
    if mask is not None:  # four axes here, and as many as the caller gave there
        mask = mask[(0,) * (4 - len(given[3].shape))]
    caller = caller_of(launch, operands)
    q, k, v = (to_caller(grad, native, library, caller, turned) for grad in grads[:3])
    return Gradients(q, k, v, to_caller(mask, native, library, caller, False))


def _beside(
    array: Array | None,
    role: str,
    shape: tuple[int, ...],
    launch: Launch,
    turned: bool,
    library: str,
    native: str,
) -> Array | None:
    """``array`` checked against the call, in (B, H, L, D) order, as an array of ``native``; None stays None."""
    if array is None:
        return None
    query = launch.facts[0]
    assert query is not None
    array, facts = arrays.take(array, role)
    check_beside(facts, role, query)
    if facts.dtype not in DTYPES:
        raise InvalidProblem(f"{role} has dtype {facts.dtype}: expected one of {', '.join(DTYPES)}")
    if turned:
        array, facts = swap_heads(array), swapped(facts)
    if facts.shape != shape:
        raise InvalidProblem(f"{role} has shape {facts.shape}: expected {shape}, as (B, H, L, D) or (B, H, L)")
    if facts.memory.negative:  # not part of the problem, so no backend was asked; torch could not take it
        array = array.copy()
    return arrays.passage(array, library, native)
