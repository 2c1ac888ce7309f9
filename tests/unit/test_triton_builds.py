"""The Triton kernels compile for GPUs that are not here, fit them, and spill no more registers than they did."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Problem
from attnswitch.machine.device import Device
from attnswitch.problem import Memory

triton = pytest.importorskip("triton", "3.6")

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("make_builds", ROOT / "fixtures" / "make_builds.py")
assert SPEC is not None
assert SPEC.loader is not None
make_builds = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_builds)
ahead = make_builds.ahead
config = importlib.import_module("attnswitch.backends.triton.config")

VERSION, TABLE = make_builds.committed()
COMMITTED = make_builds.most_spilled(TABLE)
#: Flags that are sizes which tuning chooses, and flags that say what a GPU has.
TUNED = {"AT_ONCE", "BLOCK_M", "BLOCK_S", "block_m", "block_n"}
OF_THE_GPU = {"OVERLAP", "overlap", "tma", "tma_rows"}
#: What the other flags have to be compiled for: False and True, unless it is here; and less in some kernels.
VALUES: dict[str, set[Any]] = {
    "mask_kind": {0, 1, 2},
    "block_d": {16, 64, 128, 256},
    "block_dv": {16, 64, 128, 256},
    "BLOCK_DV": {16, 64, 128, 256},
}
NARROWER: dict[tuple[str, str], set[Any]] = {
    ("classify", "mask_kind"): {1, 2},
    ("mask_gradient", "mask_kind"): {2},
    ("mask_gradient", "fold"): {False},
    ("mask_gradient", "block_d"): {64, 128},
    ("mask_gradient", "block_dv"): {64, 128},
    ("prepare_added", "mask_kind"): {2},
    ("prepare_added", "fold"): {False},
    ("prepare_added", "block_d"): {64, 128},
    ("prepare_added", "block_dv"): {64, 128},
    ("merge", "BLOCK_DV"): {64, 128},
}
#: What a kernel never asks of its variant.
UNASKED = {
    "forward": {"even_q"},
    "key_gradients": {"overlap", "packed", "paged", "scaled", "sinks", "split", "tma_rows", "tree"},
    "query_gradient": {"even_q", "overlap", "packed", "paged", "scaled", "sinks", "split", "tma_rows", "tree"},
    "mask_gradient": {
        "aligned", "even_k", "even_q", "listed", "overlap", "packed", "paged", "scaled", "sinks", "split", "tma",
        "tma_rows", "tree", "varlen", "wide",
    },
    "prepare_added": {
        "aligned", "dropout", "even_k", "even_q", "listed", "overlap", "packed", "paged", "scaled", "split", "tma",
        "tma_rows", "tree", "varlen", "wide",
    },
    "classify": {
        "alibi", "aligned", "block_d", "block_dv", "dropout", "even_d", "even_dv", "even_q", "fold", "generic",
        "listed", "packed", "paged", "panelled", "scaled", "sinks", "softcap", "split", "tma", "tma_rows", "tree",
        "varlen", "wide",
    },
}  # fmt: skip
#: Compiled in every run; some of the others where what is slow is run, the rest at night.
QUICK = ("b1.h4.s128.d20.fp32.grad", False, "a100")
#: Compiled here: each problem for one GPU, the next problem for the next; the table has all.
CASES = sorted(
    {
        QUICK,
        *((*case, make_builds.DEVICES[n % len(make_builds.DEVICES)]) for n, case in enumerate(make_builds.PROBLEMS)),
    }
)
SLOW = CASES[::6]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ahead.pool(1) as pool:
        yield pool


def label(case: object) -> str:
    return "far" * case if isinstance(case, bool) else str(case)


def marks(case: tuple[str, bool, str]) -> Any:
    """When it is compiled."""
    if case == QUICK:
        return ()
    return pytest.mark.slow if case in SLOW else pytest.mark.nightly


def test_the_quick_one_is_one_of_them() -> None:
    assert QUICK[:2] in make_builds.PROBLEMS
    assert QUICK[2] in make_builds.DEVICES


@pytest.mark.parametrize(
    ("problem", "far", "device"),
    [pytest.param(*case, marks=marks(case)) for case in CASES],
    ids=label,
)
def test_every_kernel_compiles_and_fits(pool: ProcessPoolExecutor, problem: str, far: bool, device: str) -> None:
    builds = pool.submit(ahead.build, problem, device, far).result()
    told = "\n".join(make_builds.lines(builds))
    assert not any(build.failure for build in builds), told
    assert max(build.shared for build in builds) <= Device.named(device).shared_memory, told
    assert max(build.tensor_memory for build in builds) <= 512, told
    if triton.__version__ == VERSION:  # each version allots registers in its own way
        most = make_builds.most_spilled(builds)
        more = [
            f"{key}: {COMMITTED.get(key)} -> {spilled}"
            for key, spilled in most.items()
            if spilled > COMMITTED.get(key, -1)
        ]
        assert not more, f"spills past {make_builds.TABLE.name}; if need be, fixtures/make_builds.py --write\n{told}"


def asked(launch: Any) -> dict[str, Any]:
    """The flags that decide on branches: neither sizes that tuning chooses, nor Triton's own options."""
    name = launch.kernel.__name__
    how = launch.passed.flags["how"]._asdict() if "how" in launch.passed.flags else {}
    flags = {flag: value for flag, value in launch.passed.flags.items() if flag.isupper()}
    flags |= {flag: value for flag, value in how.items() if flag not in UNASKED.get(name, ())}
    return {flag: value for flag, value in flags.items() if flag not in TUNED}


