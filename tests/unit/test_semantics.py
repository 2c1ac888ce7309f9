"""Each clause of the contract, through ``attention`` on every backend of the CPU, against loops over single numbers."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnswitch
from attnswitch import Unsupported
from attnswitch.problem.philox import keep_mask

CPU = ("sdpa-flash", "sdpa-math", "tiled", "reference")
every_backend = pytest.mark.parametrize("backend", CPU)

#: What a backend does not take, with a word of its reason.
LSE = {"sdpa-math": "return_lse"}
SOFTCAP = dict.fromkeys(("sdpa-flash", "sdpa-math"), "softcap=")
SEED = dict.fromkeys(("sdpa-flash", "sdpa-math"), "seed")
NONFINITE = dict.fromkeys(("sdpa-flash", "sdpa-math"), "NaN or inf")

rng = np.random.default_rng(2)
Q, K, V, G = (rng.standard_normal(s) for s in ((2, 4, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 4, 8)))


def formula(
    q: Any,
    k: Any,
    v: Any,
    *,
    attn_mask: Any = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: Any = None,
    key_lengths: Any = None,
    scale: Any = None,
    softcap: Any = 0,
    keep: Any = 1,
) -> tuple[Any, Any]:
    """Output and lse, one row after the other. ``keep`` multiplies the weights."""
    (batch, heads, lq, d), (_, shared, lk, _) = q.shape, k.shape
    mask, keep = (np.broadcast_to(x, (batch, heads, lq, lk)) for x in (True if attn_mask is None else attn_mask, keep))
    left, right = window or (None, None)
    out, lse = np.zeros((batch, heads, lq, v.shape[3])), np.full((batch, heads, lq), -math.inf)
    for b, h, i in np.ndindex(batch, heads, lq):
        kv, length = h * shared // heads, lk if key_lengths is None else key_lengths[b]
        at = i + (length - lq if causal_alignment == "bottom_right" else 0)
        weights = {}
        for j in range(length):
            here = mask[b, h, i, j]
            hidden = not here if mask.dtype == bool else here == -math.inf
            near = (left is None or j >= at - left) and (right is None or j <= at + right)
            if hidden or not near or (is_causal and j > at):
                continue
            s = float(q[b, h, i] @ k[b, kv, j]) * (d**-0.5 if scale is None else float(scale))
            s = softcap * math.tanh(s / softcap) if softcap else s
            weights[j] = math.exp(s if mask.dtype == bool else s + float(here))
        if weights:
            lse[b, h, i] = math.log(sum(weights.values()))
            out[b, h, i] = sum(w * keep[b, h, i, j] * v[b, kv, j] for j, w in weights.items()) / sum(weights.values())
    return out, lse


def agree(got: Any, wanted: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


def run(backend: str | None, refused: dict[str, str], *arrays: Any, **options: Any) -> Any:
    """The result, or None from a backend that refuses, for the reason that it should."""
    if backend in refused:
        with pytest.raises(Unsupported) as refusal:
            attnswitch.attention(*arrays, backend=backend, **options)
        if not re.search(refused[backend], str(refusal.value)):
            raise refusal.value  # an error, but of an earlier torch's known divergence (conftest)
        return None
    return attnswitch.attention(*arrays, backend=backend, **options)


def check(backend: str, q: Any, k: Any, v: Any, refused: dict[str, str] | None = None, **options: Any) -> None:
    """Output and lse are the formula's, or refused."""
    refused = refused or {}
    out, lse = formula(q, k, v, **options)
    if (found := run(backend, refused, q, k, v, **options)) is not None:
        agree(found, out)
    if (found := run(backend, LSE | refused, q, k, v, return_lse=True, **options)) is not None:
        agree(found[0], out)
        agree(found[1], lse)


# -- scores ------------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    ("heads", "shared", "d", "dv"), [(4, 2, 8, 8), (4, 1, 8, 8), (3, 3, 1, 1), (2, 2, 5, 3), (1, 1, 3, 70)]
)
def test_heads_and_dimensions(backend: str, heads: int, shared: int, d: int, dv: int) -> None:
    shapes = ((2, heads, 3, d), (2, shared, 5, d), (2, shared, 5, dv))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    check(backend, q, k, v, {"sdpa-flash": "differ"} if d != dv else {})


