"""Gradients of calls with sinks by Hopper's forward and backward, emulated: its backward knows of them by the lse."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
pytestmark = [
    pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++"),
    pytest.mark.usefixtures("emulated"),
]
#: As it is called here, with lengths in lists.
attention: Any = attnswitch.attention
#: Odd, so that the emulator takes Hopper's kernels; rows of a mask have three more, so that TMA reads them.
QUERIES, KEYS = 71, 133
#: Of four heads: one that has none, one above all scores, an ordinary one, one below all.
SINKS = (-np.inf, 1e4, 0.5, -1e4)


def shown() -> torch.Tensor:
    """Some rows see nothing, others nothing of some tiles."""
    mask = np.random.default_rng(1).random((2, 1, QUERIES, KEYS)) < 0.5
    mask[:, :, :9], mask[:, :, :64, 30:] = False, False
    return torch.from_numpy(mask)


def added() -> torch.Tensor:
    """Some rows see nothing, others all keys alike, far from 0."""
    mask = np.random.default_rng(2).standard_normal((4, QUERIES, KEYS + 3))
    mask[:, :9], mask[:, 9:20] = -np.inf, -6e4
    return torch.from_numpy(mask).half()[..., :KEYS]


CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "causal_alignment": "bottom_right", "window": (20, 0)},
    "lengths": {"key_lengths": [0, 40], "softcap": 3.0},
    "deterministic": {"is_causal": True, "deterministic": True},
    "bool mask": {"attn_mask": shown()},
    "float mask": {"attn_mask": added()},
}


def results(backend: str, arrays: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """Output, lse, and gradients of query, key, value and sinks."""
    operands = [array.clone().requires_grad_() for array in arrays[:4]]
    query, key, value, sinks = operands
    out, lse = attention(query, key, value, sinks=sinks, return_lse=True, backend=backend, **options)
    alive = lse.isfinite()
    found = torch.autograd.grad((out, torch.where(alive, lse, 0)), operands, (arrays[4], alive.to(lse.dtype)))
    return [array.detach().double() for array in (out, lse, *found)]


@pytest.mark.parametrize(
    "dim", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_reference(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if dim == 256 and name in ("deterministic", "float mask"):
        pytest.skip("Hopper's backward refuses it")
    launched = []
    launch = emulator.launch

    def noting(variant: Any, *rest: Any) -> None:
        launched.append(variant)
        launch(variant, *rest)

    monkeypatch.setattr(emulator, "launch", noting)
    rng = np.random.default_rng(0)
    shapes = (2, 4, QUERIES, dim), (2, 2, KEYS, dim), (2, 2, KEYS, dim), (2, 4, QUERIES, dim)
    query, key, value, grad = (torch.from_numpy(rng.standard_normal(shape)).half() for shape in shapes)
    arrays = [query, key, value, torch.tensor(SINKS), grad]
    exact = {**CASES[name], **({"attn_mask": added().double()} if name == "float mask" else {})}
    right = results("reference", [array.double() for array in arrays], exact)
    for got, wanted in zip(results("cuda", arrays, CASES[name]), right, strict=True):
        size = max(1.0, wanted[wanted.isfinite()].abs().max().item())
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-3 * size)
    assert {each.family for each in launched if each.kernel.startswith(("forward", "backward"))} == {"hopper"}
    assert [each.kernel.partition("_")[0] for each in launched].count("backward") == 1