def test_the_problems_take_every_branch() -> None:
    """On every GPU, but for the branches that the GPU decides on."""
    seen = defaultdict(set)
    kernels = set()
    problems = [(Problem.parse(text), far) for text, far in make_builds.PROBLEMS]
    for device in make_builds.DEVICES:
        for problem, far in problems:
            for launch in ahead.launches(problem, Device.named(device), far=far):
                kernels.add(launch.kernel)
                for flag, value in asked(launch).items():
                    seen[launch.kernel.__name__, flag, "any" if flag in OF_THE_GPU else device].add(value)
    assert len(kernels) == 8
    assert {problem.dtype for problem, _ in problems} == {"float16", "bfloat16", "float32"}
    for (kernel, flag, device), values in seen.items():
        expected = NARROWER.get((kernel, flag), VALUES.get(flag, {False, True}))
        assert expected <= values, f"{kernel} for {device} is not compiled for every {flag}: {values}"


PLAIN_TILES = [
    build
    for build in TABLE
    if build.kernel in ("forward", "key_gradients", "query_gradient")
    and not re.search(r"mask|lengths|dropout|far|align|d20|d40|d512", build.problem)
]


@pytest.mark.parametrize("build", PLAIN_TILES, ids=lambda build: f"{build.kernel}-{build.arch}-{build.problem}")
def test_the_shared_memory_of_a_tile_is_near_what_is_compiled(build: Any) -> None:
    problem, sizes = Problem.parse(build.problem), map(int, re.findall(r"\d+", build.tile))
    device = Device.named({"sm_80": "a100", "sm_90": "h200", "sm_100": "b200"}[build.arch])
    said = config.shared(problem, device, build.kernel, config.Tile(*sizes))
    near = 0.04 if build.arch == "sm_90" and problem.dtype != "float32" else 0.26
    assert abs(said / build.shared - 1) <= near, (said, build.shared)