@every_backend
@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 3, np.float32(0.25), np.array(2.0), 1e-300])
def test_any_finite_scale(backend: str, scale: Any) -> None:
    check(backend, Q, K, V, scale=scale)
    check(backend, Q, K, V, {"sdpa-flash": "scale="} if scale <= 0 else {}, scale=scale, is_causal=True)


@every_backend
def test_softcap_comes_before_the_mask(backend: str) -> None:
    check(backend, 5 * Q, K, V, SOFTCAP, softcap=2, attn_mask=3 * rng.standard_normal((4, 6)))


@every_backend
@pytest.mark.parametrize("softcap", [1e-45, 1e-200, 1e38, 1e200])
def test_softcaps_beyond_float32(backend: str, softcap: float) -> None:
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    if (out := run(backend, SOFTCAP, q, k, v, softcap=softcap)) is not None:
        agree(out, formula(Q, K, V, scale=None if softcap > 1 else 0)[0], 1e-6)


@every_backend
@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(6,), (1,), (4, 6), (4, 1), (4, 1, 6), (4, 4, 6), (2, 1, 1, 6), (2, 4, 4, 6), (1, 4, 1, 1)]
)
def test_masks(backend: str, shape: tuple[int, ...], dtype: str) -> None:
    mask = rng.random(shape) > 0.3 if dtype == "bool" else rng.standard_normal(shape)
    mask = mask.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    check(backend, Q, K, V, attn_mask=mask)
    check(backend, Q, K, V, attn_mask=mask, is_causal=True, key_lengths=[6, 3])


@every_backend
def test_lse_is_a_natural_logarithm_in_float32(backend: str) -> None:
    q, k = np.zeros((1, 1, 2, 4), np.float32), np.ones((1, 1, 7, 4), np.float32)
    if (found := run(backend, LSE, q, k, k, return_lse=True)) is not None:
        assert found[1].dtype == np.float32
        agree(found[1], math.log(7), 1e-6)


# -- who sees whom -----------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [None, [0, 5]], ids=["whole", "lengths"])
@pytest.mark.parametrize("lq", [1, 4, 6, 9])
def test_causal(backend: str, lq: int, lengths: Any, alignment: str) -> None:
    q = rng.standard_normal((2, 4, lq, 8))
    check(backend, q, K, V, is_causal=True, key_lengths=lengths, causal_alignment=alignment)


@every_backend
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [None, [4, 5]], ids=["whole", "lengths"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (1, None), (None, 1), (2, 1), (0, 3), (None, None)])
def test_windows(backend: str, window: Any, causal: bool, lengths: Any, alignment: str) -> None:
    for lq in (4, 8):
        q = rng.standard_normal((2, 4, lq, 8))
        check(backend, q, K, V, window=window, is_causal=causal, key_lengths=lengths, causal_alignment=alignment)


@every_backend
@pytest.mark.parametrize("side", [2**31, 2**62, sys.maxsize, 2**64])
def test_a_window_wider_than_any_sequence_is_unlimited(backend: str, side: int) -> None:
    check(backend, Q, K, V, window=(side, 1))
    check(backend, Q, K, V, window=(1, side), key_lengths=[4, 5], causal_alignment="bottom_right")
    check(backend, Q, K, V, window=(side, side), is_causal=True, causal_alignment="bottom_right")


DEAD: dict[str, dict[str, Any]] = {
    "bool mask": {"attn_mask": np.arange(4)[:, None] != np.array([1])},
    "float mask": {"attn_mask": np.where(np.arange(4) == 1, -np.inf, 0.5)[:, None] + np.zeros(6)},
    "length 0": {"key_lengths": [6, 0]},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right", "key_lengths": [6, 2]},
    "window": {"window": (0, 0), "key_lengths": [6, 2]},
}


@every_backend
@pytest.mark.parametrize("kind", DEAD)
def test_a_row_that_sees_nothing(backend: str, kind: str) -> None:
    check(backend, Q, K, V, **DEAD[kind])
    dead = formula(Q, K, V, **DEAD[kind])[1] == -np.inf
    assert dead.any()
    assert (attnswitch.attention(Q, K, V, backend=backend, **DEAD[kind])[dead] == 0).all()
    grads: Any = attnswitch.attention_backward(G, Q, K, V, backend=backend, **DEAD[kind])
    assert (grads.query[dead] == 0).all()
    assert (grads.value != 0).any()
    # It has no gradient to give, however large the one that it gets.
    loud = attnswitch.attention_backward(np.where(dead[..., None], 1e6, G), Q, K, V, backend=backend, **DEAD[kind])
    for quiet, other in zip(grads[:3], loud[:3], strict=True):
        np.testing.assert_array_equal(quiet, other)


