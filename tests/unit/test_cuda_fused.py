"""The backward of float32 in one pass: what it takes, its builds, and its gradients in the emulator."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Mask, Memory

FIXTURES = Path(__file__).parents[2] / "fixtures"
RESULTS = FIXTURES / "results"
sys.path.append(str(FIXTURES))
usage = importlib.import_module("cubin").usage
sass = importlib.import_module("sass")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
backward = importlib.import_module("attnswitch.backends.cuda.fused.backward")
choice = importlib.import_module("attnswitch.backends.cuda.fused.choice")
tiles = importlib.import_module("attnswitch.backends.cuda.fused.tiles")

H200 = Device.named("h200")
PLAIN = Problem.parse("b4.h16/4.s1024.d64.fp32.causal.grad")
disassembled = pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        PLAIN.replace(alignment="bottom_right", seq_q=300, window=(64, 5), key_lengths=True),
        PLAIN.replace(lse=True, softcap=1e31),
        *(PLAIN.replace(dim_qk=dim, dim_v=dim_v) for dim, dim_v in ((4, 4), (32, 64), (96, 8), (128, 128))),
    ],
    ids=str,
)
def test_it_takes_the_gradients(problem: Problem) -> None:
    assert choice.against(problem, H200) == ()
    found = [each.backward for each in config.configs(problem, H200) if each.backward is not None]
    assert tuple(dict.fromkeys(found)) == choice.ranked(problem, H200) != ()


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (PLAIN.replace(dtype="bfloat16"), H200, "bfloat16: it multiplies float32"),
        (PLAIN.replace(dtype="float64"), H200, "float64: it multiplies float32"),
        (PLAIN.replace(grads="kv"), H200, "grad=kv"),
        (PLAIN.replace(deterministic=True), H200, "deterministic=True"),
        (PLAIN.replace(mask=Mask("bool")), H200, "attn_mask"),
        (PLAIN.replace(softcap=30.0), H200, "softcap=30"),
        (PLAIN.replace(dropout=0.1), H200, "dropout_p=0.1"),
        (PLAIN.replace(alibi=True), H200, "alibi"),
        (PLAIN.replace(sinks=True), H200, "sinks"),
        (PLAIN.replace(varlen=True), H200, "varlen"),
        (PLAIN.replace(scale=-1.0), H200, "scale=-1"),
        (PLAIN.replace(dim_qk=132), H200, "dim_qk=132"),
        (PLAIN.replace(dim_v=30), H200, "dim_v=30"),
        (PLAIN.replace(key=Memory(align=8)), H200, "key lies"),
        (PLAIN.replace(seq_q=20), H200, "20 queries"),
        (PLAIN.replace(seq_k=0), H200, "0 keys"),
        (PLAIN, Device.named("t4"), "8.0"),
        (PLAIN.replace(dim_qk=128), Device.named("rtx5090"), "do not fit"),
    ],
    ids=str,
)
def test_it_says_why_it_does_not(problem: Problem, device: Device, words: str) -> None:
    reasons = choice.against(problem, device)
    assert any(words in reason for reason in reasons), reasons
    assert all(each.backward is None for each in config.configs(problem, device) if "fused" in str(each))


def test_it_is_the_choice_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles, and the kernels of more than one pass, are there either way."""
    found = [each.backward for each in config.configs(PLAIN, H200)]
    assert found[:3] == list(choice.ranked(PLAIN, H200))
    assert None in found
    for other, device in ((PLAIN.replace(softcap=3.0), H200), (PLAIN, Device.named("a100"))):
        assert next(config.configs(other, device)).backward is None
    monkeypatch.setattr(choice, "MEASURED", {(9, 0): (64,)})
    assert next(config.configs(PLAIN.replace(dim_v=128), H200)).backward is None
    monkeypatch.setattr(choice, "MEASURED", {})
    tried = [each.backward for each in config.configs(PLAIN, H200)]
    assert tried[:4] == [None, *choice.ranked(PLAIN, H200)]


