"""The tanh of Hopper's softcap, in the emulator: its formulas, but not the GPU's exponential and reciprocal."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from attnswitch.problem.philox import ROUNDS

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

SOURCE = """
#include "hopper/tangent.cuh"
KERNEL test(const Arguments a) {
    const float* const in = reinterpret_cast<const float*>(a.query.at);
    float* const out = static_cast<float*>(a.lse);
    for (int n = thread_index(); n < a.keys; n += 32) {
        out[n] = tangent_of_small(in[n]);
        out[a.keys + n] = tangent_of_large(in[n]);
    }
}
"""
#: Up to here the polynomial is used.
SMALL = np.float32(0.625)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path / "cache"))


def tangents(x: np.ndarray, folder: Path) -> np.ndarray:
    """By the polynomial, then by the exponential."""
    source = folder / "test.cu"
    source.write_text(SOURCE)
    out = np.zeros((2, x.size), np.float32)
    a = arguments.Arguments(keys=x.size, lse=out.ctypes.data)
    a.query.at = x.ctypes.data
    sizes = {"WARPS": 1, "RESIDENT": 1, "STORAGE": "bf16", "PHILOX_ROUNDS": ROUNDS}
    emulator.load(str(source), "test", sizes).run(32, 1, a)
    return out


def test_each_is_right_where_it_is_used(tmp_path: Path) -> None:
    size = np.exp(np.linspace(-80, 5, 20001)).astype(np.float32)
    x = np.concatenate([size, -size, [SMALL, -SMALL]]).astype(np.float32)
    small, large = tangents(x, tmp_path)
    found = np.where(np.abs(x) <= SMALL, small, large)
    wanted = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(found / wanted - 1)) < 4e-7
    np.testing.assert_allclose(small[-2:], large[-2:], rtol=4e-7)
    assert np.max(np.abs(found)) <= 1


def test_what_is_no_finite_number(tmp_path: Path) -> None:
    small, large = tangents(np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32), tmp_path)
    assert small[:2].tolist() == [0, 0]
    assert large[2:4].tolist() == [1, -1]
    assert np.isnan([small[4], large[4]]).all()
