"""From arrays of any library to results by a launch: of calls that are more than operands which lie as before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.call.describe import lengths_beside
from attnswitch.call.launch import Launch, Request, lie_of, straight
from attnswitch.call.seeds import drawn_seed
from attnswitch.machine.backend import Inputs
from attnswitch.machine.inputs import heads_last

__all__ = ["caller_of", "inputs_of", "run", "run_prepared", "to_caller", "to_native"]


def run(
    asked: Request,
    launch: Launch,
    operands: Sequence[Array],
    given: Sequence[Array],
    key_lengths: Any,
    seed: int | None,
) -> tuple[Array, Array | None]:
    """Output and lse of any call; ``given`` are its ``operands`` as arrays of NumPy, CuPy or torch."""
    backend, kernel, problem = launch.backend, launch.kernel, launch.problem
    library = arrays.library_of(given[0])
    if launch.draws:
        seed = drawn_seed(given[0])
    inputs = inputs_of(asked, launch, given, key_lengths, seed)
    native = backend.native(library)
    if problem.grads and not backend.autograd:
        out, lse = import_module("attnswitch.call.autograd").differentiable(problem, kernel, inputs, native)
        native = "torch"
    else:
        out, lse = kernel.forward(to_native(inputs, library, native))
    caller = caller_of(launch, operands)
    if asked.options.layout == "BLHD":
        out = heads_last(out, inputs.query)
    return to_caller(out, native, library, caller), to_caller(lse, native, library, caller)


def run_prepared(
    asked: Request,
    launch: Launch,
    operands: Sequence[Array],
    given: Sequence[Array],
    key_lengths: Any,
    seed: int | None,
) -> tuple[Array, Array | None]:
    """The same by what the launch prepared; lengths that lie otherwise than its first ones take the way of any call."""
    lengths = None
    if key_lengths is not None:
        torch: Any = sys.modules["torch"]
        lengths = key_lengths
        if not (type(lengths) is torch.Tensor and lengths.is_cuda and lie_of(lengths) == launch.lengths_lie):
            assert launch.facts[0] is not None
            lengths = lengths_beside(key_lengths, launch.facts[0], launch.problem.seq_k)
            if lie_of(lengths) != launch.lengths_lie:
                return run(asked, launch, operands, given, key_lengths, seed)
    if not launch.problem.seeded:  # one that was given has no use without dropout
        seed = drawn_seed(given[0]) if launch.draws else None
    assert launch.run is not None
    return launch.run(*given[:3], given[3] if len(given) > 3 else None, lengths, seed)


def caller_of(launch: Launch, operands: Sequence[Array]) -> Array | None:
    """An array of the caller's library, where that is known by DLPack alone."""
    assert launch.facts[0] is not None
    return operands[0] if launch.facts[0].by_dlpack else None


def inputs_of(asked: Request, launch: Launch, given: Sequence[Array], key_lengths: Any, seed: int | None) -> Inputs:
    """Operands in (B, H, L, D) order, the mask with four axes, and the lengths beside them."""
    lengths = None
    if key_lengths is not None:
        first = launch.facts[0]
        assert first is not None
        lengths = lengths_beside(key_lengths, first, launch.problem.seq_k)
    inputs = straight(given, asked.options.layout == "BLHD")
    return inputs._replace(key_lengths=lengths, seed=seed)


def to_native(inputs: Inputs, library: str, native: str) -> Inputs:
    """Inputs as arrays of the backend's library ``native``, over the same memory."""
    return inputs if native == library else inputs.map(lambda array: arrays.passage(array, library, native))


def to_caller(array: Array, native: str, library: str, caller: Array | None) -> Array:
    """A result as an array of the caller's library: that of ``caller``, where it is known by DLPack alone."""
    if array is None:
        return None
    array = arrays.passage(array, native, library)
    return array if caller is None else arrays.passage(array, "torch", "dlpack", caller)
