"""A Triton launch is prepared once for arrays that lie alike; after that it is given addresses, a seed and no more."""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

triton = pytest.importorskip("triton")

arguments = importlib.import_module("attnswitch.backends.triton.arguments")
config = importlib.import_module("attnswitch.backends.triton.config")
kernel = importlib.import_module("attnswitch.backends.triton.kernel")
launch = importlib.import_module("attnswitch.backends.triton.launch")
run = importlib.import_module("attnswitch.backends.triton.run")
H200 = Device.named("h200")
STREAM = 64


class Compiled:
    """As much of a compiled kernel as a launch asks for: it keeps what it is launched with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[tuple[int, tuple[Any, ...]]] = []
        self.in_public: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def run(self, *arguments: Any) -> None:
        programs, *facts = arguments[:9]
        assert facts == [1, 1, STREAM, self.function, self.packed_metadata, None, None, None]
        self.launched.append((programs, arguments[9:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.in_public.append((grid, arguments))


class JITFunction:
    """As much of a kernel as a launcher asks for: it keeps what it is compiled for."""

    arg_names = ("X", "MASK", "OWN", "sx", "scale", "seed_low", "seed_high", "keep", "how", "FLAG")

    def __init__(self, compiled: Callable[[], Any] = Compiled) -> None:
        self.make = compiled
        self.made: list[Any] = []
        self.first: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **flags: Any) -> Any:
            self.first.append((grid, arguments, flags))
            self.made.append(self.make())
            return self.made[-1]

        return launch


class Interpreted(JITFunction):
    """A kernel that Triton interprets."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is not there: the current device, and Triton's driver of it."""
    driver = triton.runtime.driver
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    before = driver._active
    driver.set_active(SimpleNamespace(get_current_stream=lambda index: STREAM + index))
    yield
    driver.set_active(before)


class Prepared:
    """What a launch passes, and how often that was asked for."""

    def __init__(self, **described: Callable[[Any], Any]) -> None:
        self.described, self.asked = described, 0

    def __call__(self, x: Any, mask: Any, own: Any) -> Any:
        self.asked += 1
        return run.Passed((x.stride(0), 0.5), (2.0,), {"how": "how", "FLAG": True, "num_warps": 8}, self.described)


MEMORY, MASK = torch.zeros(64), torch.zeros(64, dtype=torch.bool)


def launcher(kernel: Any, prepared: Any = None) -> Callable[..., None]:
    made = run.Launcher(kernel, 3, prepared or Prepared(), ("X", "MASK"))

    def start(x: Any = MEMORY, mask: Any = None, own: Any = MEMORY, seed: tuple[int, int] = (1, -2)) -> None:
        made(x, mask, own, seed=seed)

    return start


# -- the same facts ----------------------------------------------------------------------------------------------------


def test_what_lies_alike_is_prepared_once_and_given_addresses() -> None:
    jit, prepared = JITFunction(), Prepared()
    start = launcher(jit, prepared)
    start()
    flags = {"how": "how", "FLAG": True, "num_warps": 8}
    assert jit.first == [((3,), (MEMORY, None, MEMORY, 1, 0.5, 1, -2, 2.0), flags)]
    other, own = torch.zeros(64), torch.zeros(7, dtype=torch.int16)[1:]
    start(other, None, own, seed=(5, 6))
    start(MEMORY, None, own, seed=(7, 8))
    assert (prepared.asked, len(jit.first)) == (1, 1)
    constants = ("how", True)  # in the order of the kernel's arguments, and Triton's own options are none
    assert jit.made[0].launched == [
        (3, (other.data_ptr(), 0, own.data_ptr(), 1, 0.5, 5, 6, 2.0, *constants)),
        (3, (MEMORY.data_ptr(), 0, own.data_ptr(), 1, 0.5, 7, 8, 2.0, *constants)),
    ]