@every_backend
@pytest.mark.parametrize("size", ["batch", "queries", "keys"])
def test_nothing_to_do(backend: str, size: str) -> None:
    b, lq, lk = 2 * (size != "batch"), 4 * (size != "queries"), 6 * (size != "keys")
    q, k, v, g = Q[:b, :, :lq], K[:b, :, :lk], V[:b, :, :lk], G[:b, :, :lq]
    every = {"is_causal": True, "causal_alignment": "bottom_right", "window": (1, 1), "key_lengths": [lk] * b}
    for options in ({}, every, {"attn_mask": np.ones((lq, lk), np.bool_)}, {"attn_mask": np.zeros((lq, 1))}):
        check(backend, q, k, v, **options)
        grads: Any = attnswitch.attention_backward(g, q, k, v, backend=backend, **options)
        assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
        assert all((x == 0).all() for x in grads[:3])


# -- NaN and inf -------------------------------------------------------------------------------------------------------

#: Ways to hide keys 4 and 5 from all four queries.
HIDING: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (None, 0)},
    "bool mask": {"attn_mask": np.tri(4, 6, dtype=np.bool_)},
    "float mask": {"attn_mask": np.where(np.tri(4, 6), 0.0, -np.inf)},
    "lengths": {"key_lengths": [4, 4]},
}


@pytest.mark.parametrize("backend", [None, *CPU])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", HIDING)
def test_what_is_hidden_never_leaks(backend: str | None, kind: str, poison: float) -> None:
    k, v = K.copy(), V.copy()
    k[:, :, 4:], v[:, :, 4:] = poison, poison
    if (out := run(backend, NONFINITE, Q, k, v, **HIDING[kind])) is None:
        return
    agree(out, formula(Q, K, V, **HIDING[kind])[0])
    grads: Any = attnswitch.attention_backward(G, Q, k, v, backend=backend, **HIDING[kind])
    clean: Any = attnswitch.attention_backward(G, Q, K, V, backend="reference", **HIDING[kind])
    for grad, wanted in zip(grads[:3], clean[:3], strict=True):
        agree(grad, wanted)


@every_backend
def test_nan_of_a_bias_shows_where_it_is_visible_only(backend: str) -> None:
    bias = np.zeros((4, 6))
    bias[0, 3] = bias[2, 1] = np.nan  # hidden by causal, and visible
    out = attnswitch.attention(Q, K, V, attn_mask=bias, is_causal=True, backend=backend)
    np.testing.assert_array_equal(np.isnan(out).all(-1), np.broadcast_to(np.arange(4) == 2, (2, 4, 4)))
    agree(np.delete(out, 2, axis=2), np.delete(formula(Q, K, V, is_causal=True)[0], 2, axis=2))


@every_backend
def test_visible_nan_and_inf_propagate(backend: str) -> None:
    k = K.copy()
    k[0, 0, 2, 3] = np.nan  # for query heads 0 and 1 of batch entry 0, from query 2 on
    rows = np.zeros((2, 4, 4, 8), np.bool_)
    rows[0, :2, 2:] = True
    if (out := run(backend, NONFINITE, Q, k, V, is_causal=True)) is not None:
        np.testing.assert_array_equal(np.isnan(out), rows)
    for poison, shows in ((np.nan, np.isnan), (np.inf, np.isposinf), (-np.inf, np.isneginf)):
        v = V.copy()
        v[0, 0, 2, 3] = poison
        if (out := run(backend, NONFINITE, Q, K, v, is_causal=True)) is not None:
            elements = rows & (np.arange(8) == 3)
            np.testing.assert_array_equal(shows(out), elements)
            assert np.isfinite(out[~elements]).all()


@every_backend
def test_a_softmax_over_nothing_but_minus_infinity_is_nan(backend: str) -> None:
    q, k = np.ones((1, 1, 1, 2)), np.full((1, 1, 3, 2), -np.inf)
    if (out := run(backend, NONFINITE, q, k, np.ones((1, 1, 3, 2)))) is not None:
        assert np.isnan(out).all()  # the keys are visible, so this is not a row that sees nothing