#: Forwards of GPUs whose products have their operands in registers: the tile that is chosen, and what was compiled.
BY_REGISTERS = [
    ("a100", "b4.h16.s2048.d192/128.bf16", "128x64 w8 s2", 114688),
    ("a100", "b4.h16.s2048.d192/128.bf16.causal.lse", "128x64 w8 s2", 131072),
    ("a100", "b4.h16.s1000x1100.d256.bf16", "128x64 w8 s2", 147456),
    ("a100", "b4.h16.s2048.d256.bf16.mask=bool:hqk", "128x64 w8 s2", 155648),
    ("a100", "b4.h16.s2048.d256.bf16.mask=bf16:bhqk", "128x64 w8 s2", 163840),
    ("a100", "b4.h32/8.s1x8192.d256.bf16.mask=fp32:bk", "16x64 w4 s3", 149504),
    ("a100", "b4.h32/8.s512x4096.d192/128.bf16.causal-br.lengths.varlen.page=16", "128x64 w8 s3", 115200),
    ("a100", "b4.h32/8.s16x8192.d320.bf16.causal-br.lengths.page=16", "64x64 w4 s5", 131072),
    ("a10", "b4.h16.s2048.d128.bf16.causal", "64x64 w4 s3", 90112),
    ("a10", "b4.h16.s2048.d256.bf16", "64x32 w8 s2", 69632),
    ("a10", "b1.h8.s100x200.d128.bf16.mask=bf16:qk", "128x64 w4 s2", 98304),
    ("a10", "b1.h8.s100x200.d80.bf16.mask=fp64:qk", "128x32 w4 s2", 81920),
    ("l4", "b4.h32/8.s16x8192.d192/128.bf16.causal-br.lengths.page=16", "64x64 w4 s3", 90624),
    ("l4", "b4.h32/8.s1x8192.d512.bf16.causal-br.lengths", "16x128 w4 s3", 73728),
    ("rtx5090", "b4.h16.s2048.d128.bf16.causal", "64x64 w4 s3", 90144),
    ("rtx5090", "b4.h16.s2048.d128.bf16.mask=bf16:bhqk", "128x64 w4 s2", 81944),
    ("rtx5090", "b4.h16.s2048.d256.bf16", "64x32 w8 s2", 69656),
]


@pytest.mark.parametrize(("device", "text", "tile", "compiled"), BY_REGISTERS, ids=str)
def test_a_forward_that_fits_is_chosen(device: str, text: str, tile: str, compiled: int) -> None:
    problem, where = Problem.parse(text), Device.named(device)
    chosen = next(config.configs(problem, where)).forward
    assert str(chosen) == tile
    stages = (chosen.stages + 1) // 2 if problem.page else chosen.stages
    said = config._taken_by_registers(replace(chosen, stages=stages), problem)
    assert compiled <= said <= min(1.26 * compiled, where.shared_memory)


@pytest.mark.parametrize(
    ("device", "text", "tile", "compiled"),
    [pytest.param(*case, marks=pytest.mark.nightly if n else pytest.mark.slow) for n, case in enumerate(BY_REGISTERS)],
    ids=str,
)
def test_it_is_compiled_to_that(pool: ProcessPoolExecutor, device: str, text: str, tile: str, compiled: int) -> None:
    builds = pool.submit(ahead.build, text, device).result()
    told = "\n".join(make_builds.lines(builds))
    assert not any(build.failure for build in builds), told
    (forward,) = (build for build in builds if build.kernel == "forward")
    assert forward.tile == tile
    assert forward.shared <= compiled, told


@pytest.mark.parametrize("dims", ["64", "80", "128", "192/128", "192", "256", "320", "512", "576/512"])
@pytest.mark.parametrize("device", ["a100", "a10", "l4", "rtx5090"])
def test_no_forward_of_16_bits_waits_for_its_loads(device: str, dims: str) -> None:
    for more in ("", ".causal.lse", ".mask=bool:hqk", ".mask=fp32:hqk", ".causal.window=512,0", ".lengths", ".varlen"):
        chosen = next(config.configs(Problem.parse(f"b4.h16.s2048.d{dims}.bf16{more}"), Device.named(device)))
        assert chosen.forward.stages >= 2, (more, chosen.forward)
    for more in ("", ".causal-br.lengths.page=16", ".mask=bf16:hqk"):
        chosen = next(config.configs(Problem.parse(f"b4.h32/8.s8x8192.d{dims}.bf16{more}"), Device.named(device)))
        assert chosen.forward.stages >= 2, (more, chosen.forward)


def test_a_config_tells_its_tiles() -> None:
    backend = importlib.import_module("attnswitch.backends.triton.backend").TritonBackend()
    problem, device = Problem.parse("b4.h16.s2048.d128.bf16.grad"), Device.named("h200")
    chosen = next(backend.configs(problem, device))
    told = backend.tiles(problem, device, chosen)
    assert [tile.role for tile in told] == ["forward", "query_gradient", "key_gradients"]
    assert told[0][1:] == (128, 64, 2, 98304)  # 98,336 are taken
    assert [tile.role for tile in backend.tiles(problem.replace(grads=""), device, chosen)] == ["forward"]