def test_a_bool_mask_is_passed_as_bytes() -> None:
    jit = JITFunction()
    start = launcher(jit)
    start(mask=MASK)
    assert jit.first[0][1][1].dtype == torch.uint8
    start(mask=MASK)
    assert jit.made[0].launched[0][1][1] == jit.first[0][1][1].data_ptr() == MASK.data_ptr()


@pytest.mark.parametrize(
    ("x", "mask"),
    [
        (MEMORY[::2], None),
        (MEMORY[1:], None),  # not aligned to 16 bytes
        (MEMORY.to(torch.bfloat16), None),
        (MEMORY, MASK),
        (MEMORY, MASK[1:]),
    ],
    ids=["strides", "alignment", "type", "an array where there was none", "an array that lies elsewhere"],
)
def test_what_lies_otherwise_is_prepared_anew(x: torch.Tensor, mask: torch.Tensor | None) -> None:
    jit, prepared = JITFunction(), Prepared()
    start = launcher(jit, prepared)
    for _ in range(2):
        start()
        start(x, mask)
    assert (prepared.asked, len(jit.made)) == (2, 2)
    first, second = (compiled.launched for compiled in jit.made)
    assert [arguments[0] for _, arguments in first] == [MEMORY.data_ptr()]
    assert [arguments[0] for _, arguments in second] == [x.data_ptr()]
    assert second[0][1][3] == x.stride(0)


def test_another_gpu_is_prepared_for_and_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class There(SimpleNamespace):
        dtype = torch.float32

        def stride(self, axis: int | None = None) -> Any:
            return (1,) if axis is None else 1

        def data_ptr(self) -> int:
            return 32

        def get_device(self) -> int:
            return int(self.index)

    class OfOne(Compiled):
        def run(self, *arguments: Any) -> None:
            self.launched.append((arguments[3], arguments[9:]))

    jit, prepared = JITFunction(OfOne), Prepared()
    start = launcher(jit, prepared)
    for index in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        start(There(index=index))
    assert prepared.asked == 2
    assert [[stream for stream, _ in compiled.launched] for compiled in jit.made] == [[STREAM], [STREAM + 1]]


def test_the_device_of_the_arrays_is_made_the_current_one() -> None:
    here, there = (SimpleNamespace(is_cuda=True, get_device=lambda at=at: at, device=f"cuda:{at}") for at in (0, 1))
    assert isinstance(launch.on(MEMORY), contextlib.nullcontext)
    assert isinstance(launch.on(here), contextlib.nullcontext)
    assert isinstance(launch.on(there), torch.cuda.device)


def test_too_many_ways_to_lie_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST", 2)
    jit = JITFunction()
    start = launcher(jit)
    for step in (1, 2, 3, 1, 3):
        start(MEMORY[::step])
    assert len(jit.made) == 4
    assert [len(compiled.launched) for compiled in jit.made] == [0, 0, 1, 0]


