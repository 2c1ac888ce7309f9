"""A float mask that is far from 0 throughout a row shifts the scores, and softmax knows no shift.

In float32 a score of 1 beside -1e9 is gone. A backend may lose it, or take the shift out of the row first; but output
and gradients have to be of the same weights, whatever the call asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnswitch

BACKENDS = ("sdpa-math", "sdpa-flash", "tiled", "reference")
LEVELS = {
    "fp16 min": ("float16", np.finfo("float16").min),
    "fp32 min": ("float32", np.finfo("float32").min),
    "fp32 max": ("float32", np.finfo("float32").max),
    "fp32 -1e9": ("float32", -1e9),
    "fp64 min": ("float64", np.finfo("float64").min),
}


def operands(level: str) -> tuple[Any, ...]:
    """Query, key, value, upstream gradient; a mask whose first three rows of six are one number, the others small."""
    rng = np.random.default_rng(0)
    dtype, number = LEVELS[level]
    mask = rng.standard_normal((6, 20)).astype(dtype)
    mask[:3] = number
    arrays = (rng.standard_normal((1, 2, length, 8), dtype=np.float32) for length in (6, 20, 20, 6))
    return *arrays, mask


def backends(asked: str) -> list[str]:
    """Those that take gradients of ``asked``."""
    return [name for name in BACKENDS if "m" not in asked or name != "sdpa-flash"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_are_of_the_same_weights(backend: str, level: str) -> None:
    """<V, dV> = <O, dO>, row by row of the upstream gradient, with the output of the forward alone."""
    query, key, value, grad_out, mask = operands(level)
    call = {"attn_mask": mask, "backend": backend}
    out = attnswitch.attention(query, key, value, **call)
    states = "tiled" if backend == "sdpa-math" else backend  # which returns no lse
    _, lse = attnswitch.attention(query, key, value, return_lse=True, attn_mask=mask, backend=states)
    for given in ({}, {"out": out, "lse": lse}):
        for row in range(6):
            upstream = np.where(np.arange(6)[:, None] == row, grad_out, 0)
            grads = attnswitch.attention_backward(upstream, query, key, value, **given, **call)
            np.testing.assert_allclose((value * grads.value).sum(), (out * upstream).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["q", "qkv", "qkvm"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_output_is_the_same_with_gradients_and_without(level: str, asked: str) -> None:
    arrays = [torch.from_numpy(array) for array in operands(level)]
    query, key, value, _, mask = arrays
    for backend in backends(asked):
        alone = attnswitch.attention(query, key, value, attn_mask=mask, backend=backend)
        q, k, v, m = (
            x.clone().requires_grad_(letter in asked)
            for letter, x in zip("qkvm", (query, key, value, mask), strict=True)
        )
        with_gradients = attnswitch.attention(q, k, v, attn_mask=m, backend=backend)
        assert with_gradients.requires_grad
        torch.testing.assert_close(with_gradients.detach(), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa-math", "sdpa-flash"])
def test_torchs_kernels_are_given_rows_without_the_shift(backend: str) -> None:
    query, key, value, _, mask = operands("fp32 -1e9")
    found = attnswitch.attention(query, key, value, attn_mask=mask, backend=backend)
    mask[:3] = 0
    expected = attnswitch.attention(query, key, value, attn_mask=mask, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa-flash", "tiled"])
def test_a_row_that_sees_keys_has_a_finite_lse(backend: str) -> None:
    """The least number of float64 is beyond float32, the type of lse, where -inf would say that nothing is seen."""
    query, key, value, _, mask = operands("fp64 min")
    _, lse = attnswitch.attention(query, key, value, attn_mask=mask, return_lse=True, backend=backend)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("keys", [4, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inf_in_a_mask_is_nan_in_its_row_alone(dtype: torch.dtype, keys: int, grads: bool) -> None:
    """torch's CPU kernel in 16 bits makes such a row 0."""
    query, key = (torch.arange(8 * n, dtype=torch.float32).sin().reshape(1, 2, n, 4).to(dtype) for n in (2, keys))
    mask = torch.zeros(2, keys, dtype=dtype)
    mask[0, 1] = torch.inf
    query.requires_grad_(grads)
    for backend in ("sdpa-flash", "sdpa-math", "tiled", "reference"):
        with_lse = backend in ("tiled", "reference") or (backend == "sdpa-flash" and not grads)
        results = attnswitch.attention(query, key, key, attn_mask=mask, return_lse=with_lse, backend=backend)
        for result in results if with_lse else [results]:
            assert result[:, :, 0].isnan().all()
            assert result[:, :, 1].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("level", [float(np.finfo("float32").min), -1e30, -1e20, 1e30])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_number_that_absorbs_scores_in_float64_absorbs_them(
    backend: str | None, level: float, dtype: str, causal: bool
) -> None:
    """Keys of such a row weigh alike, in the output and in all gradients, with autograd and without."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    operands = [torch.randn(2, 4, 6, 8, dtype=kind, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(2, 4, 6, 8, dtype=kind)
    mask = torch.randn(1, 2, 6, 6, dtype=torch.promote_types(kind, torch.float32)).repeat_interleave(2, 1)
    if dtype == "float64" and level < -1e30:
        level = float(np.finfo("float64").min)
    mask[:, :, :3] = level
    mask[:, :, 4, :3] = -level

    q, k, v = (x.detach().double().requires_grad_() for x in operands)
    scores = (q @ k.mT) * 8**-0.5 + mask.double()
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else torch.zeros(6, 6, dtype=torch.bool)
    right = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    gradients = torch.autograd.grad(right, (q, k, v), grad_out.double())

    call: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "backend": backend}
    out = attnswitch.attention(*operands, **call)
    plain = [x.detach() for x in operands]
    alone = attnswitch.attention(*plain, **call)
    ways = torch.autograd.grad(out, operands, grad_out), attnswitch.attention_backward(grad_out, *plain, **call)[:3]
    tolerance = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 3e-2}[dtype]
    near: Any = {"rtol": tolerance, "atol": tolerance}
    for found in (out, alone):
        torch.testing.assert_close(found.double(), right, **near)
    for grads in ways:
        for grad, expected in zip(grads, gradients, strict=True):
            torch.testing.assert_close(grad, expected.to(kind), **near)


def test_the_gradient_of_such_an_output_is_its_own() -> None:
    query, x = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8, requires_grad=True)
    mask = torch.full((3, 3), torch.finfo(torch.float32).min)
    out = attnswitch.attention(query, query, x, attn_mask=mask, backend="sdpa-flash")
    out.retain_grad()
    out.sum().backward()
    assert out.grad is not None
    assert (out.grad == 1).all()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(x.grad))  # each value weighs a third in each of three rows


@pytest.mark.parametrize("level", [float(np.finfo("float64").min), -1e300, -1e39, 1e39])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_float64_mask_beyond_float32_absorbs_its_scores(backend: str | None, level: float) -> None:
    """Of two such numbers in a row the lower one hides."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.randn(4, 4, dtype=torch.float64)
    other = level if backend == "tiled" else level / 2  # which adds float32's last number in place of either
    mask[1], mask[2] = level, torch.tensor([level, other, level, -torch.inf], dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = ((wide[0] @ wide[1].mT) * 8**-0.5 + mask).softmax(-1) @ wide[2]
    out = attnswitch.attention(q, k, v, attn_mask=mask, backend=backend)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    found, expected = (
        torch.autograd.grad(*each) for each in ((out, (q, k, v), upstream), (right, wide, upstream.double()))
    )
    for grad, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa-math", "sdpa-flash"])
def test_keys_that_float64_alone_tells_apart_weigh_alike_in_the_gradients_too(backend: str) -> None:
    torch.manual_seed(0)
    mask = torch.full((3, 3), -1e30, dtype=torch.float64)
    mask[:, 1:] *= 1 + 1e-10
    q, k, v = (torch.randn(1, 1, 3, 8, requires_grad=True) for _ in range(3))
    out = attnswitch.attention(q, k, v, attn_mask=mask, backend=backend)
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, v, upstream)
    torch.testing.assert_close((v * grad).sum(), (out * upstream).sum())