def test_the_first_tile_is_about_the_fastest_that_was_measured() -> None:
    document = json.loads((RESULTS / "h200/bench-fp32-backward.json").read_text(encoding="utf-8"))
    times: dict[str, dict[str, float]] = {}
    for each in document["records"]:
        if "fused" in each["candidate"] and each["status"] == "measured":
            times.setdefault(each["problem"], {})[each["candidate"]] = each["ms"]
    assert len(times) > 10
    for text, measured in times.items():
        tile = str(choice.ranked(Problem.parse(text), H200)[0])
        (taken,) = (ms for candidate, ms in measured.items() if f"backward {tile}," in candidate)
        assert taken <= 1.02 * min(measured.values()), text


def test_memory_is_what_the_launches_need() -> None:
    """base and delta of each row."""
    p = Problem.parse("b2.h16/4.s1000.d80.fp32.grad")
    made = backward.Backward(p, tiles.FusedTile(128, 32))
    rows = 2 * 16 * 1024
    assert (made.space, made.begins) == (2 * rows, (0, 4 * rows, 8 * rows, 8 * rows))
    assert [step.blocks for step in made.steps] == [rows // 64, 2 * 4 * 8]
    assert [step.variant.dim for step in made.steps] == [96, 96]


# -- builds ------------------------------------------------------------------------------------------------------------


def loops(listing: str) -> list[tuple[int, int, int]]:
    """Instructions, multiply-adds and reads of 16 bytes of shared memory of each innermost loop with products."""
    names: list[str] = []
    labels: dict[str, int] = {}
    found: list[tuple[int, int, int]] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        if instruction := sass.INSTRUCTION.search(line):
            names.append(instruction[1])
            back = labels.get(instruction[2].split("`(")[-1].rstrip(")")) if instruction[1] == "BRA" else None
            if back is not None and (body := names[back:]) and body.count("FFMA") * 5 > 4 * len(body):
                found.append((len(body), body.count("FFMA"), body.count("LDS.128")))
    return found


@disassembled
@pytest.mark.parametrize(
    ("dim", "tile", "reads"),
    [(32, (128, 64), [32, 24, 24]), (64, (128, 64), [32, 32, 32]), (128, (64, 64), [24, 32, 32])],
)
def test_multiply_adds_are_what_the_loops_consist_of(
    dim: int, tile: tuple[int, int], reads: list[int], tmp_path: Path
) -> None:
    """Of S and dP; of dV and dK; of dQ: beside reads of 16 bytes a few instructions, and nothing spills."""
    p = Problem.parse(f"b4.h16.s2048.d{dim}.fp32.grad")
    cubin = nvrtc.cubin(backward._backward(p, tiles.FusedTile(*tile)), "sm_90a")
    assert usage(cubin).local == 0
    found = loops(sass.listing(cubin, tmp_path))
    assert [loaded for _, _, loaded in found] == reads
    assert all(total - products - loaded <= 16 for total, products, loaded in found)


# -- gradients, emulated -----------------------------------------------------------------------------------------------


def compare(text: str, tile: Any, lengths: list[int] | None = None, turned: bool = False) -> None:
    """Gradients beside ``reference``; what lies past the lengths is NaN."""
    p = Problem.parse(text)
    rng = np.random.default_rng(p.seq_q)
    by_query, by_key = (p.batch, p.heads_q, p.seq_q), (p.batch, p.heads_kv, p.seq_k)
    shapes = (*by_query, p.dim_qk), (*by_key, p.dim_qk), (*by_key, p.dim_v), (*by_query, p.dim_v)
    exact = [rng.standard_normal(shape) for shape in shapes]
    grad_lse = rng.standard_normal(by_query)
    call: dict[str, Any] = {"is_causal": p.causal, "window": p.window, "key_lengths": lengths}
    call |= {"backend": "reference", "causal_alignment": p.alignment}
    out, lse = attnswitch.attention(*exact[:3], return_lse=True, **call)
    right = attnswitch.attention_backward(exact[3], *exact[:3], out=out, lse=lse, grad_lse=grad_lse, **call)
    q, k, v, grad = (
        np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2).astype("f4", order="K")
        if turned
        else x.astype("f4")
        for x in exact
    )
    for b, length in enumerate(lengths or ()):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    inputs = Inputs(q, k, v, None, None if lengths is None else np.array(lengths))
    launch = backward.Backward(p, tile)
    got = launch(inputs, out.astype("f4"), lse.astype("f4"), grad, grad_lse.astype("f4"))
    for name, mine, wanted in zip("qkv", got[:3], right[:3], strict=True):
        want: Any = wanted
        assert np.abs(mine.astype("f8") - want).max() <= 2e-6 * np.abs(want).max(), name


