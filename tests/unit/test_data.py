"""The recipe's numbers: the same bits in every library and on every machine, and exact in the storage type."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
from attnswitch.verify.drawing.data import DISTRIBUTIONS, operands
from attnswitch.verify.drawing.generator import hashed, normal, rounded, uniform
from attnswitch.verify.truth import oracle

NUMPY_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
DTYPES = tuple(NUMPY_DTYPES)
SMALL = Case(batch=2, heads_kv=2, group=2, seq_q=5, seq_k=17, dim_qk=8, dim_v=6, data_seed=3)

#: What a case may add to its distribution, each of which takes its own way through ``operands``.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"lse": True},
    "poison": {"poison": True, "lengths": (3, 17)},
    "bool-mask": {"mask": MaskRecipe("bool", "bhqk", 4, "blocks")},
    "float-mask": {"mask": MaskRecipe("float32", "hqk", 4, "dead-rows")},
    "finite-min-mask": {"mask": MaskRecipe("float16", "bk", 4, "finite-min")},
    "minus-1e9-mask": {"mask": MaskRecipe("bfloat16", "qk", 2, "minus-1e9")},
    "expanded": {"placing": Placing("expanded-batch", "expanded-heads", "expanded-rows")},
    "own-dropout": {"dropout": 0.5, "dim_v": 17},
    "one-batch": {"batch": 1},
    "no-keys": {"seq_k": 0},
    "no-queries": {"seq_q": 0},
    "no-batch": {"batch": 0},
}

#: sha256 of the little-endian float64 or int64 bytes, first half. A change here is a change of every saved case.
GOLDEN_STREAMS = {
    ("hashed", 0, 1): "780b5a058737ca88",
    ("hashed", 2**64 - 1, 7): "e53ebd0a3a9bd9cf",
    ("uniform", 0, 1): "62523dbb456528be",
    ("normal", 0, 1): "479ca2c41e530172",
    ("normal", 255, 5): "01b655edf77e9b4c",
}
GOLDEN_OPERANDS = {
    "normal": "34d16ed0e40f8675",
    "integers": "0b3fc0f6559a9af9",
    "uniform": "eabc605c3fd602bd",
    "equal": "13393d5d97e9472c",
    "negative": "e1cbc361b170cff3",
    "large": "8ac99481ed5d7fbc",
    "outlier": "a2bce7236b579e9b",
    "onehot": "4de5be557ca78804",
    "needle": "fae0038a0953cfd9",
    "rising": "e697f1acae5d2d7b",
    "falling": "4ff7320b218a595f",
    "activations": "9f586ac0025027c7",
}


def digest(*arrays: Any) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
        sha.update(little.tobytes())
    return sha.hexdigest()[:16]


def drawn(name: str, seed: int, stream: int) -> Any:
    if name == "hashed":
        return hashed(np, seed, stream, 1000)
    return {"uniform": uniform, "normal": normal}[name](np, seed, stream, (10, 100))


@pytest.mark.parametrize(("name", "seed", "stream"), GOLDEN_STREAMS)
def test_streams_are_pinned(name: str, seed: int, stream: int) -> None:
    assert digest(drawn(name, seed, stream)) == GOLDEN_STREAMS[name, seed, stream]


@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_operands_are_pinned(data: str) -> None:
    case = SMALL.replace(dtype="float16", data=data, lse=True, mask=MaskRecipe("float32", "hqk", 4, "dead-rows"))
    made = operands(case)
    assert digest(*(made[role] for role in sorted(made))) == GOLDEN_OPERANDS[data]


def test_another_process_makes_the_same_bits() -> None:
    script = (
        "import hashlib, numpy as np\n"
        "from attnswitch.verify.drawing.generator import normal\n"
        "print(hashlib.sha256(normal(np, 0, 1, (10, 100)).tobytes()).hexdigest()[:16])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == digest(normal(np, 0, 1, (10, 100)))


@pytest.mark.parametrize(("seed", "stream"), [(0, 1), (1, 2), (255, 8), (2**63, 3), (2**64 - 1, 7)])
def test_torch_draws_the_same_bits(seed: int, stream: int) -> None:
    np.testing.assert_array_equal(hashed(torch, seed, stream, 999).numpy(), hashed(np, seed, stream, 999))
    for draw in (uniform, normal):
        ours = draw(torch, seed, stream, (3, 5, 7))
        assert ours.dtype == torch.float64
        np.testing.assert_array_equal(ours.numpy(), draw(np, seed, stream, (3, 5, 7)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_torch_makes_the_same_operands(data: str, variant: str) -> None:
    case = SMALL.replace(dtype="bfloat16", data=data, **VARIANTS[variant])
    ours, theirs = operands(case), operands(case, torch)
    assert ours.keys() == theirs.keys()
    for role, array in ours.items():
        # Bits, so that -0.0 is not 0.0; NaN differ in their payload, which no library promises.
        got = theirs[role].numpy()
        assert (got.dtype, got.shape) == (array.dtype, array.shape), role
        np.testing.assert_array_equal(got, array, err_msg=role)
        if array.dtype == np.float64:
            np.testing.assert_array_equal(np.signbit(got)[got == 0], np.signbit(array)[array == 0], err_msg=role)


def test_seeds_and_streams_differ() -> None:
    streams = [tuple(hashed(np, seed, stream, 16)) for seed in range(20) for stream in range(1, 9)]
    words = [word for stream in streams for word in stream]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_values_are_exact_in_the_storage_type(data: str, dtype: str, variant: str) -> None:
    case = SMALL.replace(dtype=dtype, data=data, **VARIANTS[variant])
    made = operands(case)
    for role in ("query", "key", "value", "grad_out"):
        np.testing.assert_array_equal(made[role].astype(NUMPY_DTYPES[dtype]).astype(np.float64), made[role], role)
    if case.mask is not None and case.mask.dtype != "bool":
        mask = made["attn_mask"]
        np.testing.assert_array_equal(mask.astype(NUMPY_DTYPES[case.mask.dtype]).astype(np.float64), mask)
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    np.testing.assert_array_equal(made["grad_lse"].astype(lse_dtype).astype(np.float64), made["grad_lse"])
    assert made["grad_lse"].any() == (case.lse and made["grad_lse"].size > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_goes_to_a_nearest_value(dtype: str) -> None:
    """Over all magnitudes that the distributions reach, the subnormals of float16 among them."""
    x = normal(np, 11, 1, (4000,)) * 2.0 ** (np.arange(4000) % 40 - 30)
    ours = rounded(x, dtype)
    cast = x.astype(NUMPY_DTYPES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(ours.astype(NUMPY_DTYPES[dtype]).astype(np.float64), ours)
    # Where the two differ, it is a tie: both are equally near. float16 is rounded to its subnormals' grid first.
    allowed = np.abs(cast - x) + (2.0**-24 if dtype == "float16" else 0.0)
    assert (np.abs(ours - x) <= allowed).all()


def test_the_normal_is_normal() -> None:
    x = normal(np, 7, 1, (400_000,))
    assert abs(x.mean()) < 0.008  # 5 sigma of the mean
    assert x.std() == pytest.approx(1.0, abs=0.006)
    assert (x**3).mean() == pytest.approx(0.0, abs=0.02)
    assert (x**4).mean() == pytest.approx(2.9, abs=0.05)  # twelve uniforms: 3 - 6/5/12
    assert 4.0 < np.abs(x).max() <= 6.0
    np.testing.assert_array_equal(x * 2.0**16, np.round(x * 2.0**16))


def test_the_uniform_is_uniform() -> None:
    x = uniform(np, 7, 1, (100_000,))
    assert 0.0 <= x.min() < 1e-3
    assert 1 - 1e-3 < x.max() < 1.0
    share = np.histogram(x, 10, (0.0, 1.0))[0] / x.size
    np.testing.assert_allclose(share, 0.1, atol=0.005)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "dim", "scale"),
    [(1, 8, None), (2, 2, None), (17, 8, None), (64, 7, 0.125), (65, 8, 1.0), (129, 64, None), (1000, 16, 2.0)],
)
def test_onehot_selects_one_key(keys: int, dim: int, scale: float | None, dtype: str) -> None:
    case = Case(seq_q=9, seq_k=keys, dim_qk=dim, dim_v=3, dtype=dtype, scale=scale, data="onehot", data_seed=5)
    answer = oracle.answer(case, operands(case))
    target = answer.p.argmax(-1)
    others = answer.p.copy()
    np.put_along_axis(others, target[..., None], 0.0, -1)
    assert others.sum(-1).max() < 1e-30  # so the weight of the target is above 1 - 1e-30
    np.testing.assert_array_equal(target[0, 0], (np.arange(9) * 7 + 5 + keys - 1) % keys)
    np.testing.assert_array_equal(answer.values["out"][0, 0, :, 0], target[0, 0] % 251 - 125.0)


def test_distributions_do_what_they_say() -> None:
    case = SMALL.replace(dtype="float64", seq_k=40)

    def scores(data: str) -> Any:
        made = operands(case.replace(data=data))
        return oracle.answer(case.replace(data=data), made).s

    assert np.ptp(scores("equal"), axis=-1).max() < 1e-12
    assert np.abs(scores("equal")).min() > 1e-3
    assert scores("negative").max() < -20.0
    assert 8.0 < scores("large").std() < 32.0
    assert (scores("needle").argmax(-1) == 39).all()
    assert np.diff(scores("rising").mean((0, 1, 2))[[0, 13, 26, 39]]).min() > 0.5
    assert np.diff(scores("falling").mean((0, 1, 2))[[0, 13, 26, 39]]).max() < -0.5
    integers = operands(case.replace(data="integers"))
    assert set(np.unique(integers["query"])) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert 0.6 < (integers["key"] == 0).mean() < 0.95


def test_poison_is_one_key_and_one_value() -> None:
    keys = []
    for seed in range(20):
        made = operands(SMALL.replace(poison=True, data_seed=seed))
        keys.append(int(np.isnan(made["key"]).sum()))
        assert np.isnan(made["value"]).sum() == 1
        assert np.isinf(made["value"]).sum() == 1
        assert np.isfinite(made["query"]).all()
        assert np.isfinite(made["grad_out"]).all()
    assert set(keys) == {0, 1}


def test_poison_fills_what_lies_past_the_lengths() -> None:
    made = operands(SMALL.replace(poison=True, lengths=(3, 17)))
    for role in ("key", "value"):
        assert np.isnan(made[role][0, :, 3:]).all()
        assert np.isfinite(made[role][1]).mean() > 0.9


def test_own_dropout_shows_the_weights() -> None:
    """V = I, so that the output is the dropped softmax itself."""
    made = operands(SMALL.replace(dropout=0.5, dim_v=17))
    np.testing.assert_array_equal(made["value"], np.broadcast_to(np.eye(17), made["value"].shape))
    seeded = operands(SMALL.replace(dropout=0.5, dropout_seed=1, dim_v=17))
    assert not np.array_equal(seeded["value"], made["value"])


@pytest.mark.parametrize("draw", [normal, uniform])
def test_parts_join_to_what_one_part_is(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(np, 3, 1, (1000,))
    module = importlib.import_module("attnswitch.verify.drawing.generator")
    monkeypatch.setattr(module, "_BLOCK", 64)
    assert np.array_equal(draw(np, 3, 1, (1000,)), whole)
    assert draw(np, 3, 1, (0,)).shape == (0,)
