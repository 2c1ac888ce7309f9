"""Which generator draws a dropout seed where the caller gives none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch.call.seeds import drawn_seed


class OfCuda:
    """What is asked of a CUDA generator, with its rule that offsets move by fours."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: no machine of CI has one."""

    is_cuda = True
    device = SimpleNamespace(index=1)  # type: ignore[assignment]


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[OfCuda]:
    found = [OfCuda(7), OfCuda(2**64 - 1)]
    monkeypatch.setattr(torch.cuda, "default_generators", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def on_gpu() -> Any:
    return torch.zeros(1).as_subclass(OnGpu)


def test_a_gpu_s_own_generator_draws(generators: list[OfCuda]) -> None:
    before = torch.get_rng_state()
    drawn = [drawn_seed(on_gpu()) for _ in range(1000)]
    assert (generators[0].offset, generators[1].offset) == (0, 4000)
    assert torch.equal(torch.get_rng_state(), before), "the CPU's generator moved"
    assert len(set(drawn)) == 1000
    assert all(0 <= seed < 2**63 for seed in drawn)
    ones = [seed.bit_count() for seed in drawn]
    assert 30 < sum(ones) / len(ones) < 33, "seeds of offsets side by side are far apart"


def test_the_same_state_draws_the_same(generators: list[OfCuda]) -> None:
    first = [drawn_seed(on_gpu()) for _ in range(3)]
    generators[1].offset = 0
    assert [drawn_seed(on_gpu()) for _ in range(3)] == first
    generators[1].offset, generators[1].seed = 0, 8
    assert not set(first) & {drawn_seed(on_gpu()) for _ in range(3)}


def test_ranks_with_seeds_of_their_own_have_masks_of_their_own(generators: list[OfCuda]) -> None:
    torch.manual_seed(5)
    seeds = set()
    for rank in range(8):  # as tensor-parallel programs seed their GPUs, beside one seed of the CPU
        generators[1].seed, generators[1].offset = 1000 + rank, 0
        seeds.add(drawn_seed(on_gpu()))
    assert len(seeds) == 8


def test_a_capture_asks_the_cpu_s(generators: list[OfCuda], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.manual_seed(3)
    first = drawn_seed(on_gpu())
    torch.manual_seed(3)
    assert drawn_seed(torch.zeros(1)) == first
    assert generators[1].offset == 0


@pytest.mark.parametrize("beside", [torch.zeros(1), np.zeros(1)], ids=["torch", "numpy"])
def test_the_cpu_s_generator_draws_for_the_cpu(beside: Any) -> None:
    torch.manual_seed(3)
    first, second = drawn_seed(beside), drawn_seed(beside)
    torch.manual_seed(3)
    assert (drawn_seed(beside), drawn_seed(beside)) == (first, second)
    assert first != second


def test_another_default_device_changes_nothing() -> None:
    torch.manual_seed(3)
    first = drawn_seed(torch.zeros(1))
    torch.manual_seed(3)
    with torch.device("meta"):
        assert drawn_seed(torch.zeros(1)) == first


def test_threads_have_seeds_of_their_own(generators: list[OfCuda]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            drawn = list(pool.map(lambda _: drawn_seed(on_gpu()), range(20_000)))
    finally:
        sys.setswitchinterval(before)
    assert len(set(drawn)) == len(drawn)


def test_numpy_s_draws_where_torch_is_not_loaded() -> None:
    said = (
        "import sys, numpy; from attnswitch.call.seeds import drawn_seed; x = numpy.zeros(1)\n"
        "numpy.random.seed(3); first = drawn_seed(x); numpy.random.seed(3)\n"
        "assert 'torch' not in sys.modules and drawn_seed(x) == first != drawn_seed(x)"
    )
    subprocess.run([sys.executable, "-c", said], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])  # a graph draws from the CPU's
def test_dropout_follows_the_gpu_s_seed(compiled: bool) -> None:
    def attend(query: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attnswitch.attention(query, query, query, dropout_p=0.5, backend="triton")
        return out

    call = torch.compile(attend) if compiled else attend
    query = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    made = []
    for seed in (1, 2, 1):
        (torch.manual_seed if compiled else torch.cuda.manual_seed)(seed)
        made.append((call(query), call(query)))
    for one, again in zip(made[0], made[2], strict=True):
        assert torch.equal(one, again)
    assert not torch.equal(made[0][0], made[1][0])
    assert not torch.equal(*made[0])