@compiled
@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("b1.h2.s128x256.d64.fp32.grad", 0),
        ("b1.h2.s150x200.d64.fp32.grad", 0),
        ("b1.h4/2.s150x200.d64.fp32.causal.grad", 1),
        ("b1.h2.s200x150.d64.fp32.causal-br.grad", 2),
        ("b2.h2.s70x300.d60.fp32.window=40,3.grad", 0),
        ("b1.h2.s300x130.d32/20.fp32.window=150,20.grad", 0),
        ("b1.h2.s100.d24.fp32.causal.grad", 1),
        ("b1.h2.s100x140.d128.fp32.causal.grad", 0),
        ("b1.h2.s100x140.d68/128.fp32.grad", 1),
        ("b1.h2.s100x140.d96.fp32.grad", 0),
        ("b1.h2.s100x140.d96.fp32.causal-br.grad", 1),
    ],
)
def test_gradients_are_right(text: str, which: int) -> None:
    compare(text, choice.ranked(Problem.parse(text), Device.cpu())[which])


@compiled
@pytest.mark.parametrize("how", ["", ".causal", ".bottom-right.window=50,9"])
def test_what_lies_past_the_lengths_is_not_looked_at(how: str) -> None:
    compare(f"b4.h2.s90x200.d64.fp32{how}.lengths.grad", tiles.FusedTile(64, 64), [0, 1, 70, 200])


@compiled
def test_heads_may_lie_inside_rows() -> None:
    compare("b2.h2.s90x100.d64.fp32.grad", tiles.FusedTile(64, 64), turned=True)


@compiled
@pytest.mark.usefixtures("emulated")
def test_what_is_hidden_shows_no_inf() -> None:
    """Upstream gradients of inf reach keys that are seen, and no others."""
    p = Problem.parse("b1.h1.s100.d64.fp32.causal.grad")
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.standard_normal((1, 1, 100, 64)).astype("f4") for _ in range(4))
    grad[0, 0, 50, 3] = np.inf
    out, lse = attnswitch.attention(q, k, v, is_causal=True, return_lse=True, backend="reference")
    got = backward.Backward(p, tiles.FusedTile(128, 64))(Inputs(q, k, v, None, None), out, lse, grad, None)
    queries, keys = got[0][0, 0], got[1][0, 0]
    assert np.isfinite(np.delete(queries, 50, 0)).all()
    assert np.isfinite(keys[51:]).all()
    assert not np.isfinite(keys[:51]).any()


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("sign", [1, -1])
def test_an_lse_that_is_no_number_shows_where_its_query_sees(sign: int) -> None:
    p = Problem.parse("b1.h1.s100.d64.fp32.causal.grad")
    rng = np.random.default_rng(0)
    q, k, v, grad, out = (rng.standard_normal((1, 1, 100, 64)).astype("f4") for _ in range(5))
    lse = np.full((1, 1, 100), 3, "f4")
    lse[0, 0, 50] = np.copysign(np.float32(np.nan), sign)
    made = backward.Backward(p, tiles.FusedTile(128, 64))(Inputs(q, k, v, None, None), out, lse, grad, None)
    for rows, shows in zip(made[:3], ([50], range(51), range(51)), strict=True):
        assert np.flatnonzero(np.isnan(rows[0, 0]).all(1)).tolist() == list(shows)
        assert np.isfinite(np.delete(rows[0, 0], list(shows), 0)).all()
