"""The one place where a Triton kernel is launched.

``kernel[grid](...)`` looks at every argument to find what to compile for: with fifty of them that takes longer than a
small attention. What a call was compiled for is therefore remembered by the sizes and strides themselves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

__all__ = ["start"]

#: Arguments that differ from call to call and never change what is compiled.
_NUMBERS = frozenset(("unit", "scale", "factor", "cap", "seed_low", "seed_high", "threshold", "keep_scale"))
#: Most compiled kernels that are remembered; beyond, all are forgotten, and Triton's own cache still has them.
_MOST = 8192


class _Built(NamedTuple):
    compiled: Any
    #: What the kernel is compiled for, which a launch passes too, and no launch reads.
    constants: tuple[Any, ...]


_BUILT: dict[tuple[Any, ...], _Built] = {}


def start(kernel: Any, programs: int, *arguments: Any, **flags: Any) -> None:
    """Launch ``programs`` programs of ``kernel`` on the current stream of the current device."""
    if type(kernel).__name__ != "JITFunction":  # the interpreter's
        kernel[(programs,)](*arguments, **flags)
        return
    arrays, sizes = _parts(kernel)
    key = (
        id(kernel),
        torch.cuda.current_device(),
        *(_kind(array) for array in arguments[:arrays]),
        arguments[arrays:sizes],
        tuple(flags.values()),
    )
    built = _BUILT.get(key)
    if built is not None:
        built.compiled[(programs, 1, 1)](*arguments, *built.constants)
        return
    compiled = kernel[(programs,)](*arguments, **flags)
    if len(_BUILT) >= _MOST:
        _BUILT.clear()
    _BUILT[key] = _Built(compiled, tuple(flags[name] for name in kernel.arg_names[len(arguments) :]))


@functools.cache
def _parts(kernel: Any) -> tuple[int, int]:
    """How many of the arguments are arrays, and where the sizes and strides behind them end."""
    names = kernel.arg_names
    arrays = next(at for at, name in enumerate(names) if not name.isupper())
    sizes = next((at for at, name in enumerate(names) if name in _NUMBERS or (at > arrays and name.isupper())))
    return arrays, sizes


def _kind(array: Any) -> Any:
    """What a kernel is compiled for: the array's type, whether its address suits wide loads, a descriptor's tile."""
    if array is None:
        return None
    if isinstance(array, torch.Tensor):
        return array.dtype, array.data_ptr() % 16 == 0
    return array.base.dtype, tuple(array.block_shape)
