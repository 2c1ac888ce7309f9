"""Gradients of ``cuda`` and ``triton`` in rows that a float mask moves far from 0, where lse has no digits of its sum.

Scores are rounded as sums of the kernels' type are: what that loses is lost. What is expected is the softmax of the
rounded scores, in float64. Triton interprets in a process of its own: this file, run as a script, tells what went wrong
there.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import interpreting
import nights
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch.problem.philox import keep_mask

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
#: Of products and gradients of the type, beside the largest of a gradient; the second for rows of some 1e4, where a
#: score in float32 is known to 2^-10.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-6}
NEAR = 4e-3


class Setting(NamedTuple):
    """Types of operands and mask; sizes; what the call says."""

    dtype: str
    mask: str
    dim: int = 40
    keys: int = 37
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        said = "-".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.dtype}-{self.mask}-d{self.dim}-k{self.keys}{'-' if said else ''}{said}"


QUERIES, HEADS, KEY_HEADS = 21, 4, 2
CAUSAL = {"is_causal": True, "causal_alignment": "bottom_right"}
#: An even number of keys takes generic kernels, where they are emulated.
SETTINGS = (
    *(Setting(dtype, "float32", dim, keys) for dtype in TOLERANCES for dim, keys in ((40, 37), (64, 36))),
    *(Setting("float32", kind) for kind in ("float16", "bfloat16", "float64")),
    *(Setting("bfloat16", kind, 64, 36) for kind in ("float16", "bfloat16", "float64")),
    Setting("float16", "float32", 64, 37, CAUSAL),
    Setting("bfloat16", "bfloat16", 40, 36, CAUSAL),
    Setting("float16", "float32", 40, 37, {"softcap": 3.0}),
    Setting("float32", "float32", 64, 36, {"softcap": 3.0, "is_causal": True}),
    Setting("bfloat16", "float32", 64, 131, {"window": (50, 20), "scale": -0.2}),
    Setting("float32", "float32", 40, 37, {"dropout_p": 0.3, "seed": 2**40 + 7}),
    Setting("float16", "float32", 64, 36, {"dropout_p": 0.3, "seed": 5}),
    Setting("float16", "float32", 40, 37, {"key_lengths": [29]}),
    Setting("float32", "float32", 40, 36, {"deterministic": True}),
)


def levels(kind: str) -> list[float]:
    """Numbers that masks of that type hold for padding, and one that is as far on the other side."""
    least = float(torch.finfo(getattr(torch, kind)).min)
    return [least, -6e4, 6e4] if kind == "float16" else [least, -1e9, -1e4, 1e9]


def masked(kind: str, queries: int, keys: int) -> torch.Tensor:
    """Rows of one level throughout; rows of a level and hidden keys, of two levels, of a level and 0; ordinary ones."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn((1, HEADS, queries, keys), generator=generator, dtype=torch.float64)
    rows = iter(range(1, queries))

    def wide(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers * keys, dtype=torch.float64)[:keys]

    for level in levels(kind):
        mask[:, :, next(rows)] = level
        mask[:, 1:, next(rows)] = wide([level, -torch.inf, -torch.inf])
        mask[:, :, next(rows)] = wide([level, level, level * 0.5])
        mask[:, :3, next(rows)] = wide([level] * 7 + [0.0] * keys)
    mask[:, :, next(rows)] = -torch.inf
    return mask.to(getattr(torch, kind))


