"""The one place where a Triton kernel is compiled and launched.

Triton's own ``kernel[grid](...)`` looks at every argument of every call to find what to compile for: with fifty of them
that takes longer than a small attention. Here that follows from the problem and from how the arrays lie, so a launch is
prepared once for arrays that lie alike, and is given addresses after that. What it is compiled for is decided here too
(see ``_kinds``), and launches that agree in it share one compiled kernel, whatever problems they belong to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime import driver
from triton.runtime.jit import mangle_type

from attnswitch.machine.builds import Build

from .arguments import as_bytes, words
from .kernels.parameters import Dims, Steps, Strides

__all__ = ["Launch", "Passed", "as_passed", "builds", "source"]

#: Triton's own options, which are no parameters of a kernel.
_OPTIONS = frozenset(("num_warps", "num_stages", "maxnreg", "launch_pdl"))
#: Structs whose numbers are compiled for: those that are 1, and those that are multiples of 16.
_COMPILED_FOR = frozenset((Dims, Steps, Strides))
_POINTERS = {
    torch.bool: "*u8",  # the same memory, in a type whose loads mean the same in every version of Triton
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    **{getattr(torch, f"float{bits}"): f"*fp{bits}" for bits in (16, 32, 64)},
    **{getattr(torch, f"{sign}int{bits}"): f"*{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
#: Arrays of integers that are read by words of 32 bits, one or two each, so that one kernel serves both.
_IN_WORDS = frozenset(("LENGTHS", "CU_Q", "CU_K"))
#: Which of ``Steps`` is from column to column.
_COLUMN = Steps._fields.index("d")
_DIVISIBLE = [["tt.divisibility", 16]]

_INTERPRETED = knobs.runtime.interpret

#: Compiled kernels by all that they were compiled for; one that nothing holds is unloaded.
_compiled: dict[tuple[Any, ...], Any] = {}


class Passed(NamedTuple):
    """What a launch passes beside its arrays, in the order of the kernel's parameters; with a seed, ``Random`` last."""

    values: tuple[Any, ...]
    #: What the kernel is compiled for, by name, and Triton's own options.
    flags: dict[str, Any]
    #: What makes descriptors of arrays, by the names of those that are passed so.
    described: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})
    #: Compiled for no numbers but the steps of 1 from column to column.
    generic: bool = False


class Launch:
    """Launches ``programs`` programs of ``kernel`` with arrays that all lie as those of its first call.

    ``passed`` says what goes along with them. The device is the one that is current at that call.
    """

    __slots__ = ("_kernel", "_passed", "_programs", "_start")

    def __init__(self, kernel: Any, programs: int, passed: Callable[..., Passed]) -> None:
        self._kernel, self._programs, self._passed = kernel, programs, passed
        self._start: Callable[[Sequence[Any], int | None], object] | None = None

    def __call__(self, *arrays: Any, seed: int | None = None) -> None:
        """Launch it on the current stream; None stands for no array."""
        start = self._start
        if start is None:
            start = self._start = _starter(self._kernel, self._programs, arrays, self._passed(*arrays))
        start(arrays, seed)