def test_threads_share_what_is_prepared() -> None:
    jit = JITFunction()
    start = launcher(jit)
    arrays = [torch.zeros(64)[:: 1 + at % 3] for at in range(12)]
    barrier = threading.Barrier(len(arrays))

    def call(x: torch.Tensor) -> None:
        barrier.wait()
        for _ in range(50):
            start(x, None, x, seed=(x.data_ptr(), 0))

    threads = [threading.Thread(target=call, args=(x,)) for x in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = [arguments for compiled in jit.made for _, arguments in compiled.launched]
    assert len(calls) + len(jit.first) == 50 * len(arrays)
    of = {x.data_ptr(): x for x in arrays}
    assert all(call[0] == call[2] == call[5] and call[3] == of[call[0]].stride(0) for call in calls)
    assert all(len(call) == len(jit.arg_names) for call in calls)


# -- other ways to launch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = JITFunction()
    start = launcher(jit)
    start()
    chain = type(getattr(triton.knobs.runtime, name))()
    chain.add(print)
    for hook in (chain, print):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        start()
    chain.remove(print)
    for hook in (chain, None):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        start()
    (compiled,) = jit.made
    grids, arguments = zip(*compiled.in_public, strict=True)
    assert grids == ((3, 1, 1),) * 2
    assert set(arguments) == {found for _, found in compiled.launched}
    assert len(compiled.launched) == 2


def test_without_what_inductor_launches_by_it_is_launched_in_public() -> None:
    class Plain:
        def __init__(self) -> None:
            self.in_public: list[Any] = []

        __getitem__ = Compiled.__getitem__

    jit = JITFunction(Plain)
    start = launcher(jit)
    start()
    start()
    (compiled,) = jit.made
    assert compiled.in_public == [
        ((3, 1, 1), (MEMORY.data_ptr(), 0, MEMORY.data_ptr(), 1, 0.5, 1, -2, 2.0, "how", True))
    ]


def test_what_is_interpreted_is_given_arrays_and_prepared_once() -> None:
    kernel, prepared = Interpreted(), Prepared()
    start = launcher(kernel, prepared)
    for _ in range(3):
        start(mask=MASK)
    assert (prepared.asked, len(kernel.first)) == (1, 3)
    for _, arguments, flags in kernel.first:
        assert arguments[0] is MEMORY
        assert arguments[1].dtype == torch.uint8
        assert flags["num_warps"] == 8


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_a_descriptor_is_of_the_array_of_its_call() -> None:
    descriptors = importlib.import_module("attnswitch.backends.triton.descriptors")
    described = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    x = torch.zeros(2, 3, 64, 40)
    jit = JITFunction()
    start = launcher(jit, Prepared(X=descriptors.describer(x, 32)))
    other = torch.zeros_like(x)
    start(x)
    start(other)
    wanted = [x, other]
    found = [jit.first[0][1][0], jit.made[0].launched[0][1][0]]
    for array, descriptor in zip(wanted, found, strict=True):
        assert descriptor.base is array
        assert descriptor == described(array, [2, 3, 64, 40], [7680, 2560, 40, 1], [1, 1, 32, 64])


def test_nothing_that_is_prepared_keeps_an_array() -> None:
    p = Problem.parse("b1.h4.s1024.d64.bf16")
    made = kernel.TritonKernel(p, H200, next(config.configs(p, H200)))
    with recorded() as found:
        inputs = operands(p)
        made.forward(inputs)
        watched = [weakref.ref(x) for x in inputs[:3]]
        del inputs
        gc.collect()
        assert names(found) == ["forward", "merge"]
        assert [reference() for reference in watched] == [None, None, None]


# -- a problem's launches ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, Compiled]]]:
    """The kernels that are launched for the first time, and what stands for each where it was compiled."""
    found: list[tuple[Any, Compiled]] = []

    def start(kernel: Any, programs: int, *arguments: Any, **flags: Any) -> Any:
        found.append((kernel, Compiled()))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "start", start)
        yield found


def names(found: list[tuple[Any, Compiled]]) -> list[str]:
    return [kernel.__name__ for kernel, _ in found]


def operands(p: Problem, seed: int | None = None) -> Inputs:
    dtype = getattr(torch, p.dtype)
    rows = (p.batch, p.heads_q, p.seq_q), (p.batch, p.heads_kv, p.seq_k)
    mask = torch.zeros(p.mask_shape, dtype=getattr(torch, p.mask.dtype)) if p.mask and p.mask_shape else None
    return Inputs(
        torch.zeros(*rows[0], p.dim_qk, dtype=dtype),
        torch.zeros(*rows[1], p.dim_qk, dtype=dtype),
        torch.zeros(*rows[1], p.dim_v, dtype=dtype),
        mask,
        torch.zeros(p.batch, dtype=torch.int32) if p.key_lengths else None,
        seed,
    )


