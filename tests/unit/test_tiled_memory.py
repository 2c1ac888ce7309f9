"""``tiled`` needs memory for its operands and results, and for nothing that grows with Lq * Lk."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnswitch

D = 16


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that ``call`` had allocated at most, its result included; and the result."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def peaks(length: int, **options: Any) -> tuple[int, int]:
    """Peak of the forward and of the backward pass."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((1, 1, length, D), dtype=np.float32) for _ in range(4))
    options["backend"] = "tiled"
    attnswitch.attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], backend="tiled")  # what is imported is not counted
    forward, (out, lse) = peak(lambda: attnswitch.attention(q, k, v, return_lse=True, **options))
    backward, _ = peak(lambda: attnswitch.attention_backward(g, q, k, v, out=out, lse=lse, **options))
    return forward, backward


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    short, long = (peaks(length, is_causal=True, window=(6000, 0)) for length in (4096, 16384))
    for few, many in zip(short, long, strict=True):
        assert 2 < many / few < 4.5
        assert many < 16384 * 16384 * 4 / 100


@pytest.mark.parametrize(
    "options",
    [
        {"window": (256, 128)},
        {"window": (256, 0), "softcap": 5.0, "dropout_p": 0.25, "seed": 3},
        {"window": (64, 64), "key_lengths": [15000], "causal_alignment": "bottom_right"},
    ],
    ids=["window", "softcap and dropout", "lengths"],
)
def test_so_it_does_with_other_options(options: dict[str, Any]) -> None:
    for bytes_, operand in zip(peaks(16384, **options), (2, 10), strict=True):
        assert bytes_ < operand * 16384 * D * 4 + 2**20  # forward: out; backward: three gradients and their sums


def test_a_broadcast_mask_stays_broadcast() -> None:
    rng = np.random.default_rng(0)
    length = 4096
    q, k, v, g = (rng.standard_normal((1, 4, length, 4), dtype=np.float32) for _ in range(4))
    mask = np.broadcast_to(rng.standard_normal(length).astype(np.float32), (length, length))
    options: dict[str, Any] = {"attn_mask": mask, "window": (64, 64), "backend": "tiled"}
    assert peak(lambda: attnswitch.attention(q, k, v, **options))[0] < length * length / 8
    assert peak(lambda: attnswitch.attention_backward(g, q, k, v, **options))[0] < length * length / 4
