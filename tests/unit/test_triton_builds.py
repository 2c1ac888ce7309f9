"""The Triton kernels compile for GPUs that are not here, fit them, and spill no more registers than they did."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from attnswitch import Problem
from attnswitch.device import Device

triton = pytest.importorskip("triton")

from attnswitch.backends.triton import ahead, run  # noqa: E402
from attnswitch.backends.triton.ahead import Build  # noqa: E402

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("make_builds", ROOT / "fixtures" / "make_builds.py")
assert SPEC is not None
assert SPEC.loader is not None
make_builds = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_builds)

VERSION, TABLE = make_builds.committed()
COMMITTED = make_builds.most_spilled(TABLE)
#: What each flag has to be compiled for: both False and True, unless it is here.
TUNED = {"BLOCK", "BLOCK_M", "BLOCK_N", "BLOCK_S", "MOST_SPLITS"}
VALUES: dict[str, set[Any]] = {
    "MASK_KIND": {0, 1, 2},
    "BLOCK_D": {16, 64, 128, 256},
    "BLOCK_DV": {16, 64, 128, 256},
}
NARROWER: dict[tuple[str, str], set[Any]] = {
    ("classify", "MASK_KIND"): {1, 2},
    ("mask_gradient", "MASK_KIND"): {2},
    ("mask_gradient", "FOLD"): {False},
    ("mask_gradient", "BLOCK_D"): {64, 128},
    ("mask_gradient", "BLOCK_DV"): {64, 128},
    ("merge", "BLOCK_DV"): {64, 128},
}
CASES = [(problem, far, device) for problem, far in make_builds.PROBLEMS for device in make_builds.DEVICES]
Futures = dict[tuple[str, bool, str], Future[list[Build]]]


@pytest.fixture(scope="module")
def building() -> Iterator[Futures]:
    with ahead.pool() as pool:
        yield make_builds.submitted(pool)


def label(case: object) -> str:
    return "far" * case if isinstance(case, bool) else str(case)


@pytest.mark.parametrize(("problem", "far", "device"), CASES, ids=label)
def test_every_kernel_compiles_and_fits(building: Futures, problem: str, far: bool, device: str) -> None:
    builds = building[problem, far, device].result()
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


@pytest.mark.parametrize("device", make_builds.DEVICES)
def test_the_problems_take_every_branch(device: str) -> None:
    gpu = Device.named(device)
    seen = defaultdict(set)
    kernels = set()
    dtypes = set()
    for text, far in make_builds.PROBLEMS:
        problem = Problem.parse(text)
        assert str(problem) == text
        dtypes.add(problem.dtype)
        for launch in ahead.launches(problem, gpu, far=far):
            kernels.add(launch.kernel)
            for flag, value in launch.flags.items():
                if flag.isupper():  # the others are Triton's own
                    seen[launch.kernel.__name__, flag].add(value)
    assert dtypes == {"float16", "bfloat16", "float32"}
    assert len(kernels) == 8
    for (kernel, flag), values in seen.items():
        if flag in TUNED or (flag == "TMA" and gpu.capability == (8, 0)):
            continue
        expected = NARROWER.get((kernel, flag), VALUES.get(flag, {False, True}))
        assert expected <= values, f"{kernel} is not compiled for every {flag}: {values}"


def test_the_table_holds_what_is_built() -> None:
    problems = {f"{problem}{' far' * far}" for problem, far in make_builds.PROBLEMS}
    assert {problem for _, _, problem in COMMITTED} == problems


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def test_launches_are_recorded_and_not_made() -> None:
    start = run.start
    names = [launch.kernel.__name__ for launch in ahead.launches(PLAIN, Device.named("h200"))]
    assert names == ["forward", "prepare", "query_gradient", "key_gradients"]
    assert run.start is start


PLAIN = Problem.parse("b4.h16.s1024.d128.bf16.causal.grad")


@pytest.mark.parametrize(
    ("problem", "device", "far", "tma", "wide"),
    [
        (PLAIN, "h200", False, True, False),
        (PLAIN, "a100", False, False, False),
        (PLAIN, "h200", True, True, True),
        (PLAIN.replace(key=ahead.Memory(align=8)), "h200", False, False, False),
        (PLAIN.replace(value=ahead.Memory(strided=True)), "b200", False, False, False),
        (PLAIN.replace(value=ahead.Memory(expanded=True)), "b200", True, False, True),
    ],
)
def test_stand_ins_lie_as_the_problem_says(problem: Problem, device: str, far: bool, tma: bool, wide: bool) -> None:
    forward = ahead.launches(problem, Device.named(device), far=far)[0]
    assert (forward.flags["TMA"], forward.flags["WIDE"]) == (tma, wide)


def test_the_processor_has_no_builds() -> None:
    with pytest.raises(ValueError, match="NVIDIA"):
        list(ahead.builds(PLAIN, Device.cpu()))