def source(kernel: Any, arrays: Sequence[Any], passed: Passed) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles for a launch, and its options. ``arrays`` may be descriptors, and need no memory."""
    flags, generic = passed.flags, passed.generic
    names = kernel.arg_names
    types: list[Any] = []
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, array in enumerate(arrays):
        if array is None:
            types.append("constexpr")
            constants[at,] = None
        elif names[at] in _IN_WORDS:
            types.append("*i32")
        else:
            types.append(_POINTERS.get(getattr(array, "dtype", None)) or mangle_type(array))
            if types[-1][0] == "*" and _aligned(array, names[at], generic):
                attributes[at,] = _DIVISIBLE

    columns = {path for path, _ in _columns(passed.values, len(types))} if generic else ()

    def typed(value: Any, path: tuple[int, ...], compiled_for: bool) -> Any:
        if isinstance(value, tuple):
            compiled_for = compiled_for or type(value) in _COMPILED_FOR
            return type(value)(*(typed(x, (*path, at), compiled_for) for at, x in enumerate(value)))
        kind = _kind(value, path in columns if generic else compiled_for)
        if kind == 1:
            constants[path] = 1
            return "constexpr"
        if kind.endswith("D"):
            attributes[path] = _DIVISIBLE
        return kind.removesuffix("D")

    types += [typed(value, (at,), False) for at, value in enumerate(passed.values, len(types))]
    for at, name in enumerate(names[len(types) :], len(types)):
        types.append("constexpr")
        constants[at,] = flags[name]
    options = {name: value for name, value in flags.items() if name in _OPTIONS}
    options["enable_fp_fusion"] = True  # Triton's own choice up to 3.9
    return ASTSource(kernel, dict(zip(names, types, strict=True)), constants, attributes), options


def _aligned(array: Any, name: str, generic: bool) -> bool:
    """Whether a kernel is compiled for an array that begins at a multiple of 16 bytes; masks begin anywhere."""
    return array.data_ptr() % 16 == 0 and not (generic and name == "MASK")


def _kind(value: Any, compiled_for: bool) -> Any:
    """The type of a number, with a D for a multiple of 16 if it is compiled for; 1 for itself."""
    if type(value) is float:
        return "fp32"
    if compiled_for and value == 1:
        return 1
    size = "i32" if -(2**31) <= value < 2**31 else "i64"
    return size + "D" if compiled_for and value % 16 == 0 else size


def _kinds(passed: Passed) -> list[Any]:
    """What tells apart the values of launches of one kernel that are compiled differently."""
    fixed: list[int] = []
    free: list[Any] = []
    if passed.generic:
        fixed += (step for _, step in _columns(passed.values))
        free += _leaves(passed.values)
    else:
        for value in passed.values:
            if type(value) is Strides:
                for steps in value:
                    fixed += steps
            elif type(value) in _COMPILED_FOR:
                fixed += value
            elif isinstance(value, tuple):
                free += value
            else:
                free.append(value)
    if min(min(fixed), min(free)) >= -(2**31) and max(max(fixed), max(free)) < 2**31:
        return [1 if n == 1 else n % 16 == 0 and 16 for n in fixed]
    return [_kind(n, True) for n in fixed] + [_kind(n, False) for n in free]


def _columns(values: tuple[Any, ...], first: int = 0) -> Iterator[tuple[tuple[int, ...], int]]:
    """The steps from column to column of all arrays but masks, and where they stand among parameters from ``first`` on.

    Generic kernels are compiled for these alone.
    """
    for at, value in enumerate(values, first):
        if type(value) is Strides:
            yield from (((at, n, _COLUMN), value[n].d) for n, role in enumerate(value._fields) if role != "m")
        elif type(value) is Steps:
            yield (at, _COLUMN), value.d


def _starter(
    kernel: Any, programs: int, arrays: Sequence[Any], passed: Passed
) -> Callable[[Sequence[Any], int | None], object]:
    """What launches ``kernel`` with arrays that lie as ``arrays``, and a seed."""
    values, flags, described, _ = passed
    if _INTERPRETED:
        return _interpreter(kernel, programs, values, flags)
    device = torch.cuda.current_device()
    key = _key(kernel, arrays, passed, device)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _build(kernel, arrays, passed, driver.active.get_current_target())
    descriptors = [(kernel.arg_names.index(name), made) for name, made in described.items()]
    constants = tuple(flags[name] for name in kernel.arg_names[len(arrays) + len(values) :])
    return _launcher(compiled, programs, device, descriptors, _leaves(values), constants)


def builds(launches: Iterable[tuple[Any, Sequence[Any], Passed]]) -> list[Build]:
    """What compiles kernels for such launches on the current device, if they are not compiled: kernel, arrays, passed.

    The arrays need no memory.
    """
    if _INTERPRETED or not torch.cuda.is_available():
        return []
    device, target = torch.cuda.current_device(), driver.active.get_current_target()
    new = {_key(kernel, arrays, passed, device): (kernel, arrays, passed) for kernel, arrays, passed in launches}

    def built(key: tuple[Any, ...]) -> None:
        _compiled[key] = _build(*new[key], target)

    return [functools.partial(built, key) for key in new if key not in _compiled]


def as_passed(kernel: Any, arrays: Sequence[Any], passed: Passed) -> tuple[Any, ...]:
    """The arrays of a launch as its kernel takes them: some by descriptors."""
    names = zip(kernel.arg_names, arrays, strict=False)
    return tuple(passed.described[name](array) if name in passed.described else array for name, array in names)


def _key(kernel: Any, arrays: Sequence[Any], passed: Passed, device: int) -> tuple[Any, ...]:
    """What tells apart launches that are compiled differently."""
    names = zip(arrays, kernel.arg_names, strict=False)
    lie = [
        x is not None if name in _IN_WORDS or x is None else (x.dtype, _aligned(x, name, passed.generic))
        for x, name in names
    ]
    return id(kernel), device, *passed.flags.values(), *passed.described, *lie, *_kinds(passed)


def _interpreter(
    kernel: Any, programs: int, values: tuple[Any, ...], flags: dict[str, Any]
) -> Callable[[Sequence[Any], int | None], object]:
    def start(arrays: Sequence[Any], seed: int | None) -> None:
        given = values
        if seed is not None:
            low, high = words(seed)
            given = *values[:-1], values[-1]._replace(seed_low=low, seed_high=high)
        kernel[programs,](*map(_as_read, kernel.arg_names, _of_whole_memory(arrays)), *given, **flags)

    return start


def _of_whole_memory(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, those whose memory begins at one place with as much of it.

    The interpreter copies memory to and fro, and knows it by where it begins. Values that are the first columns of the
    keys, as NumPy has them, end before these do.
    """
    longest: dict[int, Any] = {}
    for array in arrays:
        if array is not None:
            memory = array.untyped_storage()
            longest[memory.data_ptr()] = max(memory, longest.get(memory.data_ptr(), memory), key=len)
    return [None if array is None else _within(longest, array) for array in arrays]


