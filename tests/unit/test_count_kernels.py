"""fixtures/count_kernels.py draws what verify draws, caches of 8 bits among it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from attnswitch import Device
from attnswitch.machine import registry
from attnswitch.verify import Case

PATH = Path(__file__).parents[2] / "fixtures" / "count_kernels.py"
SPEC = importlib.util.spec_from_file_location("count_kernels", PATH)
assert SPEC is not None
assert SPEC.loader is not None
count_kernels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(count_kernels)


@pytest.mark.parametrize("cache", ["", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("varlen", [False, True])
def test_a_case_lies_as_its_call_has_it(cache: str, varlen: bool) -> None:
    queries = (1, 2) if varlen else None
    case = Case(
        batch=2,
        seq_q=2,
        seq_k=32,
        lengths=(3, 32),
        page=16,
        cache=cache,
        scales="page" if cache else "",
        query_lengths=queries,
    )
    problem = count_kernels.lying(case)
    assert (problem.page, problem.cache, problem.varlen) == (16, cache, varlen)


def test_problems_are_counted_by_what_they_launch() -> None:
    problems = count_kernels.drawn(30, 0, "h200")
    launched = list(count_kernels.variants(registry.loaded("cuda"), problems, Device.named("h200")))
    assert 0 < len(launched) <= 30
    assert all(launched)