@pytest.mark.parametrize("backend", ["tiled", "reference"])  # torch's own backward promises no such thing
def test_nan_of_an_upstream_gradient_does_not_reach_hidden_keys(backend: str) -> None:
    g = G.copy()
    g[:, :, 1] = np.nan
    grads: Any = attnswitch.attention_backward(g, Q, K, V, is_causal=True, backend=backend)
    np.testing.assert_array_equal(np.isnan(grads.query).any((0, 1, 3)), [False, True, False, False])
    for grad in (grads.key, grads.value):
        np.testing.assert_array_equal(np.isnan(grad).any((0, 1, 3)), [True, True, False, False, False, False])


# -- masks that swallow the scores, and dropout ------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("level", [-1e9, 1e9, -3e4, float(np.finfo(np.float32).min), float(np.finfo(np.float64).min)])
def test_a_float_mask_of_one_large_value_throughout_a_row(backend: str, level: float) -> None:
    q, k, v, g = (x[:1, :1].astype(np.float32) for x in (0 * Q, K, V, G))
    mask = np.full((4, 6), level, np.float64 if abs(level) > 1e39 else np.float32)
    agree(
        attnswitch.attention(q, k, v, attn_mask=mask, backend=backend), np.repeat(v.mean(2, keepdims=True), 4, 2), 1e-6
    )
    p = np.full((4, 6), 1 / 6)
    dp = g[0, 0] @ v[0, 0].T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    grads: Any = attnswitch.attention_backward(g, q, k, v, attn_mask=mask, backend=backend)
    agree(grads.query[0, 0], ds @ k[0, 0] * 8**-0.5, 1e-5)
    agree(grads.value[0, 0], p.T @ g[0, 0], 1e-5)
    if backend == "sdpa-flash":
        with pytest.raises(Unsupported, match="gradient of attn_mask"):
            attnswitch.attention_backward(g, q, k, v, attn_mask=mask, mask_grad=True, backend=backend)
    else:
        grads = attnswitch.attention_backward(g, q, k, v, attn_mask=mask, mask_grad=True, backend=backend)
        agree(grads.attn_mask, ds, 1e-5)


@every_backend
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_seed_means_a_mask(backend: str, seed: int) -> None:
    b, h, i = np.ogrid[:2, :4, :4]
    keep = keep_mask(seed, 0.4, b, h, i, 0, 6) / 0.6
    options: dict[str, Any] = {"dropout_p": 0.4, "seed": seed}
    if (found := run(backend, SEED, Q, K, V, return_lse=True, **options)) is None:
        return
    out, lse = formula(Q, K, V, keep=keep)
    agree(found[0], out)
    agree(found[1], lse)
    # All weights are 1/6 here, so the gradient of the values counts the kept ones.
    grads: Any = attnswitch.attention_backward(np.ones_like(Q), 0 * Q, K, V, backend=backend, **options)
    agree(grads.value, np.repeat((keep / 6).reshape(2, 2, 2, 4, 6).sum((2, 3))[..., None], 8, -1))


@every_backend
def test_dropout_of_everything(backend: str) -> None:
    no_seed = {"sdpa-flash": "dropout_p=1.0"} | dict.fromkeys(("tiled", "reference"), "without a seed")
    if (out := run(backend, no_seed, Q, K, V, dropout_p=1.0)) is not None:
        assert (out == 0).all()
    if (found := run(backend, SEED, Q, K, V, dropout_p=1.0, seed=1, return_lse=True)) is not None:
        assert (found[0] == 0).all()
        agree(found[1], formula(Q, K, V)[1])
        grads: Any = attnswitch.attention_backward(G, Q, K, V, dropout_p=1.0, seed=1, backend=backend)
        assert all((grad == 0).all() for grad in grads[:3])


def test_dropout_without_a_seed_keeps_the_mean() -> None:
    q, v = np.zeros((1, 1, 400, 4)), np.eye(400)[None, None]
    out = attnswitch.attention(q, q, v, dropout_p=0.25)
    kept = out != 0
    agree(out[kept], 1 / (400 * 0.75), 1e-15)
    assert abs(kept.mean() - 0.75) < 0.01  # nine standard deviations
