"""The error bounds: rounding stays within them, and what is worse than the declared rounding does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnswitch.machine import registry
from attnswitch.machine.backend import Gradients, Inputs, Precision
from attnswitch.verify import Case, MaskRecipe, Outcome, Placing, check
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.drawing.generator import rounded
from attnswitch.verify.truth import oracle
from attnswitch.verify.truth.bounds import bounds

DTYPES = ("float16", "bfloat16", "float32", "float64")
PLAIN = Case(
    batch=2, heads_kv=2, group=2, seq_q=20, seq_k=40, dim_qk=32, dim_v=24, lse=True, grads="qkv", library="numpy"
)
BIAS = MaskRecipe("float32", "hqk", 4, "smooth")
ORDINARY = {
    "plain": PLAIN,
    "causal": PLAIN.replace(causal=True),
    "window": PLAIN.replace(causal=True, alignment="bottom_right", window=(5, 0)),
    "lengths": PLAIN.replace(lengths=(40, 3)),
    "bias": PLAIN.replace(mask=BIAS, grads="qkvm"),
    "softcap": PLAIN.replace(softcap=5.0),
    "large": PLAIN.replace(data="large"),
    "outlier": PLAIN.replace(data="outlier"),
    "activations": PLAIN.replace(data="activations"),
    "negative-scale": PLAIN.replace(scale=-0.25),
}
PRECISIONS = {
    "ieee": Precision(),
    "storage": Precision(weights="storage", group_sum="storage", statistics="lse"),
    "tf32": Precision(score_inputs="tf32"),
    "fast-exp": Precision(exp=2.0**-14),
    "double": Precision(accumulator="float64"),
}
RESULTS = ("out", "lse", "query", "key", "value")

Register = Callable[[str, str], None]


class Bench:
    """A backend that returns what a test wants, seen through the verifier's public door."""

    def __init__(self, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
        register("saboteur", "saboteurs:Saboteur")
        self.kind = type(registry.load("saboteur"))
        self.patch = monkeypatch

    def precision(self, precision: Precision) -> Bench:
        self.patch.setattr(self.kind, "precision", lambda *_: precision)
        return self

    def results(self, wrong: Callable[[str, Any], Any]) -> Bench:
        """Let every result, by name, pass through ``wrong``."""

        def out(_: Any, out: Any, lse: Any) -> Any:
            return wrong("out", out), wrong("lse", lse)

        def grads(_: Any, grads: Gradients) -> Gradients:
            return Gradients(*(x if x is None else wrong(n, x) for n, x in zip(Gradients._fields, grads, strict=True)))

        self.patch.setattr(self.kind, "out", out)
        self.patch.setattr(self.kind, "grads", grads)
        return self

    def inputs(self, change: Callable[[Inputs], Inputs]) -> Bench:
        """Let the forward see other inputs."""
        self.patch.setattr(self.kind, "inputs", lambda _, inputs: change(inputs))
        return self

    def check(self, case: Case) -> Outcome:
        return check(case, "saboteur")


@pytest.fixture
def bench(register: Register, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(register, monkeypatch)


def exact(case: Case) -> oracle.Answer:
    return oracle.answer(case, operands(case))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ORDINARY)
def test_bounds_are_positive_and_finite(name: str, dtype: str, precision: str) -> None:
    answer = exact(ORDINARY[name].replace(dtype=dtype))
    limits = bounds(answer, PRECISIONS[precision])
    assert limits.keys() == answer.values.keys()
    alive = answer.visible.any(-1)
    for result, limit in limits.items():
        assert limit.shape == answer.values[result].shape
        assert np.isfinite(limit).all(), result
        assert (limit[alive] > 0).all() if result in ("out", "lse") else (limit > 0).all(), result
        if result in ("out", "lse"):  # nothing rounds where there is nothing to see
            assert (limit[~alive] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_of_the_size_of_the_rounding(dtype: str) -> None:
    """A bound that lets everything pass would be finite as well."""
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
    answer = exact(PLAIN.replace(dtype=dtype))
    limits = bounds(answer, Precision(accumulator="float64" if dtype == "float64" else "float32"))
    assert unit / 16 < np.median(limits["out"]) < 300 * unit
    for role in ("query", "key", "value"):
        assert np.median(limits[role]) < 1500 * unit * np.abs(answer.values[role]).max()


def test_the_sum_of_heads_of_which_one_overflows_may_as_well(bench: Bench) -> None:
    case = PLAIN.replace(dtype="float16", data="large", heads_kv=1, seq_k=8, scale=200.0, data_seed=4)
    limit = bounds(exact(case), PRECISIONS["storage"])["key"]
    assert 0 < np.isinf(limit).sum() < limit.size
    assert np.isfinite(bounds(exact(case), PRECISIONS["ieee"])["key"]).all()

    def lost(which: str, x: Any) -> Any:
        return np.where(np.isinf(limit), np.copysign(np.inf, x), x) if which == "key" else x

    assert bench.precision(PRECISIONS["storage"]).results(lost).check(case).verdict == "verified"
    assert bench.precision(PRECISIONS["ieee"]).results(lost).check(case).verdict == "mismatch"


def test_bounds_grow_with_what_a_backend_admits() -> None:
    answer = exact(PLAIN.replace(dtype="bfloat16"))
    ieee = bounds(answer, Precision())
    for looser, results in (
        (Precision(weights="storage"), ("out", "query", "key", "value")),
        (Precision(score_inputs="tf32"), RESULTS),
        (Precision(group_sum="storage"), ("key", "value")),
        (Precision(exp=2.0**-14), RESULTS),
        (Precision(statistics="lse"), ()),
    ):
        limits = bounds(answer, looser)
        for result in RESULTS:
            assert (limits[result] >= ieee[result]).all(), (looser, result)
            if result in results:
                assert (limits[result] > ieee[result]).any(), (looser, result)
    tighter = bounds(answer, Precision(accumulator="float64"))
    assert all((tighter[result] <= ieee[result]).all() for result in RESULTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ORDINARY)
def test_no_error_passes(name: str, dtype: str, bench: Bench) -> None:
    """The exact answer, rounded once to the storage type, is right under any contract."""
    case = ORDINARY[name].replace(dtype=dtype)
    values = exact(case).values
    bench.precision(Precision(accumulator="float64"))
    outcome = bench.results(lambda result, x: values[result].astype(x.dtype)).check(case)
    assert (outcome.verdict, outcome.failure) == ("verified", None)
    assert max(outcome.ratios.values()) <= 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "softcap", "large"])