def _within(longest: Mapping[int, Any], array: Any) -> Any:
    own = array.untyped_storage()
    memory = longest[own.data_ptr()]
    if len(memory) == len(own):
        return array
    return array.new_empty(0).set_(memory, array.storage_offset(), array.shape, array.stride())


def _as_read(name: str, array: Any) -> Any:
    """The array ``name`` in the type that a kernel is compiled for: the same memory."""
    if name in _IN_WORDS and array is not None:  # of which a single one may have any stride
        return array.as_strided(array.shape, (1,)).view(torch.int32)
    return as_bytes(array)


def _build(kernel: Any, arrays: Sequence[Any], passed: Passed, target: Any) -> Any:
    """The kernel of a launch, compiled for ``target``, to be launched with the leaves of its structs.

    Triton's launcher takes structs apart at every launch: 5 us on a host that takes 0.9 to pass their leaves (3.6).
    """
    whole, options = source(kernel, as_passed(kernel, arrays, passed), passed)
    compiled = compile_source(whole, target=target, options=options)
    types = _leaves(tuple(whole.signature.values()))
    compiled.src = ASTSource(kernel, {str(at): kind for at, kind in enumerate(types)})
    return compiled


def _leaves(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What structs hold, one after the other."""
    leaves: list[Any] = []
    for value in values:
        leaves += _leaves(value) if isinstance(value, tuple) else (value,)
    return tuple(leaves)


def _launcher(
    compiled: Any,
    programs: int,
    device: int,
    descriptors: Sequence[tuple[int, Callable[[Any], Any]]],
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
) -> Callable[[Sequence[Any], int | None], object]:
    """How a compiled kernel is launched: as torch's Inductor does.

    Triton's public way makes an account of each launch for its hooks, set or not. ``constants`` are what the kernel is
    compiled for: no launch reads them, and each passes them.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream, hooks = driver.active.get_current_stream, knobs.runtime
    unseeded = *numbers, *constants

    def start(arrays: Sequence[Any], seed: int | None) -> None:
        given = [0 if x is None else x.data_ptr() for x in arrays]
        for at, made in descriptors:
            given[at] = made(arrays[at])
        rest = unseeded
        if seed is not None:  # ``Random`` is the last struct
            rest = *numbers[:-4], *words(seed), *numbers[-2:], *constants
        if _set(hooks.launch_enter_hook) or _set(hooks.launch_exit_hook):  # by a profiler
            compiled[programs, 1, 1](*given, *rest)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *given, *rest)

    return start


def _set(hook: Any) -> Any:
    return getattr(hook, "calls", hook)