def operands(setting: Setting) -> list[torch.Tensor]:
    """Query, key, value, mask, upstream gradients of output and lse."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((HEADS, QUERIES), (KEY_HEADS, setting.keys), (KEY_HEADS, setting.keys), (HEADS, QUERIES))
    drawn = [torch.randn((1, *shape, setting.dim), generator=generator, dtype=torch.float64) for shape in shapes]
    query, key, value, upstream = (x.to(getattr(torch, setting.dtype)) for x in drawn)
    real = torch.float64 if setting.dtype == "float64" else torch.float32
    of_lse = torch.randn((1, HEADS, QUERIES), generator=generator, dtype=torch.float64).to(real)
    return [query, key, value, masked(setting.mask, QUERIES, setting.keys), upstream, of_lse]


def visible(setting: Setting) -> Any:
    """Which keys each query sees by position and length."""
    said = setting.options
    i, j = np.arange(QUERIES)[:, None], np.arange(setting.keys)[None, :]
    place = i + (setting.keys - QUERIES if said.get("causal_alignment") == "bottom_right" else 0)
    left, right = said.get("window", (None, None))
    seen = j < said.get("key_lengths", [setting.keys])[0]
    if said.get("is_causal"):
        seen = seen & (j <= place)
    if left is not None:
        seen = seen & (j >= place - left) & (j <= place + right)
    return seen


def expected(setting: Setting, given: list[torch.Tensor]) -> list[Any]:
    """Gradients of query, key, value and mask by the formula."""
    said, real = setting.options, np.float64 if setting.dtype == "float64" else np.float32
    query, key, value, mask, upstream, of_lse = (x.double().numpy() for x in given)
    key, value = (np.repeat(x, HEADS // KEY_HEADS, 1) for x in (key, value))
    scale, cap = said.get("scale", setting.dim**-0.5), said.get("softcap", 0.0)
    s = scale * query @ key.swapaxes(-1, -2)
    tanh = np.tanh(s / cap) if cap else np.zeros_like(s)
    limit = np.finfo(real).max
    added = np.where(np.isinf(mask), mask, np.clip(mask, -limit, limit)).astype(real)
    s = ((cap * tanh if cap else s).astype(real) + added).astype(np.float64)
    seen = visible(setting) & (added != -np.inf)
    top = np.max(s, -1, keepdims=True, where=seen, initial=-np.inf)
    p = np.where(seen, np.exp(np.minimum(s - np.where(np.isinf(top), 0, top), 0)), 0)
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    z = np.ones_like(p)
    if rate := said.get("dropout_p"):
        heads = np.arange(HEADS)[:, None]
        z = keep_mask(said["seed"], rate, 0, heads, np.arange(QUERIES)[None], 0, setting.keys)[None] / (1 - rate)
    dp = z * (upstream @ value.swapaxes(-1, -2))
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + of_lse[..., None])
    inner = ds * (1 - tanh**2)
    grad_key, grad_value = scale * inner.swapaxes(-1, -2) @ query, (p * z).swapaxes(-1, -2) @ upstream
    grouped = (x.reshape(1, KEY_HEADS, -1, *x.shape[2:]).sum(2) for x in (grad_key, grad_value))
    return [scale * inner @ key, *grouped, ds]


def gradients(backend: str, setting: Setting, given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in given[:4]]
    query, key, value, mask = leaves
    call = {"attn_mask": mask, "backend": backend, **setting.options}
    out, lse = attnswitch.attention(query, key, value, return_lse=True, **call)
    alive = torch.isfinite(lse.detach())
    total = (out * given[4]).sum() + (torch.where(alive, lse, 0) * given[5]).sum()
    return list(torch.autograd.grad(total, leaves))


def check(backend: str, setting: Setting) -> None:
    given = operands(setting)
    found = gradients(backend, setting, given)
    tolerance = max(TOLERANCES[setting.dtype], 0.0 if setting.dtype == "float64" else NEAR)
    for name, ours, wanted in zip("qkvm", found, expected(setting, given), strict=True):
        mine = ours.double().numpy()
        assert np.isfinite(mine).all(), f"the gradient of {name} is not finite"
        size = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=tolerance * size, err_msg=name)


def check_an_lse_of_another_kernel(backend: str) -> None:
    """It may be rounded otherwise, by 64 where it is -1e9."""
    *given, upstream, _ = operands(Setting("float32", "float32"))
    query, key, value, mask = given
    call: dict[str, Any] = {"attn_mask": mask, "backend": backend}
    out, lse = attnswitch.attention(query, key, value, return_lse=True, **call)
    wanted = attnswitch.attention_backward(upstream, query, key, value, out=out, lse=lse, mask_grad=True, **call)
    far = (lse.abs() > 1e8) & (lse.abs() < 1e30)
    for towards in (-torch.inf, torch.inf):
        near = torch.where(far, torch.nextafter(lse, torch.full_like(lse, towards)), lse)
        found = attnswitch.attention_backward(upstream, query, key, value, out=out, lse=near, mask_grad=True, **call)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def check_an_lse_of_more_keys(backend: str) -> None:
    """Gradients of parts of the keys add up where lse tells one part from the whole, as -2e4 lets it."""
    query, key, value, mask, upstream, _ = operands(Setting("float32", "float32"))
    mask = mask.clamp(-1, 1) - 2e4
    out, lse = attnswitch.attention(query, key, value, return_lse=True, attn_mask=mask, backend=backend)

    def back(keys: slice) -> Any:
        given = query, key[:, :, keys], value[:, :, keys]
        call: dict[str, Any] = {"attn_mask": mask[..., keys], "backend": backend, "mask_grad": True}
        return attnswitch.attention_backward(upstream, *given, out=out, lse=lse, **call)

    whole, one, other = back(slice(None)), back(slice(20)), back(slice(20, None))
    joined = [one[0] + other[0], *(torch.cat(x, 2) for x in zip(one[1:3], other[1:3], strict=True))]
    joined.append(torch.cat((one[3], other[3]), 3))
    for ours, wanted in zip(joined, whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=4e-3 * float(wanted.abs().max()))


LSES = {"of-another-kernel": check_an_lse_of_another_kernel, "of-more-keys": check_an_lse_of_more_keys}


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("setting", nights.some(SETTINGS, 3), ids=str)
def test_cuda(setting: Setting) -> None:
    check("cuda", setting)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("lse", LSES)
def test_cuda_with_an_lse(lse: str) -> None:
    LSES[lse]("cuda")


INTERPRETED = [setting for setting in SETTINGS if setting.dtype != "float64"]
#: The interpreter takes seconds for each: the others are run at night.
BY_DAY = INTERPRETED[::4]
AT_NIGHT = [setting for setting in INTERPRETED if setting not in BY_DAY]


def interpreted(*names: str) -> dict[str, str]:
    """What each check raised in the process that interprets, "" for nothing; skips where its interpreter fails."""
    pytest.importorskip("triton", "3.6")
    return interpreting.raised(__file__, *names)


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    return interpreted(*map(str, BY_DAY), *LSES)


@pytest.fixture(scope="module")
def raised_at_night() -> dict[str, str]:
    return interpreted(*map(str, AT_NIGHT))


@pytest.mark.parametrize("setting", BY_DAY, ids=str)
def test_triton(raised: dict[str, str], setting: Setting) -> None:
    assert raised[str(setting)] == "", raised[str(setting)]


@pytest.mark.nightly
@pytest.mark.parametrize("setting", AT_NIGHT, ids=str)
def test_triton_in_all_other_settings(raised_at_night: dict[str, str], setting: Setting) -> None:
    assert raised_at_night[str(setting)] == "", raised_at_night[str(setting)]


@pytest.mark.parametrize("lse", LSES)
def test_triton_with_an_lse(raised: dict[str, str], lse: str) -> None:
    assert raised[lse] == "", raised[lse]


if __name__ == "__main__":
    checks = {str(setting): partial(check, "triton", setting) for setting in INTERPRETED}
    interpreting.tell(checks | {name: partial(of_lse, "triton") for name, of_lse in LSES.items()})
