"""The CUDA kernels compile for GPUs that are not here, fit them, and spill no more registers than they did."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Problem
from attnswitch.machine.device import Device
from attnswitch.problem import Memory

pytest.importorskip("cupy")

sys.path.append(str(Path(__file__).parents[2] / "fixtures"))  # where processes of the pool look for it, too
make_builds = importlib.import_module("make_cuda_builds")
sass = importlib.import_module("sass")
nvrtc = make_builds.nvrtc
classes = importlib.import_module("attnswitch.backends.cuda.classes")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")

TABLES = make_builds.committed()
#: Compiled here: each problem for one architecture, the next problem for the next, and all that is common on Hopper;
#: the table has all of both.
ARCHS = tuple(make_builds.TARGETS)


def _one_of(archs: tuple[str, ...], n: int, problem: str) -> str:
    taking = [arch for arch in archs if make_builds.takes(problem, arch)]
    return taking[n % len(taking)]


CASES = sorted(
    {
        *((problem, _one_of(ARCHS, n, problem)) for n, problem in enumerate(make_builds.PROBLEMS)),
        *((problem, "sm_90a") for problem in make_builds.PROBLEMS[:3]),
    }
)
SLOW = CASES[::6]
#: What flags have to be compiled for, in some kernel of some problem.
VALUES: dict[str, set[int]] = {
    **{flag: {0, 1} for flag in ("FOLD", "SOFTCAP", "DROPOUT", "LENGTHS", "ONCE", "WITH_KEY", "WITH_VALUE")},
    **{flag: {0, 1} for flag in ("SINKS", "ALIBI")},
    "TREE": {1},
    "CACHE": {1, 2, 3},
    "PAGED": {0, 1, 2, 4},
    "SPLIT": {0, 1, 2},
    "MASK_KIND": {0, 1, 2, 3, 4, 5},
    "MASK_PAIRS": {0, 1},
    "QUERY_BYTES": {2, 4, 16},
    "KEY_BYTES": {4, 8, 16},
    "VALUE_BYTES": {4, 8, 16},
    "GRAD_OUT_BYTES": {16},
    "CONTINUED": {0, 1},
    "MASKED": {0, 1},
    "BIAS": {0, 1, 2},
    "ORDERED": {0, 1},
    "ADDED": {0, 1},
    "ALONE": {0, 1},
    "TOLD": {0, 16},
    "PAGE_ROWS": {16, 32, 64},
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with make_builds.pool(1) as pool:
            yield lambda problem, arch: pool.submit(
                make_builds.build, problem, make_builds.TARGETS[arch], arch
            ).result()


@pytest.mark.parametrize(
    ("problem", "arch"),
    [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.nightly) for case in CASES],
)
def test_kernels_compile_and_fit(build: Callable[[str, str], list[Any]], problem: str, arch: str) -> None:
    builds = build(problem, arch)
    told = "\n".join(make_builds.lines(builds))
    assert builds
    assert not any(build.failure for build in builds), told
    assert max(build.shared for build in builds) <= Device.named(make_builds.TARGETS[arch]).shared_memory, told
    version = nvrtc.version()
    if version in TABLES:  # each version allots registers in its own way
        before = make_builds.most_spilled(TABLES[version])
        most = make_builds.most_spilled(builds)
        more = [f"{key}: {before.get(key)} -> {now}" for key, now in most.items() if now > before.get(key, -1)]
        table = make_builds.table(version).name
        assert not more, f"spills past {table}; if need be, fixtures/make_cuda_builds.py --write\n{more}\n{told}"


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_wide_types_compile_for_gpus_without_asynchronous_copies(dtype: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
        builds = make_builds.build(f"b4.h16.s1024.d64.{dtype}.mask=bf16.grad=qkvm", "t4", "sm_75")
    assert not any(build.failure for build in builds), builds


def test_a_descriptor_in_an_odd_register_is_seen() -> None:
    copy = "/*5b90*/  LDGSTS.E.BYPASS.LTC128B.128.ZFILL [R61+UR0+0x5400], desc[{}][R10.64], P1 ;"
    assert [len(sass.odd_descriptors(copy.format(register))) for register in ("UR1", "UR4", "UR12", "UR13")] == [
        1,
        0,
        0,
        1,
    ]


@pytest.mark.slow
@pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
@pytest.mark.parametrize(
    "options", ["page=64.splits=1", "varlen.page=64.splits=1", "varlen.page=64.splits=3", "page=64.cache=int8"]
)
@pytest.mark.parametrize("dims", ["116/8", "64"])
def test_copies_of_pages_are_by_descriptors_that_a_gpu_takes(dims: str, options: str, tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16"):
        problem = Problem.parse(f"b1.h4/2.s1x64.d{dims}.{dtype}.lengths.{options}")
        for variant in make_builds.variants(problem, Device.named("h100")):
            assert sass.odd_descriptors(sass.listing(nvrtc.cubin(variant, "sm_90a"), tmp_path)) == []


@pytest.mark.parametrize("version", TABLES)
def test_a_table_holds_every_problem_for_every_architecture(version: tuple[int, int]) -> None:
    assert {(build.problem, build.arch) for build in TABLES[version]} == {
        (problem, arch) for problem in make_builds.PROBLEMS for arch in ARCHS if make_builds.takes(problem, arch)
    }


def test_hopper_kernels_spill_no_more_by_a_later_compiler() -> None:
    first, *others = (
        {k: n for k, n in make_builds.most_spilled(TABLES[v]).items() if k[0].startswith("hopper")}
        for v in sorted(TABLES)
    )
    assert others
    for each in others:
        assert each.keys() == first.keys()
        assert not {key: (first[key], each[key]) for key in first if each[key] > first[key]}


def test_the_problems_take_every_branch() -> None:
    seen = defaultdict(set)
    kernels = set()
    dtypes = set()
    for text in make_builds.PROBLEMS:
        for variant in make_builds.variants(Problem.parse(text), Device.named("h200")):
            kernels.add(variant.kernel)
            dtypes.add(variant.dtype)
            for flag, value in variant.flags:
                seen[flag].add(value)
    gradients = {"query_gradient", "key_gradients", "mask_gradient"}
    hopper = {"backward", "backward_ordered", "backward_wide", "backward_halved", "latent"}
    assert kernels == {"survey", "forward", "merge", "prepare", "prepare_added", *hopper, "finish", *gradients}
    assert dtypes == {"float16", "bfloat16", "float32", "float64"}
    assert seen.keys() == VALUES.keys()
    for flag, values in seen.items():
        assert VALUES[flag] <= values, flag


def test_problems_are_named_as_builds_are() -> None:
    assert [str(Problem.parse(text)) for text in make_builds.PROBLEMS] == list(make_builds.PROBLEMS)


# -- what is launched --------------------------------------------------------------------------------------------------

PLAIN = Problem.parse("b4.h16.s1024.d128.bf16.causal.grad")


def test_variants_are_those_of_forward_and_backward_in_each_family() -> None:
    names = [(variant.family, variant.kernel) for variant in make_builds.variants(PLAIN, Device.named("h200"))]
    hopper = [("hopper", kernel) for kernel in ("forward", "prepare", "backward", "finish")]
    portable = [("portable", kernel) for kernel in ("forward", "prepare", "query_gradient", "key_gradients")]
    assert names == [*hopper, *portable]
    others = [(variant.family, variant.kernel) for variant in make_builds.variants(PLAIN, Device.named("a100"))]
    assert others == portable


@pytest.mark.parametrize(
    ("memory", "copied"),
    [
        (Memory(), 16),
        (Memory(align=8), 8),
        (Memory(align=2), 2),
        (Memory(strided=True), 2),
        (Memory(expanded=True), 16),
    ],
)
def test_copies_are_as_wide_as_memory_allows(memory: Memory, copied: int) -> None:
    forward = make_builds.variants(PLAIN.replace(key=memory), Device.named("a100"))[0]
    assert dict(forward.flags)["KEY_BYTES"] == copied


def test_a_kernel_that_does_not_compile_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(classes, "_kept", {})
    monkeypatch.setattr(classes, "_latest", None)
    monkeypatch.setattr(tiles, "shared", lambda *_: 1)  # the sources count their shared memory themselves
    builds = list(make_builds.builds(Problem.parse("b1.h1.s64.d64.bf16"), Device.named("a100"), "sm_80"))
    assert "tiles.py counts the same shared memory" in builds[0].failure
