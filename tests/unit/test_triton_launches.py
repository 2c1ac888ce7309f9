"""A Triton launch is prepared once for arrays that lie alike; after that it is given addresses, a seed and no more."""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from calls_alike import given, inputs_of, order_of

from attnswitch import Problem
from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.machine.device import Device

triton = pytest.importorskip("triton", "3.6")

ahead = importlib.import_module("attnswitch.backends.triton.ahead")
arguments = importlib.import_module("attnswitch.backends.triton.arguments")
config = importlib.import_module("attnswitch.backends.triton.config")
kernel = importlib.import_module("attnswitch.backends.triton.kernel")
launch = importlib.import_module("attnswitch.backends.triton.launch")
parameters = importlib.import_module("attnswitch.backends.triton.kernels.parameters")
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
        assert facts == [1, 1, STREAM + torch.cuda.current_device(), self.function, self.packed_metadata, *[None] * 3]
        self.launched.append((programs, arguments[9:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.in_public.append((grid, arguments))


class Built(NamedTuple):
    """What a launch is compiled for, and what stands for the compiled kernel."""

    kernel: Any
    arrays: Sequence[Any]
    values: tuple[Any, ...]
    flags: dict[str, Any]
    compiled: Compiled


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Built]]:
    """What is compiled, on a GPU that is not there: the current device, and Triton's driver of it."""
    made: list[Built] = []

    def build(kernel: Any, arrays: Sequence[Any], passed: Any, target: str) -> Compiled:
        assert target == "target"
        made.append(Built(kernel, run.as_passed(kernel, arrays, passed), passed.values, passed.flags, Compiled()))
        return made[-1].compiled

    monkeypatch.setattr(run, "_build", build)
    monkeypatch.setattr(run, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(
        SimpleNamespace(get_current_stream=lambda index: STREAM + index, get_current_target=lambda: "target")
    )
    yield made
    driver.set_active(before)


class Kernel:
    """As much of a kernel as a launch asks for."""

    __name__ = "kernel"
    arg_names = ("X", "MASK", "OWN", "by", "section", "random", "how", "FLAG")

    def __init__(self) -> None:
        self.interpreted: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **flags: self.interpreted.append((grid, arguments, flags))


class Asked:
    """What a launch passes, and how often that was asked for."""

    def __init__(self, section: int = 5, **described: Callable[[Any], Any]) -> None:
        self.section, self.described, self.asked = section, described, 0

    def __call__(self, x: Any, mask: Any, own: Any) -> Any:
        self.asked += 1
        values = parameters.Steps(x.stride(0), 0, 0, 1), self.section, RANDOM
        return run.Passed(values, {"how": "how", "FLAG": True, "num_warps": 8}, self.described)


RANDOM = parameters.Random(0, 0, 9, 2.0)
MEMORY, MASK = torch.zeros(64), torch.zeros(64, dtype=torch.bool)
KERNEL = Kernel()


# -- one launch --------------------------------------------------------------------------------------------------------


def test_it_is_prepared_once_and_given_addresses(built: list[Built]) -> None:
    asked = Asked()
    start = run.Launch(KERNEL, 3, asked)
    other, own = torch.zeros(64), torch.zeros(7, dtype=torch.int16)
    start(MEMORY, None, own)
    start(other, None, own, seed=2**63 + 5)
    assert (asked.asked, len(built)) == (1, 1)
    steps = 1, 0, 0, 1  # structs are taken apart
    constants = ("how", True)  # in the order of the kernel's parameters, and Triton's own options are none
    assert built[0].compiled.launched == [
        (3, (MEMORY.data_ptr(), 0, own.data_ptr(), *steps, 5, *RANDOM, *constants)),
        (3, (other.data_ptr(), 0, own.data_ptr(), *steps, 5, 5, -(2**31), 9, 2.0, *constants)),
    ]


def test_what_is_interpreted_is_given_arrays(built: list[Built], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_INTERPRETED", True)
    jit, asked = Kernel(), Asked()
    start = run.Launch(jit, 3, asked)
    for _ in range(3):
        start(MEMORY, MASK, MEMORY)
    assert (asked.asked, len(jit.interpreted), built) == (1, 3, [])
    for grid, (x, mask, *_), flags in jit.interpreted:
        assert grid == (3,)
        assert x is MEMORY
        assert mask.dtype == torch.uint8
        assert flags == {"how": "how", "FLAG": True, "num_warps": 8}


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_launches(name: str, built: list[Built], monkeypatch: pytest.MonkeyPatch) -> None:
    start = run.Launch(KERNEL, 3, Asked())
    start(MEMORY, None, MEMORY)
    chain = type(getattr(triton.knobs.runtime, name))()
    chain.add(print)
    for hook in (chain, print):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        start(MEMORY, None, MEMORY)
    chain.remove(print)
    for hook in (chain, None):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        start(MEMORY, None, MEMORY)
    compiled = built[0].compiled
    grids, arguments = zip(*compiled.in_public, strict=True)
    assert grids == ((3, 1, 1),) * 2
    assert set(arguments) == {passed for _, passed in compiled.launched}
    assert len(compiled.launched) == 3


def test_a_descriptor_is_of_the_array_of_its_call(built: list[Built]) -> None:
    descriptors = importlib.import_module("attnswitch.backends.triton.descriptors")
    described = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    x = torch.zeros(2, 3, 64, 40)
    other = torch.zeros_like(x)
    start = run.Launch(KERNEL, 3, Asked(X=descriptors.describer(x, 32)))
    start(x, None, MEMORY)
    start(other, None, MEMORY)
    passed = [arguments[0] for _, arguments in built[0].compiled.launched]
    for array, descriptor in zip([x, x, other], [built[0].arrays[0], *passed], strict=True):
        assert descriptor.base is array
        assert descriptor == described(array, [2, 3, 64, 40], [7680, 2560, 40, 1], [1, 1, 32, 64])


def test_threads_share_what_is_prepared(built: list[Built]) -> None:
    start = run.Launch(KERNEL, 3, Asked())
    arrays = [torch.zeros(64) for _ in range(12)]
    barrier = threading.Barrier(len(arrays))

    def call(x: torch.Tensor) -> None:
        barrier.wait()
        for _ in range(50):
            start(x, None, x, seed=x.data_ptr() & 0x7FFFFFFF)

    threads = [threading.Thread(target=call, args=(x,)) for x in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = [arguments for one in built for _, arguments in one.compiled.launched]
    assert len(calls) == 50 * len(arrays)
    assert all(call[0] == call[2] and call[8] == call[0] & 0x7FFFFFFF for call in calls)


# -- what is compiled once ---------------------------------------------------------------------------------------------


def launched(x: torch.Tensor, mask: torch.Tensor | None = None, section: int = 5) -> None:
    run.Launch(KERNEL, 3, Asked(section))(x, mask, MEMORY)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((MEMORY[::32],), (MEMORY[::48],)),  # strides that are multiples of 16
        ((MEMORY[::3],), (MEMORY[::5],)),
        ((MEMORY, MASK), (MEMORY, MASK[16:])),
        ((MEMORY, None, 1), (MEMORY, None, 16)),
        ((MEMORY, None, 2**31), (MEMORY, None, 2**33)),
    ],
)
def test_launches_that_differ_in_sizes_share_a_kernel(
    first: tuple[Any, ...], then: tuple[Any, ...], built: list[Built]
) -> None:
    launched(*first)
    launched(*then)
    assert len(built) == 1
    assert len(built[0].compiled.launched) == 2


@pytest.mark.parametrize(
    ("x", "mask", "section"),
    [
        (MEMORY[::3], None, 5),
        (MEMORY[::16], None, 5),
        (MEMORY[1:], None, 5),  # not aligned to 16 bytes
        (MEMORY.to(torch.bfloat16), None, 5),
        (MEMORY, MASK, 5),
        (MEMORY, MASK[1:], 5),
        (MEMORY, None, 2**31),
        (MEMORY, None, -(2**31) - 1),
        (torch.empty_strided((2,), (2**31,), device="meta"), None, 5),
    ],
)
def test_other_kinds_of_arrays_and_numbers_are_compiled_for(
    x: torch.Tensor, mask: torch.Tensor | None, section: int, built: list[Built]
) -> None:
    for _ in range(2):
        launched(MEMORY)
        launched(x, mask, section)
    assert len(built) == 2


def test_another_gpu_has_kernels_and_a_stream_of_its_own(built: list[Built], monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        launched(MEMORY)
    assert [len(one.compiled.launched) for one in built] == [2, 2]


@pytest.mark.parametrize("generic", [False, True])
def test_what_is_compiled_for_is_what_tells_kernels_apart(generic: bool) -> None:
    """The signature that Triton is given says no more of the numbers than the key of what was compiled."""
    draw = random.Random(1)
    numbers = (0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31 - 16, 2**31, 2**32, -1, -16, -(2**31), -(2**31) - 1)
    signatures: dict[str, set[str]] = {}
    for _ in range(3000):
        by = parameters.Steps(*(draw.choice(numbers) for _ in range(4)))
        values = by, draw.choice(numbers), RANDOM._replace(seed_low=draw.choice(numbers))
        passed = run.Passed(values, {"how": 0, "FLAG": 0}, generic=generic)
        made, _ = run.source(KERNEL, (None, None, None), passed)
        told = str((made.signature, made.constants, made.attrs))
        signatures.setdefault(str(run._kinds(passed)), set()).add(told)
    assert len(signatures) > 100
    assert all(len(told) == 1 for told in signatures.values())


def test_a_source_says_what_triton_may_take_for_granted() -> None:
    by = parameters.Steps(2**40, 32, 1, 3)
    arrays = MEMORY[1:], MASK, None
    flags = {"how": 8, "FLAG": True, "num_warps": 8}
    made, options = run.source(KERNEL, arrays, run.Passed((by, 16, RANDOM), flags))
    assert made.signature == {
        "X": "*fp32", "MASK": "*u8", "OWN": "constexpr", "by": ("i64", "i32", "constexpr", "i32"), "section": "i32",
        "random": ("i32", "i32", "i32", "fp32"), "how": "constexpr", "FLAG": "constexpr",
    }  # fmt: skip
    assert made.constants == {(2,): None, (3, 2): 1, (6,): 8, (7,): True}
    assert set(made.attrs) == {(1,), (3, 0), (3, 1)}
    assert options["num_warps"] == 8


# -- a problem's launches ----------------------------------------------------------------------------------------------


def names(built: list[Built]) -> list[str]:
    return [one.kernel.__name__ for one in built]


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


def made_for(p: Problem) -> Any:
    return kernel.TritonKernel(p, H200, next(config.configs(p, H200)))


def passed(one: Built, at: int) -> dict[str, Any]:
    """What a compiled kernel was launched with, by name."""
    constants = sum(name in one.flags for name in one.kernel.arg_names)
    leaves = one.compiled.launched[at][1][:-constants]
    arrays = dict(zip(one.kernel.arg_names, leaves, strict=False))
    return {name: arrays[name] for name in arrays if name.isupper()} | {"random": leaves[-4:], "leaves": leaves}


BACKWARD = ["prepare", "query_gradient", "key_gradients"]
ADDED = ["prepare_added", *BACKWARD[1:]]  # where a float mask is added


@pytest.mark.parametrize("way", ["general", "prepared"])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("b2.h2.s64.d64.bf16", ["forward"]),
        ("b1.h8/2.s1x8192.d64.bf16", ["forward", "merge"]),
        ("b1.h8/2.s1x8192.d64.bf16.dropout=0.5", ["forward", "merge"]),
        ("b2.h2.s64.d64.bf16.mask=bool", ["forward"]),
        ("b8.h4.s512.d64.bf16.mask=bool", ["classify", "forward"]),
        ("b8.h4.s512.d64.bf16.grad", ["forward", *BACKWARD]),
        ("b1.h8.s77.d64.bf16.mask=bf16.grad=qkvm", ["forward", *ADDED, "mask_gradient"]),
        (
            "b8.h4.s512.d64.bf16.mask=bf16:k.lengths.dropout=0.5.grad=m",
            ["classify", "forward", "prepare_added", "mask_gradient"],
        ),
    ],
)
def test_a_second_call_computes_nothing_anew(
    text: str, wanted: list[str], way: str, built: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes its own arrays, under the names that the kernels have for them, and its own seed."""
    p = Problem.parse(text)
    made = made_for(p)
    first = operands(p, 1 if p.dropout else None)
    forward, backward = made.forward, made.backward
    if way == "prepared" and not p.key_lengths and not p.dropout:
        run_forward, backward = made.prepared(first), made.prepared_backward(first)
        forward = lambda inputs: run_forward(*(x for x in inputs[:4] if x is not None))  # noqa: E731

    def call(seed: int | None) -> dict[str, Any]:
        inputs = operands(p, seed if p.dropout else None)
        results = forward(inputs)
        held = dict(zip(("Q", "K", "V", "MASK", "LENGTHS", "OUT", "LSE"), (*inputs[:5], *results), strict=True))
        if p.grads:
            held["DO"] = torch.zeros_like(results[0])
            grads = backward(inputs, *results, held["DO"], None)
            held |= zip(("DQ", "DK", "DV", "DMASK"), grads, strict=True)
        return held

    call(1)
    assert names(built) == wanted
    for module in (launch, run):  # whatever works something out from the problem or its arrays
        for name in ("variant", "options", "reach", "scores", "suits", "wide", "Passed", "describer", "steps"):
            monkeypatch.setattr(module, name, None, raising=False)
    calls = [(call(seed), words) for seed, words in ((2**63 + 5, (5, -(2**31))), (3, (3, 0)))]
    assert names(built) == wanted
    for at, (held, words) in enumerate(calls, 1):
        for one in built:
            given = passed(one, at)
            for name in held.keys() & given.keys():
                if name in ("OUT", "LSE") and one.kernel.__name__ == "forward" and "merge" in wanted:
                    continue
                array, address = held[name], given[name]
                same = getattr(address, "base", address) is array if array is not None else address == 0
                assert same or address == array.data_ptr(), name
            if p.dropout and "random" in one.kernel.arg_names:
                assert tuple(given["random"][:2]) == words


@pytest.mark.parametrize(
    "text",
    [
        "b2.h32/8.s1x256.d128.bf16.lengths.page=64.causal-br",
        "b2.h32/8.s1x8192.d128.bf16.lengths.page=64.causal-br.splits=4.sinks.alibi.lse",
        "b3.h4/2.s4x64.d64.bf16.lengths.varlen.page=16.causal-br.tree",
        "b3.h4/2.s40x50.d64.bf16.varlen.causal",
        "b2.h4.s512.d64.bf16.sinks.causal.lse",
    ],
)
def test_a_call_of_any_form_passes_what_the_general_one_does(text: str, built: list[Built]) -> None:
    """But for addresses, which are its own: descriptors are of its arrays, and results in the caller's order."""
    p = Problem.parse(text)
    made, order = made_for(p), order_of(p)
    made.forward(inputs_of(p))
    forward = made.prepared_form(inputs_of(p), order)
    wanted = names(built)
    for seed in (1, 2):
        inputs = inputs_of(p, seed=seed)
        right, right_lse = made.forward(inputs)
        out, lse = forward(*given(inputs))
        for result, expected in ((out, order.of(right)), (lse, order.of(right_lse))):
            assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
        for one in built:
            expected, found = passed(one, -2), passed(one, -1)
            arrays = [name for name in found if name.isupper()]
            numbers = len(arrays)
            assert found["leaves"][numbers:] == expected["leaves"][numbers:]
            for name in arrays:
                mine, others = found[name], expected[name]
                if hasattr(mine, "base"):
                    assert (mine.shape, mine.strides, mine.block_shape) == (
                        others.shape,
                        others.strides,
                        others.block_shape,
                    )
                    mine, others = mine.base.data_ptr(), others.base.data_ptr()
                if name in ("OUT", "LSE") and "merge" not in (one.kernel.__name__, *wanted):
                    assert mine == (out if name == "OUT" else lse).data_ptr()
                elif name in ("Q", "K", "V", "LENGTHS", "CU_Q", "CU_K", "SINKS", "SLOPES", "TABLE", "TREE"):
                    assert mine == others, name
    assert names(built) == wanted
    assert ("merge" in wanted) == bool(p.splits)


def test_of_a_gpu_that_is_not_the_current_one_it_is_launched_there(
    built: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, entered = Problem.parse("b2.h4.s1x64.d64.bf16.lengths.page=16"), []

    @contextlib.contextmanager
    def on(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield

    made, inputs, here = made_for(p), inputs_of(p), iter((True, False))
    made.forward(inputs)
    monkeypatch.setattr(kernel, "_here", lambda _: lambda: next(here))
    forward = made.prepared_form(inputs, order_of(p))
    monkeypatch.setattr(kernel, "on", on)
    for count in (0, 1):
        forward(*given(inputs))
        assert len(entered) == count
    assert len(built[0].compiled.launched) == 3


@pytest.mark.parametrize("by", ["operands", "problem"])
@pytest.mark.parametrize(
    "text",
    [
        "b1.h8/2.s1x8192.d64.bf16",
        "b8.h4.s512.d64.bf16.mask=bool.grad",
        "b1.h8.s77.d64.bf16.mask=bf16.grad=qkvm",
        "b2.h4.s1024.d128.fp16.causal.dropout=0.5.lse.grad",
    ],
)
def test_what_was_built_before_is_what_calls_launch(
    text: str, by: str, built: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    p = Problem.parse(text)
    made, inputs = made_for(p), operands(p, 1 if p.dropout else None)
    for build in made.builds() if by == "problem" else run.builds(made._launches(ahead.inputs_like(inputs))):
        build()
    ahead_of_calls = names(built)
    assert ahead_of_calls
    assert len(made.builds()) == 0
    out, lse = made.forward(inputs)
    if p.grads:
        made.backward(inputs, out, lse, torch.zeros_like(out), torch.zeros_like(lse) if p.lse else None)
    assert names(built) == ahead_of_calls


def test_a_new_length_is_launched_by_the_kernel_that_is_there(built: list[Built]) -> None:
    p = Problem.parse("b1.h8/2.s1x3003.d64.bf16")
    for length in (3003, 3005, 3007):
        p = p.replace(seq_k=length)
        made_for(p).forward(operands(p))
    assert names(built) == ["forward", "merge"]
    assert [[n for n in (3003, 3005, 3007) if n in passed(built[0], at)["leaves"]] for at in range(3)] == [
        [3003],
        [3005],
        [3007],
    ]


def test_nothing_of_a_backward_is_prepared_by_a_forward(built: list[Built], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Prepare", None)
    made_for(Problem.parse("b2.h2.s64.d64.bf16.grad")).forward(operands(Problem.parse("b2.h2.s64.d64.bf16")))
    assert names(built) == ["forward"]


def test_nothing_that_is_prepared_keeps_an_array(built: list[Built]) -> None:
    p = Problem.parse("b1.h4.s2048.d64.bf16.grad")
    made = made_for(p)
    inputs = operands(p)
    forward, backward = made.prepared(inputs), made.prepared_backward(inputs)
    results = forward(*inputs[:3])
    backward(inputs, *results, results[0], None)
    made.forward(inputs)
    watched = [weakref.ref(x) for x in (*inputs[:3], *results)]
    for one in built:
        one.compiled.launched.clear()
    assert len(built) == 4
    built.clear()
    del inputs, results, one
    gc.collect()
    assert [reference() for reference in watched] == [None] * 5


def test_too_many_ways_to_lie_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MOST", 2)
    p = Problem.parse("b2.h2.s64.d64.bf16.q=strided")
    made = kernel.TritonKernel(p.replace(query=p.key), H200, next(config.configs(p, H200)))
    whole = torch.zeros(2, 2, 64, 1024, dtype=torch.bfloat16)
    sizes = []
    for step in (64, 128, 256, 64):
        x = whole[..., :step].contiguous()[..., :64]
        made.forward(Inputs(x, x, x))
        sizes.append(len(made._forwards))
    assert sizes == [1, 2, 1, 2]


def test_the_device_of_the_arrays_is_made_the_current_one() -> None:
    here, there = (SimpleNamespace(is_cuda=True, get_device=lambda at=at: at, device=f"cuda:{at}") for at in (0, 1))
    assert not isinstance(kernel.on(MEMORY), torch.cuda.device)
    assert not isinstance(kernel.on(here), torch.cuda.device)
    assert isinstance(kernel.on(there), torch.cuda.device)


def test_what_is_prepared_for_one_way_to_lie_takes_others() -> None:
    """Output, lse and upstream gradients may come from elsewhere, and lie as they like."""
    p = Problem.parse("b2.h2.s64.d64.fp32.lse.grad")
    made = made_for(p)
    inputs = operands(p)
    backward = made.prepared_backward(inputs)
    out, lse = made.forward(inputs)
    for change in (
        lambda x: x,
        lambda x: x.mT.contiguous().mT,
        shifted,
        lambda x: x[:1, :1].expand(x.shape),
    ):
        for changes in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
            results = zip(changes, (out, lse, torch.zeros_like(out), torch.zeros_like(lse)), strict=True)
            grads = backward(inputs, *(change(x) if changed else x for changed, x in results))
            assert [grad.shape for grad in grads[:3]] == [x.shape for x in inputs[:3]]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides, 4 bytes behind a multiple of 16."""
    moved = torch.zeros(x.numel() + 4, dtype=x.dtype)[4 // x.element_size() :][: x.numel()].view(x.shape)
    assert moved.data_ptr() % 16 == 4
    return moved.copy_(x)


CASE = Problem.parse("b2.h2.s640.d64.fp32.mask=fp32:hk.lengths.grad=qkvm")


@pytest.mark.parametrize(
    "role", ["query", "key", "value", "attn_mask", "key_lengths", "out", "grad_out", "lse", "grad_lse"]
)
def test_every_array_from_outside_is_looked_at(role: str, built: list[Built]) -> None:
    """Each launch that takes an array is compiled anew for one that lies at another multiple of 4 bytes.

    But for an upstream gradient, which is copied to where others lie, and for lengths, which are read one by one.
    """
    made = made_for(CASE)
    every = ["forward", *ADDED, "mask_gradient"]
    gradients = ["query_gradient", "key_gradients", "mask_gradient"]
    wanted = {"value": ["forward", *gradients], "grad_out": [], "key_lengths": []}
    wanted |= dict.fromkeys(("query", "key", "attn_mask"), every)

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

    call()
    assert names(built) == every
    call(**{role: shifted})
    assert names(built)[len(every) :] == wanted.get(role, ["prepare_added"])
    known = len(built)
    call()
    call(**{role: shifted})
    assert len(built) == known


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_all_sequences_are_told_anew(dtype: torch.dtype, built: list[Built]) -> None:
    """They are no part of the problem; and nothing is compiled for them."""
    made = made_for(Problem.parse("b3.h4/2.s1024.d64.bf16.varlen.grad"))
    cu = torch.zeros(4, dtype=dtype)
    for rows_q, rows_k in ((1999, 2003), (1777, 2011), (1999, 2003)):
        query = torch.zeros(rows_q, 4, 64, dtype=torch.bfloat16).transpose(0, 1)[None]
        key = torch.zeros(rows_k, 2, 64, dtype=torch.bfloat16).transpose(0, 1)[None]
        inputs = Inputs(query, key, key, offsets=Offsets(cu, cu))
        out, lse = made.forward(inputs)
        assert (out.shape, lse.shape) == ((1, 4, rows_q, 64), (1, 4, rows_q))
        assert out[0].transpose(0, 1).is_contiguous()
        grads = made.backward(inputs, out, lse, out, None)
        assert [grad.shape for grad in grads[:3]] == [x.shape for x in inputs[:3]]
        for one in built:
            leaves = one.compiled.launched[-1][1]
            assert rows_q in leaves
            assert (rows_k in leaves) == (one.kernel.__name__ != "prepare")
            assert cu.data_ptr() in leaves
    assert names(built) == ["forward", *BACKWARD]
    assert (len(made._forwards), len(made._backwards)) == (2, 2)


@pytest.mark.parametrize("text", ["b3.h2.s640.d64.fp32.mask=fp32.lengths.grad=qkvm", "b3.h2.s640.d64.bf16.varlen.grad"])
def test_integers_of_any_type_and_anywhere_share_kernels(text: str, built: list[Built]) -> None:
    """A kernel for each would be compiled while a caller waits, once per type of lengths that a program uses."""
    p = Problem.parse(text)
    made = made_for(p)
    rows = torch.zeros(1, 2, 640 * 3, 64, dtype=torch.bfloat16)
    for dtype in (torch.int32, torch.int64, torch.int16, torch.uint8, torch.uint32, torch.uint64):
        for integers in (torch.zeros(4, dtype=dtype), torch.zeros(5, dtype=dtype)[1:]):
            if not p.varlen:
                inputs = operands(p)._replace(key_lengths=integers[:3])
            elif integers.element_size() < 4:  # offsets have 32 or 64 bits
                continue
            else:
                inputs = Inputs(rows, rows, rows, offsets=Offsets(integers, integers))
            made.prepared(inputs)
            out, lse = made.forward(inputs)
            made.backward(inputs, out, lse, out, None)
    assert len(built) == len({one.kernel for one in built})


def test_the_interpreter_reads_a_single_integer_wherever_it_is_from() -> None:
    """One that was cut out of others with a step counts as contiguous, and keeps that step."""
    read = run._as_read("LENGTHS", torch.tensor([7, 1, 1, 1])[::4])
    assert (read.dtype, read.tolist()) == (torch.int32, [7, 0])


@pytest.mark.parametrize(("dtype", "words"), [(torch.int32, 1), (torch.int64, 2)])
def test_a_launch_says_how_many_words_an_integer_has(dtype: torch.dtype, words: int) -> None:
    cu = torch.zeros(4, dtype=dtype)
    p = Problem.parse("b3.h2.s640.d64.bf16.varlen.grad")
    assert arguments.reach(p, cu).words == words
    sizes = arguments.sizes(p, operands(p).query, operands(p).key, cu, cu)
    assert (sizes.cu_q, sizes.cu_k) == (words, words)


def test_what_the_kernels_make_for_themselves_has_one_type() -> None:
    """Nothing looks at it again, whatever type the lse of a call has."""
    prepare = launch.Prepare(run.Launch, CASE, next(config.configs(CASE, H200)))
    out, lse = torch.zeros(2, 2, 640, 64), torch.zeros(2, 2, 640, dtype=torch.float64)
    saved = prepare(operands(CASE), out, lse, out, None)
    assert (saved.base.dtype, saved.delta.dtype) == (torch.float32, torch.float32)


def test_strides_of_axes_of_length_one_mean_nothing() -> None:
    x = torch.empty_strided((1, 2, 1, 8), (99990001, 8, 2**40, 1), device="meta")
    assert arguments.steps(x) == (0, 8, 0, 1)
    assert not arguments.wide(config.Tile(64, 64, 4, 3), arguments.steps(x), arguments.steps(None))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 0, 3, 4), (2, 3, 0), (5,)], ids=str)
def test_results_have_the_strides_that_torch_gives(shape: tuple[int, ...]) -> None:
    made = MEMORY.new_empty_strided(*arguments.dense(*shape))
    assert (made.shape, made.stride()) == (shape, torch.empty(shape).stride())


def test_offsets_past_32_bits_are_prepared_for(built: list[Built]) -> None:
    """Of arrays without memory, one whose rows lie far apart."""
    made = made_for(Problem.parse("b1.h2.s64.d64.bf16"))
    for step in (64, 2**26):
        x = torch.empty_strided((1, 2, 64, 64), (8192, 4096, step, 1), dtype=torch.bfloat16, device="meta")
        made.forward(Inputs(x, x, x))
    assert [one.flags["how"].wide for one in built] == [False, True]


def test_a_mask_that_no_longer_lies_in_words_is_read_by_bytes(built: list[Built]) -> None:
    p = Problem.parse("b8.h4.s512.d64.bf16.mask=bool")
    tiles = importlib.import_module("attnswitch.backends.triton.tiles")
    memory = torch.zeros(520 * 512 * 2, dtype=torch.bool)
    for at, step in ((0, 512), (1, 512), (4, 512), (0, 513)):
        listing = tiles.listing(run.Launch, p, H200, config.Tile(32, 32, 4, 3))
        listing(memory[at:].as_strided((1, 1, 512, 512), (512 * 512, 512 * 512, step, 1)), None)
    assert [one.flags["WORDS"] for one in built] == [True, False, True, False]