def test_four_times_the_bound_fails(name: str, result: str, sign: float, bench: Bench) -> None:
    case = ORDINARY[name]
    answer = exact(case)
    limits = bounds(answer, Precision())
    place = np.unravel_index(answer.values[result].size // 3, answer.values[result].shape)

    def wrong(which: str, x: Any) -> Any:
        made = answer.values[which].copy()
        if which == result:
            made[place] += sign * 4.0 * limits[which][place]
        return made.astype(x.dtype)

    outcome = bench.precision(Precision()).results(wrong).check(case)
    assert outcome.verdict == "mismatch"
    assert outcome.failure is not None
    label = result if result in ("out", "lse") else f"grad {result}"
    assert (outcome.failure.check, outcome.failure.result) == ("reference", label)
    assert outcome.failure.index == place
    assert outcome.failure.expected == pytest.approx(answer.values[result][place])
    assert outcome.failure.bound == limits[result][place]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", sorted(ORDINARY.keys() - {"large"}))
def test_half_precision_is_not_single(name: str, result: str, bench: Bench) -> None:
    """Results rounded through float16 behind a promise of float32.

    Not with large logits: their own rounding moves a gradient as far as float16 does.
    """
    case = ORDINARY[name]
    outcome = bench.results(lambda w, x: x.astype(np.float16).astype(x.dtype) if w == result else x).check(case)
    assert outcome.verdict == "mismatch"
    assert outcome.failure is not None
    label = result if result in ("out", "lse") else f"grad {result}"
    assert (outcome.failure.check, outcome.failure.result) == ("reference", label)


def tf32(inputs: Inputs) -> Inputs:
    """Query and key with eleven bits of significand, as tensor cores read them."""

    def rough(x: Any) -> Any:
        significand, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.round(significand * 2.0**11) / 2.0**11, exponent).astype(x.dtype)

    return inputs._replace(query=rough(inputs.query), key=rough(inputs.key))


@pytest.mark.parametrize("data", ["normal", "uniform", "large", "outlier"])
@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "bias"])
def test_tf32_is_caught_unless_declared(name: str, data: str, bench: Bench) -> None:
    case = ORDINARY[name].replace(data=data, placing=Placing("transposed"))
    bench.inputs(tf32)
    caught = bench.precision(Precision()).check(case)
    assert caught.verdict == "mismatch"
    assert caught.failure is not None
    assert caught.failure.check == "reference"
    assert caught.failure.result in ("out", "lse")
    declared = bench.precision(replace(Precision(), score_inputs="tf32")).check(case)
    assert (declared.verdict, declared.failure) == ("verified", None)
    assert max(declared.ratios.values()) > 0.01  # it is TF32 that the bound is about, and not far below


def test_tf32_keeps_what_has_few_bits(bench: Bench) -> None:
    """Integers survive it: no finding, since nothing was lost."""
    outcome = bench.inputs(tf32).precision(Precision()).check(PLAIN.replace(data="integers"))
    assert outcome.verdict == "verified"
    x = np.array([1.0 + 2.0**-10, 1.0 + 2.0**-12], np.float32)
    np.testing.assert_array_equal(tf32(Inputs(x, x, x)).query, rounded(x.astype(np.float64), "float16"))