def test_problems_are_named_as_builds_are() -> None:
    assert [str(Problem.parse(text)) for text, _ in make_builds.PROBLEMS] == [text for text, _ in make_builds.PROBLEMS]


def test_the_table_holds_what_is_built() -> None:
    problems = {f"{problem}{' far' * far}" for problem, far in make_builds.PROBLEMS}
    assert {problem for _, _, problem in COMMITTED} == problems


@pytest.mark.parametrize("source", sorted((ROOT / "backends/triton/kernels").glob("*.py")), ids=lambda path: path.stem)
def test_shapes_are_named_before_they_are_filled(source: Path) -> None:
    # Triton 3.6 takes a field in a shape, as in tl.zeros((how.block_m,), ...), for a number that is not known to it.
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call) and node.args]
    filled = [call.args[0] for call in calls if ast.unparse(call.func) in ("tl.zeros", "tl.full")]
    fields = [ast.unparse(part) for shape in filled for part in ast.walk(shape) if isinstance(part, ast.Attribute)]
    assert not [field for field in fields if field.startswith("how.")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        "b8.h1.s65x64.d256.bf16.mask=fp64:bqk.grad",
        pytest.param("b8.h1.s650.d128.fp16.mask=fp64:bhqk.grad=qkvm", marks=pytest.mark.nightly),
        pytest.param("b8.h1.s650.d128.bf16.mask=fp32:bqk.grad", marks=pytest.mark.nightly),
    ],
)
def test_a_wide_mask_leaves_room_in_shared_memory(problem: str) -> None:
    for name in ("h200", "b200"):
        device = Device.named(name)
        built = list(ahead.builds(Problem.parse(problem), device))
        assert {build.failure for build in built} == {""}
        assert max(build.shared for build in built) <= device.shared_memory


MASKED = "b4.h16.s2048.d64.bf16.mask=fp32:hqk.grad"


def test_tiles_of_a_mask_that_are_on_their_way_are_counted() -> None:
    # With three stages, 131,072 bytes were compiled.
    assert str(next(config.configs(Problem.parse(MASKED), Device.named("a10"))).query_gradient) == "128x64 w8 s2"


@pytest.mark.slow
def test_gradients_beside_a_mask_fit(pool: ProcessPoolExecutor) -> None:
    builds = pool.submit(ahead.build, MASKED, "a10").result()
    assert not any(build.failure for build in builds)
    assert max(build.shared for build in builds) <= Device.named("a10").shared_memory


@pytest.mark.parametrize("source", sorted((ROOT / "backends/triton/kernels").glob("*.py")), ids=lambda path: path.stem)
def test_no_argument_is_a_tuple_of_numbers_by_default(source: Path) -> None:
    # Triton 3.6 wants of each number in it a type, which numbers of Python have not.
    functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions for given in f.args.defaults if isinstance(given, ast.Tuple)]


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def test_launches_are_listed_and_not_made() -> None:
    names = [launch.kernel.__name__ for launch in ahead.launches(PLAIN, Device.named("h200"))]
    assert names == ["forward", "prepare", "query_gradient", "key_gradients"]


PLAIN = Problem.parse("b4.h16.s1024.d128.bf16.causal.grad")


@pytest.mark.parametrize(
    ("problem", "device", "far", "tma", "wide"),
    [
        (PLAIN, "h200", False, True, False),
        (PLAIN, "a100", False, False, False),
        (PLAIN, "h200", True, True, True),
        (PLAIN.replace(key=Memory(align=8)), "h200", False, True, False),
        (PLAIN.replace(value=Memory(strided=True)), "b200", False, True, False),
        (PLAIN.replace(value=Memory(expanded=True)), "b200", True, False, True),
    ],
)
def test_stand_ins_lie_as_the_problem_says(problem: Problem, device: str, far: bool, tma: bool, wide: bool) -> None:
    forward = ahead.launches(problem, Device.named(device), far=far)[0]
    how = forward.passed.flags["how"]
    assert (how.tma, how.wide) == (tma, wide)


def test_the_processor_has_no_builds() -> None:
    with pytest.raises(ValueError, match="NVIDIA"):
        list(ahead.builds(PLAIN, Device.cpu()))
