"""Cases within the regimes that backends name: how often they are drawn, and that they reach the kernels meant."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from attnswitch.machine import registry
from attnswitch.machine.backend import Regime
from attnswitch.machine.device import Device
from attnswitch.verify import Case, Failure, Outcome, Plan, Space, Target, run
from attnswitch.verify.drawing import strategies
from attnswitch.verify.session import worker
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import targets
from attnswitch.verify.truth.exact import HEAD_SCORES

families = importlib.import_module("attnswitch.backends.cuda.families")
config = importlib.import_module("attnswitch.backends.cuda.config")
HopperTile = importlib.import_module("attnswitch.backends.cuda.hopper.tiles").HopperTile
REGIME = Regime(("float32",), ((32, 32), (64, 48)), (64, 96), queries=20, products=2**22)


def space_of(device: str, *backends: str) -> Space:
    return targets((device,), backends)[0].space


def within_one(space: Space, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases of which each lies within one of the space's regimes."""
    monkeypatch.setattr(strategies, "SHARE", 1)
    return draw(replace(space, libraries=("torch",), checks=()), 0, count)


def forward(case: Case, device: Device) -> str:
    """Which forward the ``cuda`` backend takes, as far as sizes and features say; none of heads that fit no tile."""
    if max(case.dim_qk, case.dim_v) > 256:
        return "refused"
    tile = next(config.configs(case.problem(), device)).forward
    return "hopper" if isinstance(tile, HopperTile) else "generic" if tile.generic else "portable"


def test_sizes_are_what_a_regime_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(dtypes=("float64", "float32"), regimes=(REGIME,))
    cases = [case for case in within_one(space, 300, monkeypatch) if not case.unseeded]
    for case in cases:
        assert case.dtype == "float32"
        assert (case.dim_qk, case.dim_v) in REGIME.dims
        assert REGIME.queries <= case.seq_q <= space.longest
        assert case.seq_k <= space.longest
        assert case.group * case.seq_q * case.seq_k <= space.scores
        assert case.work <= space.large
        assert case.batch * case.heads_q * case.seq_q * case.seq_k * (case.dim_qk + case.dim_v) >= REGIME.products
        assert case.lengths is None or len(case.lengths) == case.batch
    for length in ("seq_q", "seq_k"):
        lengths = [getattr(case, length) for case in cases]
        for tile in REGIME.tiles:
            assert {0, 1, tile - 1} <= {n % tile for n in lengths if n > 2 * tile}, "several tiles and their edges"
    for met in ("group", "heads_kv", "batch"):
        assert len({getattr(case, met) for case in cases}) > 2
    assert sum(bool(case.grads) for case in cases) > 0.6 * len(cases)


def test_the_judge_knows_the_gradients_of_one_key_head() -> None:
    assert Space().scores <= HEAD_SCORES


def test_the_share_is_as_stated_and_none_without_regimes() -> None:
    plain, some = Space(), Space(regimes=(REGIME,))
    assert [case.dtype for case in draw(plain, 0, 200)] != [case.dtype for case in draw(some, 0, 200)]
    large = [case for case in draw(some, 0, 800) if case.work > plain.work and not case.unseeded]
    assert 0.6 / strategies.SHARE < len(large) / 800 < 1.4 / strategies.SHARE
    assert all(case.work <= plain.work for case in draw(plain, 0, 200) if not case.unseeded)


def test_a_regime_of_other_types_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(dtypes=("float64",), regimes=(REGIME,))
    assert all(case.work <= space.work for case in within_one(space, 40, monkeypatch))


def test_backends_name_regimes_by_device() -> None:
    hopper, ampere = (space_of(device, "cuda").regimes for device in ("h100", "a100"))
    assert len(hopper) > len(ampere) > 0
    assert space_of("h100", "triton", "sdpa-math").regimes
    assert {*space_of("h100", "auto").regimes} >= {*hopper}
    assert space_of("h100", "sdpa-math", "tiled").regimes == ()
    assert space_of("cpu", "tiled", "auto").regimes == ()
    assert space_of("cpu", "triton").regimes == ()
    assert space_of("cuda:63", "cuda").regimes == ()  # it is not here


