"""Hopper's forward, emulated, where a block has several consumers and more than one tile of keys."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
hopper = importlib.import_module("attnswitch.backends.cuda.hopper.forward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
#: One of each head dimension here; g++ takes seconds for each.
DIMS = (
    "64",
    "80",
    *(pytest.param(dims, marks=pytest.mark.slow) for dims in ("128", "192/128")),
    *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("72/96", "136/64", "256")),
)
#: The same where each takes several kernels.
FEW_DIMS = ("64", *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("80", "128", "192/128", "256")))


def check(
    text: str,
    which: int,
    lengths: list[int] | None = None,
    mask: Any = None,
    seed: int | None = None,
    sinks: tuple[float, ...] | None = None,
) -> tuple[Any, Any]:
    """Output and lse of a tile, which are near those of ``reference``; what lies past the lengths is NaN."""
    p = Problem.parse(text)
    rng = np.random.default_rng(p.seq_k)
    shapes = (
        (p.batch, p.heads_q, p.seq_q, p.dim_qk),
        (p.batch, p.heads_kv, p.seq_k, p.dim_qk),
        (p.batch, p.heads_kv, p.seq_k, p.dim_v),
    )
    q, k, v = (rng.standard_normal(shape).astype(TYPES[p.dtype]) for shape in shapes)
    call: dict[str, Any] = {
        "is_causal": p.causal,
        "causal_alignment": p.alignment,
        "window": p.window,
        "scale": p.scale,
        "softcap": p.softcap,
    }
    call |= {"attn_mask": mask, "key_lengths": lengths, "dropout_p": p.dropout, "seed": seed}
    of_heads = None if sinks is None else np.array(sinks, np.float32)
    if of_heads is not None:
        call["sinks"] = of_heads.astype(np.float64)
    if mask is not None and mask.dtype != bool:
        mask = mask.astype(q.dtype)
        call["attn_mask"] = mask.astype(np.float64)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    right, right_lse = attnswitch.attention(*exact, backend="reference", return_lse=True, **call)
    for b, length in enumerate(lengths or ()):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    device = Device.cpu()
    ranked = choice.ranked(p, device)
    tile = ranked[which % len(ranked)]
    out, lse = np.full(right.shape, np.nan, q.dtype), np.full(right_lse.shape, np.nan, np.float32)
    inputs = Inputs(q, k, v, mask, None if lengths is None else np.array(lengths), seed, sinks=of_heads)
    hopper.Forward(p, tile, device)(inputs, out, lse)
    unit = 2.0**-8 if p.dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(out.astype(np.float64), right, rtol=2 * unit, atol=2 * unit)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-4, atol=1e-4)
    return out, lse


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dims", DIMS)
def test_lengths_end_within_a_tile_of_several_consumers(dims: str, which: int) -> None:
    check(f"b2.h2/1.s201x310.d{dims}.fp16.lengths", which, [90, 291])
    check(f"b2.h2/1.s201x310.d{dims}.fp16.causal.lengths", which, [1, 190])


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dims", DIMS)
def test_positions_hide_parts_of_tiles(dims: str, which: int) -> None:
    for how in ("", ".causal", ".causal-br", ".window=40,9", ".window=150,0"):
        check(f"b1.h2/1.s201x309.d{dims}.fp16{how}", which)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dims", DIMS)
def test_dropout_is_that_of_the_seed(dims: str, which: int) -> None:
    check(f"b2.h2/1.s201x309.d{dims}.fp16.causal.dropout=0.4", which, seed=2**33 + 5)


@pytest.mark.slow
@pytest.mark.parametrize("dims", FEW_DIMS)
def test_masks_and_softcaps(dims: str) -> None:
    rng = np.random.default_rng(3)
    mask = rng.random((1, 2, 201, 309)) < 0.5
    mask[..., :64, :140], mask[..., 250:] = False, True
    check(f"b1.h2/1.s201x309.d{dims}.bf16.mask=bool:hqk", 0, mask=mask)
    check(f"b1.h2/1.s201x309.d{dims}.bf16.mask=bool:hqk.dropout=0.2", 0, mask=mask, seed=7)
    check(f"b1.h2/1.s201x309.d{dims}.bf16.causal.softcap=5.0", 0)


@pytest.mark.parametrize("axes", ["bhqk", "qk", "bk", "k"])
@pytest.mark.parametrize("dims", DIMS)
def test_a_float_mask_is_added(dims: str, axes: str) -> None:
    """To what positions, lengths and a softcap leave; -inf hides, and a row of -1e4 attends to all alike."""
    rng = np.random.default_rng(len(axes))
    sizes = zip("bhqk", (2, 2, 201, 312), strict=True)
    mask = rng.standard_normal(tuple(size if axis in axes else 1 for axis, size in sizes))
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    mask[..., :130] = -1e4
    check(f"b2.h2/1.s201x312.d{dims}.fp16.mask=fp16:{axes}", 0, mask=mask)
    check(f"b2.h2/1.s201x312.d{dims}.fp16.causal.lengths.mask=fp16:{axes}", 1, lengths=[311, 150], mask=mask)
    if axes == "bhqk":
        check(f"b2.h2/1.s201x312.d{dims}.fp16.mask=fp16:{axes}.softcap=4.0.dropout=0.3", 0, mask=mask, seed=4)


#: Of four heads: one that has none, one above all scores, an ordinary one, one below all.
SINKS = (-np.inf, 1e4, 0.5, -1e4)


@pytest.mark.parametrize(
    "which", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("dims", DIMS)
def test_a_sink_is_counted_once_whatever_its_size(dims: str, which: int) -> None:
    """A row that sees nothing has its lse, and -inf leaves every bit as it is without sinks."""
    text = f"b3.h4/2.s201x310.d{dims}.fp16.causal-br.lengths"
    out, lse = check(f"{text}.sinks", which, [290, 0, 130], sinks=SINKS)
    without, of_keys = check(text, which, [290, 0, 130])
    assert out[:, 0].tobytes() == without[:, 0].tobytes()
    assert lse[:, 0].tobytes() == of_keys[:, 0].tobytes()
    assert not out[1].any()
    assert not out[2, :, :71].any(), "before the first key"
    right = np.broadcast_to(np.array(SINKS, np.float32)[:, None], lse[1].shape)
    np.testing.assert_array_equal(lse[1], right)
    np.testing.assert_array_equal(lse[2, :, :71], right[:, :71])


@pytest.mark.parametrize("scale", [0.01, 1.0, 12.0])
def test_a_sink_joins_rows_that_rise_late(scale: float) -> None:
    """Weights are relative to the largest score of a tile before, and so their sum may be up to 2^8 times as large."""
    check(f"b1.h4/2.s201x309.d64.fp16.scale={scale}.sinks", 0, sinks=(0.0, 3.0, 8.0, 30.0))


@pytest.mark.slow
@pytest.mark.parametrize("dims", FEW_DIMS)
def test_sinks_go_together_with_all_else(dims: str) -> None:
    rng = np.random.default_rng(5)
    shown = rng.random((1, 1, 201, 312)) < 0.5
    shown[..., :64, :] = False
    numbers = rng.standard_normal((1, 4, 201, 312))
    numbers[rng.random(numbers.shape) < 0.3] = -np.inf
    numbers[..., 70:80, :] = -np.inf
    numbers[..., 80:90, :] = -6e4
    text = f"b1.h4/2.s201x312.d{dims}.fp16"
    check(f"{text}.mask=bool:bqk.sinks", 0, mask=shown, sinks=SINKS)
    check(f"{text}.mask=fp16:hqk.sinks", 0, mask=numbers, sinks=SINKS)
    check(f"{text}.mask=fp16:hqk.softcap=4.0.dropout=0.3.sinks", 0, mask=numbers, seed=4, sinks=(-6e4, 3.0, 0.0, -3.0))
    check(f"{text}.causal.softcap=5.0.sinks", 0, sinks=SINKS)
    check(f"{text}.causal.dropout=0.4.sinks", 0, seed=2**33 + 5, sinks=SINKS)


def test_a_sink_that_is_no_number_makes_none() -> None:
    """As in arithmetic: calls on a CPU refuse it, and on a GPU nobody looks."""
    p = Problem.parse("b1.h3.s70x200.d64.bf16.sinks.lse")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, n, 64)).astype(ml_dtypes.bfloat16) for n in (70, 200, 200))
    device = Device.cpu()
    out, lse = np.zeros((1, 3, 70, 64), q.dtype), np.zeros((1, 3, 70), np.float32)
    sinks = np.array([np.nan, np.inf, 1.0], np.float32)
    hopper.Forward(p, choice.ranked(p, device)[0], device)(Inputs(q, k, v, sinks=sinks), out, lse)
    assert np.isnan(out[:, :2].astype(float)).all()
    assert np.isnan(lse[:, :2]).all()
    assert np.isfinite(out[:, 2].astype(float)).all()


def test_a_float_mask_hides_what_is_no_number() -> None:
    """Also in a tile where other scores are NaN or inf, and are seen."""
    p = Problem.parse("b1.h1.s70x200.d64.bf16.mask=bf16:qk.lse")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(ml_dtypes.bfloat16) for n in (70, 200, 200))
    mask = np.zeros((1, 1, 70, 200), ml_dtypes.bfloat16)
    k[0, 0, 7], k[0, 0, 150] = np.nan, np.inf
    mask[..., [7, 150]] = -np.inf
    mask[0, 0, 5, 7] = mask[0, 0, 6, 150] = 0
    device = Device.cpu()
    tile = choice.ranked(p, device)[0]
    out, lse = np.zeros((1, 1, 70, 64), q.dtype), np.zeros((1, 1, 70), np.float32)
    hopper.Forward(p, tile, device)(Inputs(q, k, v, mask), out, lse)
    assert np.flatnonzero(np.isnan(out.astype(float)).any(-1)[0, 0]).tolist() == [5, 6]
    hidden = np.delete(np.arange(200), [7, 150])
    right = attnswitch.attention(
        *(x.astype(np.float64) for x in (q, k[:, :, hidden], v[:, :, hidden])), backend="reference"
    )
    rows = np.delete(np.arange(70), [5, 6])
    np.testing.assert_allclose(out[0, 0, rows].astype(float), right[0, 0, rows], rtol=2**-7, atol=2**-7)


def test_a_row_that_rises_leaves_its_neighbours_as_they_are() -> None:
    p = Problem.parse("b1.h1.s64x320.d64.fp16.causal-br")
    device = Device.cpu()
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, rows, 64)).astype(np.float16) for rows in (64, 320, 320))
    k[0, 0, 10] = q[0, 0, 63]  # in the last tile of the walk; the last row rises there, if it has not begun higher
    results = []
    for begun in (0, 5):
        k[0, 0, 319] = begun * q[0, 0, 63]  # others do not see it
        out, lse = np.full((1, 1, 64, 64), np.nan, np.float16), np.full((1, 1, 64), np.nan, np.float32)
        hopper.Forward(p, choice.ranked(p, device)[0], device)(Inputs(q, k, v), out, lse)
        results.append((out[0, 0, :63].tobytes(), lse[0, 0, :63].tobytes()))
    assert results[0] == results[1]