BACKWARD = ["prepare", "query_gradient", "key_gradients"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("b2.h2.s64.d64.bf16", ["forward"]),
        ("b1.h8/2.s1x8192.d64.bf16.dropout=0.5", ["forward", "merge"]),
        ("b2.h2.s64.d64.bf16.mask=bool", ["classify", "forward"]),
        ("b4.h4.s512.d64.bf16.grad", ["forward", *BACKWARD]),
        (
            "b2.h2.s64.d64.bf16.mask=bf16:k.lengths.dropout=0.5.grad=m",
            ["classify", "forward", "prepare", "mask_gradient"],
        ),
    ],
)
def test_a_second_call_computes_nothing_anew(text: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes its own arrays, under the names that the kernels have for them, and its own seed."""
    p = Problem.parse(text)
    made = kernel.TritonKernel(p, H200, next(config.configs(p, H200)))

    def call(seed: int | None) -> dict[str, Any]:
        inputs = operands(p, seed if p.dropout else None)
        results = made.forward(inputs)
        held = dict(zip(("Q", "K", "V", "MASK", "LENGTHS", "OUT", "LSE"), (*inputs[:5], *results), strict=True))
        if p.grads:
            held["DO"] = torch.zeros_like(results[0])
            grads = made.backward(inputs, *results, held["DO"], None)
            held |= zip(("DQ", "DK", "DV", "DMASK"), grads, strict=True)
        return held

    with recorded() as found:
        call(1)
        assert names(found) == wanted
        for module in (launch, run):  # whatever works something out from the problem or its arrays
            for name in ("variant", "options", "position", "scaling", "suits", "wide", "Passed", "describer"):
                monkeypatch.setattr(module, name, None, raising=False)
        calls = [(call(seed), words) for seed, words in ((2**63 + 5, (5, -(2**31))), (3, (3, 0)))]
    assert names(found) == wanted
    for at, (held, words) in enumerate(calls):
        for jit, compiled in found:
            passed = dict(zip(jit.arg_names, compiled.launched[at][1], strict=True))
            for name in held.keys() & passed.keys():
                if name in ("OUT", "LSE") and jit.__name__ == "forward" and "merge" in wanted:
                    continue
                array, given = held[name], passed[name]
                at_array = getattr(given, "base", given) is array if array is not None else given == 0
                assert at_array or given == array.data_ptr(), name
            if p.dropout and "seed_low" in passed:
                assert (passed["seed_low"], passed["seed_high"]) == words


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides, 4 bytes behind a multiple of 16."""
    moved = torch.zeros(x.numel() + 4, dtype=x.dtype)[4 // x.element_size() :][: x.numel()].view(x.shape)
    assert moved.data_ptr() % 16 == 4
    return moved.copy_(x)


CASE = Problem.parse("b2.h2.s64.d64.fp32.mask=fp32:hk.lengths.grad=qkvm")


@pytest.mark.parametrize(
    "role", ["query", "key", "value", "attn_mask", "key_lengths", "out", "grad_out", "lse", "grad_lse"]
)
def test_every_array_from_outside_is_looked_at(role: str) -> None:
    """Each launch that takes an array is compiled anew for one that lies at another multiple of 4 bytes.

    But for an upstream gradient and a mask, which are copied to where others lie.
    """
    made = kernel.TritonKernel(CASE, H200, next(config.configs(CASE, H200)))
    every = [
        "classify",
        "forward",
        "prepare",
        "classify",
        "query_gradient",
        "classify",
        "key_gradients",
        "mask_gradient",
    ]
    gradients = ["query_gradient", "key_gradients", "mask_gradient"]
    masked = [name for name in every if name != "prepare"]
    wanted = {"attn_mask": [], "key_lengths": masked, "grad_out": []}
    wanted |= {role: ["forward", *gradients] for role in ("query", "key", "value")}

    def call(**changes: Any) -> None:
        inputs = operands(CASE)
        inputs = inputs._replace(
            **{name: change(getattr(inputs, name)) for name, change in changes.items() if name in inputs._fields}
        )
        made.forward(inputs)
        shape = (CASE.batch, CASE.heads_q, CASE.seq_q)
        rest = {"out": torch.zeros(*shape, CASE.dim_v), "lse": torch.zeros(shape)}
        rest |= {"grad_out": torch.zeros(*shape, CASE.dim_v), "grad_lse": torch.zeros(shape)}
        made.backward(inputs, *(changes.get(name, lambda x: x)(x) for name, x in rest.items()))

    with recorded() as found:
        call()
        assert names(found) == every
        call(**{role: shifted})
        assert names(found)[len(every) :] == wanted.get(role, ["prepare"])
        known = len(found)
        call()
        call(**{role: shifted})
    assert len(found) == known


def test_what_the_kernels_make_for_themselves_has_one_type() -> None:
    """Nothing looks at it again, whatever type the lse of a call has."""
    prepare = launch.Prepare(CASE)
    out, lse = torch.zeros(2, 2, 64, 64), torch.zeros(2, 2, 64, dtype=torch.float64)
    with recorded():
        saved = prepare(out, lse, out, None)
    assert (saved.base.dtype, saved.delta.dtype) == (torch.float32, torch.float32)


def test_strides_of_axes_of_length_one_mean_nothing() -> None:
    x = torch.empty_strided((1, 2, 1, 8), (99990001, 8, 2**40, 1), device="meta")
    assert arguments.strides(x) == (0, 8, 0, 1)
    assert not arguments.wide(config.Tile(64, 64, 4, 3), x, None)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 0, 3, 4), (2, 3, 0), (5,)], ids=str)