def test_a_plug_in_that_cannot_name_its_regimes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.loaded("triton")), "regimes", lambda *_: 1 / 0)
    assert space_of("h100", "triton").regimes == ()
    assert space_of("h100", "triton", "cuda").regimes == space_of("h100", "cuda").regimes != ()


def test_short_cases_lie_in_no_regime() -> None:
    (target,) = targets(("h100",), ("cuda",), longest=16)
    assert target.space.regimes == ()


def test_hoppers_kernels_get_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sizes and features: before there were regimes, one problem in eighty was theirs."""
    device = Device.named("h100")
    space = space_of("h100", "cuda")
    drawn = draw(replace(space, checks=()), 0, 800)
    before = draw(replace(space, checks=(), regimes=()), 0, 800)
    aligned = {"contiguous", "transposed", "packed", "garbage"}

    def share(cases: list[Case]) -> float:
        """Of those whose operands lie as its loads ask."""
        lying = (c for c in cases if {c.placing.query, c.placing.key, c.placing.value} <= aligned)
        return sum(forward(case, device) == "hopper" for case in lying) / len(cases)

    assert share(before) < 0.025
    assert share(drawn) > 0.07
    every = within_one(replace(space, regimes=space.regimes[:1]), 300, monkeypatch)
    assert sum(forward(case, device) == "hopper" for case in every) > 0.8 * len(every)
    backward = [case for case in every if case.grads and not families.against_hopper_backward(case.problem(), device)]
    assert len(backward) > 0.2 * len(every)
    for feature in ("window", "mask", "lengths", "softcap", "dropout", "causal"):
        assert any(getattr(case, feature) for case in every if forward(case, device) == "hopper"), feature


def test_the_others_are_no_longer_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    device, space = Device.named("a100"), space_of("a100", "cuda")
    found = [forward(case, device) for case in within_one(space, 200, monkeypatch)]
    assert found.count("portable") > 0.95 * len(found)


def test_the_emulator_gets_hoppers_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_CUDA_EMULATE", "1")
    device, space = Device.cpu(), space_of("cpu", "cuda")
    drawn = within_one(space, 200, monkeypatch)
    assert max(max(case.seq_q, case.seq_k) for case in drawn) == space.longest == 140
    assert max(case.work for case in drawn) <= 2**20
    found = [forward(case, device) for case in drawn]
    assert found.count("hopper") > 0.25 * len(found)
    assert sum(bool(next(config.configs(case.problem(), device)).backward) for case in drawn) > 0.1 * len(drawn)


def test_a_failure_within_a_regime_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past two tiles of 96 keys, which cases outside it do not have together with so many queries."""

    def examine(case: Case, backends: Sequence[str], device: str = "cpu", **_: Any) -> list[Outcome]:
        bad = case.seq_k > 192 and case.seq_q >= 20 and case.work > 2**21
        failure = Failure("reference", "wrong on purpose", "out", (0,), 1.0, 2.0, 0.5) if bad else None
        return [Outcome(case, b, device, "mismatch" if bad else "verified", b, failure=failure) for b in backends]

    monkeypatch.setattr(worker, "examine", examine)
    space = Space(libraries=("numpy",), dtypes=("float32",), regimes=(REGIME,))
    report = run(Plan((Target("cpu", ("one",), space),), 60, 0))
    (found,) = report.failures
    case = found.outcome.case
    assert case.seq_k == 193
    assert (case.mask, case.window, case.lengths, case.grads, case.data) == (None, None, None, "", "normal")


def test_every_backend_of_the_table_names_regimes_that_can_be_drawn() -> None:
    for device in (Device.cpu(), *map(Device.named, ("h100", "a100", "b200", "t4"))):
        for name in registry.names():
            for regime in registry.loaded(name).regimes(device):
                assert regime.tiles
                assert regime.often > 0
                assert regime.queries <= 2 * max(regime.tiles)
                assert {*regime.dtypes} <= {"float16", "bfloat16", "float32", "float64"}
