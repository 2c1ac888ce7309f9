"""The one place where a Triton kernel is launched.

``kernel[grid](...)`` looks at every argument to find what to compile for: with fifty of them that takes longer than a
small attention. But all that it finds, and every size and stride that it passes on, follows from the problem and from
how the arrays lie. A launch is therefore prepared once for arrays that lie alike, and is given addresses after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .arguments import as_bytes

__all__ = ["Launcher", "Passed", "start"]

#: Ways to lie that one launcher remembers; beyond, it forgets them all, and Triton's own cache still has the kernels.
_MOST = 256


class Passed(NamedTuple):
    """What a launch passes beside its arrays, in the order of the kernel's arguments: up to the seed, and behind it."""

    before: tuple[float, ...]
    after: tuple[Any, ...]
    #: What the kernel is compiled for, and Triton's own options.
    flags: dict[str, Any]
    #: What makes descriptors of arrays, by the names of those that are passed so.
    described: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})


class Launcher:
    """Launches ``programs`` programs of ``kernel``; ``passed`` says what goes along with arrays that lie as its own.

    ``foreign`` names the arrays that may lie otherwise from call to call. The others were made for the launch.
    """

    def __init__(
        self, kernel: Any, programs: int, passed: Callable[..., Passed], foreign: tuple[str, ...] = ()
    ) -> None:
        self._kernel, self._programs, self._passed = kernel, programs, passed
        self._foreign = tuple(kernel.arg_names.index(name) for name in foreign)
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}

    def __call__(self, *arrays: Any, seed: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the arrays' device, which is the current one; None stands for no array."""
        given = [0 if x is None else x.data_ptr() for x in arrays]
        lie = (
            arrays[0].get_device(),
            *[None if (x := arrays[at]) is None else (x.dtype, x.stride(), given[at] & 15) for at in self._foreign],
        )
        launch = self._prepared.get(lie)
        if launch is None:
            launch = _Prepared(self._kernel, self._programs, self._passed(*arrays))
            if len(self._prepared) >= _MOST:
                self._prepared.clear()
            self._prepared[lie] = launch
        launch(arrays, given, seed)


class _Prepared:
    """A launch with all that it passes, but for addresses and seed."""

    __slots__ = ("_after", "_before", "_described", "_flags", "_kernel", "_launch", "_programs")

    def __init__(self, kernel: Any, programs: int, passed: Passed) -> None:
        self._kernel, self._programs = kernel, programs
        self._before, self._after, self._flags, described = passed
        self._described = tuple((kernel.arg_names.index(name), made) for name, made in described.items())
        self._launch: Callable[[Sequence[Any]], None] | None = None

    def __call__(self, arrays: Sequence[Any], given: list[Any], seed: tuple[int, ...]) -> None:
        """Launch it with ``arrays``, whose addresses are ``given``."""
        launch = self._launch
        if launch is None:  # the first, or one of those where nothing is compiled
            given = [as_bytes(array) for array in arrays]
        for at, made in self._described:
            given[at] = made(arrays[at])
        arguments = (*given, *self._before, *seed, *self._after)
        if launch is not None:
            launch(arguments)
            return
        compiled = start(self._kernel, self._programs, *arguments, **self._flags)
        if compiled is not None:
            constants = tuple(self._flags[name] for name in self._kernel.arg_names[len(arguments) :])
            self._launch = _launch_of(compiled, self._programs, constants)


def start(kernel: Any, programs: int, *arguments: Any, **flags: Any) -> Any:
    """Launch a kernel by its arguments; what Triton compiled for them, None where it interprets."""
    compiled = kernel[(programs,)](*arguments, **flags)
    return compiled if type(kernel).__name__ == "JITFunction" else None


def _launch_of(compiled: Any, programs: int, constants: tuple[Any, ...]) -> Callable[[Sequence[Any]], None]:
    """How a compiled kernel is launched on the current device: as torch's Inductor does, where it has what that takes.

    Triton's public way makes an account of each launch for its hooks, set or not. ``constants`` are what the kernel is
    compiled for: no launch reads them, and each passes them.
    """
    from triton import knobs
    from triton.runtime import driver

    grid = (programs, 1, 1)
    device, stream = torch.cuda.current_device(), driver.active.get_current_stream
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return lambda arguments: compiled[grid](*arguments, *constants)

    def launch(arguments: Sequence[Any]) -> None:
        if _set(knobs.runtime.launch_enter_hook) or _set(knobs.runtime.launch_exit_hook):  # by a profiler
            compiled[grid](*arguments, *constants)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *arguments, *constants)

    return launch


def _set(hook: Any) -> Any:
    return getattr(hook, "calls", hook)