def test_results_have_the_strides_that_torch_gives(shape: tuple[int, ...]) -> None:
    arguments = importlib.import_module("attnswitch.backends.triton.arguments")
    made = MEMORY.new_empty_strided(*arguments.dense(*shape))
    assert (made.shape, made.stride()) == (shape, torch.empty(shape).stride())


def test_offsets_past_32_bits_are_prepared_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays without memory, one whose rows lie far apart."""
    p = Problem.parse("b1.h2.s64.d64.bf16")
    made = kernel.TritonKernel(p, H200, next(config.configs(p, H200)))
    wide: list[bool] = []
    monkeypatch.setattr(run, "start", lambda *_, how, **__: wide.append(how.wide))
    for step in (64, 2**26):
        x = torch.empty_strided((1, 2, 64, 64), (8192, 4096, step, 1), dtype=torch.bfloat16, device="meta")
        made.forward(Inputs(x, x, x))
    assert wide == [False, True]


def test_a_mask_that_no_longer_lies_in_words_is_read_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Problem.parse("b2.h2.s64.d64.bf16.mask=bool")
    tiles = importlib.import_module("attnswitch.backends.triton.tiles")
    listing = tiles.Listing(p, H200, 32, 32)
    memory = torch.zeros(65 * 64 * 2, dtype=torch.bool)
    words: list[bool] = []
    monkeypatch.setattr(run, "start", lambda *_, **flags: words.append(flags["WORDS"]))
    for at, step in ((0, 64), (1, 64), (4, 64), (0, 65)):
        listing(memory[at:].as_strided((1, 1, 64, 64), (4096, 4096, step, 1)), None)
    assert words == [True, False, True, False]


KERNELS_OF = {
    "forward": ("forward", "merge"),
    "backward": ("prepare", "query_gradient", "key_gradients"),
    "lists": ("classify",),
    "mask_gradient": ("mask_gradient",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in KERNELS_OF.items() for name in names])
def test_a_seed_is_not_compiled_for(module: str, name: str) -> None:
    """Triton looks at every integer argument but those that it is told to leave: what changes alone must be left."""
    found = getattr(importlib.import_module(f"attnswitch.backends.triton.kernels.{module}"), name)
    assert {"seed_low", "seed_high"} & set(found.arg_names) <= set(found.do_not_specialize)
