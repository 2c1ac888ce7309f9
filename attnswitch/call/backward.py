"""Gradients for callers without autograd: ``attention_backward`` by the launch that its call comes to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.call import recording
from attnswitch.call.attend import request
from attnswitch.call.describe import result_beside
from attnswitch.call.launch import Launch, Request, lies_alike
from attnswitch.call.options import Options
from attnswitch.call.run import caller_of, inputs_of, to_caller, to_native
from attnswitch.machine.backend import Gradients, Inputs
from attnswitch.machine.inputs import heads_last
from attnswitch.planning.policy import Policy

__all__ = ["are_of", "gradients", "results"]


class _Call(NamedTuple):
    """The launch of a call, and what stands between its arrays and the caller's."""

    launch: Launch
    inputs: Inputs
    given: Sequence[Array]
    library: str
    native: str
    caller: Array | None
    turned: bool

    def back(self, array: Array, *, turned: bool = False) -> Array:
        """A result as the caller's; ``turned`` if it lies as the caller's layout has it."""
        if array is not None and turned and self.turned:
            array = heads_last(array, self.inputs.query)
        return to_caller(array, self.native, self.library, self.caller)


def _request(
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    wanted: str,
) -> Request:
    return request(
        operands[0],
        options,
        backend,
        policy,
        seeded=seed is not None,
        masked=len(operands) > 3,
        lengths=key_lengths is not None,
        grads=wanted,
    )


def _latest(asked: Request, operands: tuple[Array, ...]) -> Launch | None:
    """The launch that is prepared for operands that lie like these, where that is quickly told."""
    launch = asked.latest
    if launch is None or not lies_alike(launch.alike, *operands):
        launch = asked.known(operands)
    if launch is None:
        return None
    return launch if launch.look is None or launch.look(*operands[:3]) else None


def _call(asked: Request, operands: tuple[Array, ...], key_lengths: Any, seed: int | None) -> _Call:
    launch, given = asked.find(operands, key_lengths)
    if launch.look is not None and not launch.look(*given[:3]):
        launch = asked.poisoned(launch)
    recording.note(launch.problem)
    library = arrays.library_of(given[0])
    native = launch.backend.native(library)
    inputs = to_native(inputs_of(asked, launch, given, key_lengths, seed), library, native)
    return _Call(launch, inputs, given, library, native, caller_of(launch, operands), asked.options.layout == "BLHD")


def results(
    operands: tuple[Array, ...],
    key_lengths: Any,
    seed: int | None,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
    wanted: str,
) -> tuple[Array, Array]:
    """Output and lse for ``gradients`` of the same call, by the backend that these are computed by.

    Raises what ``attention`` raises.
    """
    asked = _request(operands, key_lengths, seed, options, backend, policy, wanted)
    launch = _latest(asked, operands)
    if launch is not None and launch.save is not None:
        recording.note(launch.problem)
        return launch.save(*operands)
    call = _call(asked, operands, key_lengths, seed)
    out, lse = call.launch.kernel.results(call.inputs)
    return call.back(out, turned=True), call.back(lse)


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
    asked = _request(operands, key_lengths, seed, options, backend, policy, wanted)
    launch = _latest(asked, operands)
    prepared = None if launch is None else launch.differentiate
    if (
        launch is not None
        and prepared is not None
        and are_of(asked, launch, operands[0], (out, lse), (grad_out, grad_lse))
    ):
        recording.note(launch.problem)
        return prepared(operands, out, lse, grad_out, grad_lse)
    call = _call(asked, operands, key_lengths, seed)
    problem, kernel = call.launch.problem, call.launch.kernel
    rows = problem.batch, problem.heads_q, problem.seq_q
    wide = *rows, problem.dim_v
    query = call.launch.facts[0]
    assert query is not None
    beside = functools.partial(result_beside, query=query, native=call.native, layout=options.layout)
    upstream, upstream_lse = beside(grad_out, "grad_out", wide), beside(grad_lse, "grad_lse", rows)
    saved = beside(out, "out", wide), beside(lse, "lse", rows)
    if saved[0] is None or saved[1] is None:
        # What torch differentiates runs the forward again with its backward.
        saved = (None, None) if call.launch.backend.autograd else kernel.forward(call.inputs)
    grads = kernel.backward(call.inputs, *saved, upstream, upstream_lse)
    mask = grads.attn_mask
    if mask is not None:  # four axes here, and as many as the caller gave there
        mask = mask[(0,) * (4 - len(call.given[3].shape))]
    q, k, v = (call.back(grad, turned=True) for grad in grads[:3])
    return Gradients(q, k, v, call.back(mask))


def are_of(asked: Request, launch: Launch, query: Any, results: tuple[Any, ...], upstream: tuple[Any, ...]) -> bool:
    """Whether ``results`` are as ``launch.save`` returns them, and ``upstream`` dense gradients of these."""
    p, (out, lse), (grad_out, grad_lse) = launch.problem, results, upstream
    torch: Any = sys.modules["torch"]
    rows = p.batch, p.heads_q, p.seq_q
    shape = (p.batch, p.seq_q, p.heads_q, p.dim_v) if asked.options.layout == "BLHD" else (*rows, p.dim_v)
    try:
        return (
            type(out) is type(lse) is type(grad_out) is torch.Tensor
            and (grad_lse is None or (type(grad_lse) is torch.Tensor and grad_lse.shape == rows))
            and out.shape == grad_out.shape == shape
            and lse.shape == rows
            and out.dtype == grad_out.dtype == query.dtype
            and out.device == grad_out.device == lse.device == query.device
            and lse.dtype == (torch.float64 if p.dtype == "float64" else torch.float32)
            and lse.is_contiguous()
            and grad_out.layout is torch.strided
            and not (out.data_ptr() | lse.data_ptr()) & 15
            and all(x is None or x.data_ptr() for x in (out, lse, grad_out, grad_lse))  # none was freed
        )
    except RuntimeError:  # sparse or nested: no sizes, or no memory of its own
        return False
