"""The fixed cases: every key is some row's target, at every length, within what a machine has."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain

import numpy as np
import pytest

from attnswitch.errors import Unsupported
from attnswitch.verify import Case, Space, examine
from attnswitch.verify.checks import named
from attnswitch.verify.checks.probes import _targets
from attnswitch.verify.drawing import lattice
from attnswitch.verify.drawing.placings import FAR
from attnswitch.verify.trial import Subject

PROBES = list(lattice.probes(Space(), False))
LONG = list(lattice.long(Space(), False))
EDGES = sorted({n for power in range(14) for n in (2**power - 1, 2**power, 2**power + 1) if 0 < n <= 8193})


def selected(case: Case) -> set[int]:
    """Keys that some row of a probe selects."""
    found = _targets(Subject(case))
    return set(np.unique(found).tolist())


def test_every_length_is_there() -> None:
    assert {case.seq_k for case in PROBES} == {*EDGES, 16384, 32769, 65535, 131072}
    assert {case.seq_k for case in LONG} == {16384, 32769, 65535, 131072}
    assert {case.dtype for case in PROBES} == set(Space().dtypes)


@pytest.mark.parametrize("length", [n for n in EDGES if n <= 1025] + [2049, 4097, 8193])
def test_every_key_is_some_rows_target(length: int) -> None:
    keys: dict[int, set[int]] = defaultdict(set)
    for case in PROBES:
        if case.seq_k == length and not case.causal:
            keys[length] |= selected(case)
    assert keys[length] == set(range(length))


@pytest.mark.parametrize("length", EDGES)
def test_a_decoding_step_selects_the_last_key(length: int) -> None:
    (step,) = (case for case in PROBES if case.seq_k == length and case.causal)
    assert (step.seq_q, step.alignment) == (1, "bottom_right")
    assert len(selected(step)) == min(4, length)
    assert max(selected(step)) == length - 1


@pytest.mark.parametrize("case", PROBES, ids=lambda case: f"{case.seq_q}x{case.seq_k}")
def test_a_probe_has_room_for_every_key(case: Case) -> None:
    """So many bits that no two keys have the same code, and as many digits as its number has."""
    assert case.check == "one-hot"
    assert case.dim_qk == case.dim_v  # or fused kernels refuse it
    assert named("one-hot").applies(case)
    assert 2 ** (case.dim_qk // 2) >= case.seq_k
    assert 128 ** min(case.dim_v, 3) >= case.seq_k


@pytest.mark.parametrize("on_gpu", [False, True])
def test_they_are_the_same_every_time(on_gpu: bool) -> None:
    for made in (lattice.probes, lattice.long):
        first, again = (list(made(Space(), on_gpu)) for _ in range(2))
        assert first == again
        assert len({case.replace(data_seed=0, dtype="float32") for case in first}) >= len(first) // 3
    assert list(lattice.extremes(Space())) == list(lattice.extremes(Space()))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("libraries", [("torch", "numpy"), ("numpy",)])
def test_they_are_cases(libraries: tuple[str, ...], on_gpu: bool) -> None:
    space = Space(libraries=libraries, dtypes=("float32", "float64"))
    fixed = chain(lattice.probes(space, on_gpu), lattice.long(space, on_gpu), lattice.extremes(space))
    for case in chain(fixed, lattice.heads(space), lattice.sums(space)):
        case.problem()
        assert case.library == libraries[0]
        assert case.dtype in space.dtypes
        assert named(case.check).applies(case), case
        assert not named(case.check).gpu


def test_on_a_cpu_they_are_small() -> None:
    """Within a gigabyte of float64 for operands and scores of any tile, and a few seconds each."""
    for case in (*PROBES, *LONG):
        assert case.work <= 2**30, case
        elements = case.batch * case.heads_q * (case.seq_q + case.seq_k) * max(case.dim_qk, case.dim_v)
        assert elements <= 2**26, case
    assert sum(case.work for case in PROBES) <= 2**33


def test_the_long_ones_have_different_laws() -> None:
    on_cpu, on_gpu = {case.check for case in LONG}, {case.check for case in lattice.long(Space(), True)}
    assert len(on_cpu) == len(LONG)
    assert on_gpu == {*lattice._LAWS, *lattice._CAUSAL_LAWS[True]}


def test_every_multiple_of_8_is_there_with_gradients() -> None:
    heads = list(lattice.heads(Space()))
    assert [(case.dim_qk, case.dim_v) for case in heads] == [(dim, dim) for dim in range(8, 257, 8)]
    assert {case.dtype for case in heads} == set(Space().dtypes)
    assert {case.grads for case in heads} == {"qkv"}


def test_sums_over_tiles_are_repeated_in_every_type() -> None:
    sums = list(lattice.sums(Space()))
    assert [case.dtype for case in sums] == list(Space().dtypes)
    assert {(case.check, case.seq_q > 128, case.causal) for case in sums} == {
        ("repeat", True, c) for c in (False, True)
    }


def test_extremes_pass_31_bits_and_65535_batches() -> None:
    every = list(lattice.extremes(Space(dtypes=("float64",))))
    assert max(case.batch for case in every) > 65535
    assert {role for case in every for role in ("key", "value") if getattr(case.placing, role) == FAR} == {
        "key",
        "value",
    }
    assert all(case.batch * case.heads_kv == 1 for case in every if FAR in (case.placing.key, case.placing.value))


@pytest.mark.parametrize("backend", ["tiled", "sdpa-flash"])
def test_probes_hold_at_tile_edges(backend: str) -> None:
    edges = [case for case in PROBES if case.seq_k in (63, 64, 65, 129, 1025)]
    for case in edges:
        (outcome,) = examine(case, (backend,), only=True)
        if outcome.verdict == "refused":  # of a torch before 2.11, grouped heads are: conftest skips
            raise Unsupported(" ".join(outcome.reasons))
        assert outcome.verdict == "verified", outcome
    assert len(edges) == 10


def test_a_target_is_a_key_that_the_row_sees() -> None:
    case = Case(batch=2, heads_kv=2, group=2, seq_q=9, seq_k=14, causal=True, window=(3, 0), lengths=(14, 2))
    found = _targets(Subject(case))
    for (b, _, i), target in np.ndenumerate(found):
        seen = [j for j in range(max(0, i - 3), i + 1) if j < (14, 2)[b]]
        assert (target in seen) if seen else target == -1
    assert math.prod(found.shape) == 2 * 4 * 9
