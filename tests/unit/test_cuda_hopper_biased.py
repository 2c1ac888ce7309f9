"""Hopper's backward with a float mask: what it takes, behind which choice, its builds, and its gradients, emulated.

Expected gradients are of scores that are rounded as the kernels round them: where a mask is -1e9, float32 leaves no
other digits of a score.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnswitch
from attnswitch import Problem
from attnswitch.call import attend
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import Mask, Memory

sys.path.append(str(Path(__file__).parents[2] / "fixtures"))
usage = importlib.import_module("cubin").usage
sass = importlib.import_module("sass")
is_outdated = importlib.import_module("outdated").is_outdated
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
HopperTile = importlib.import_module("attnswitch.backends.cuda.hopper.tiles").HopperTile
kernel = importlib.import_module("attnswitch.backends.cuda.kernel")

H200 = Device.named("h200")
PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16.causal.mask=bf16:hqk.grad")
disassembled = pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        *(PLAIN.replace(mask=Mask("bfloat16", axes)) for axes in ("bhqk", "bqk", "qk", "bk", "k")),
        PLAIN.replace(dtype="float16", mask=Mask("float16", "hqk"), grads="v"),
        PLAIN.replace(alignment="bottom_right", seq_q=304, window=(64, 5), key_lengths=True),
        *(PLAIN.replace(dim_qk=dim, dim_v=dim) for dim in (8, 64, 96)),
        PLAIN.replace(softcap=30.0),
        PLAIN.replace(dropout=0.1),
        PLAIN.replace(deterministic=True, grads="kv"),
        *(PLAIN.replace(attn_mask=lies) for lies in (Memory(align=2), Memory(strided=True), Memory(negative=True))),
    ],
    ids=str,
)
def test_it_is_the_choice(problem: Problem) -> None:
    assert next(config.configs(problem, H200)).backward == choice.gradients(problem)
    for device in (H200, Device.cpu()):  # emulated, it is checked
        assert families.against_hopper_backward(problem, device) == ()


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (PLAIN.replace(grads="qkvm"), "gradient of attn_mask"),
        (PLAIN.replace(mask=Mask("float32", "hqk")), "attn_mask of float32"),
        (PLAIN.replace(mask=Mask("bfloat16", "hq")), "same for all keys"),
        (PLAIN.replace(deterministic=True), "deterministic=True with attn_mask"),
        (PLAIN.replace(dim_qk=192), "attn_mask with head dimension 192"),
        (PLAIN.replace(dim_v=256), "attn_mask with head dimension 256"),
        (PLAIN.replace(attn_mask=Memory(align=8), batch=1, seq_q=64), "attn_mask lies in no rows of 16-byte steps"),
        (PLAIN.replace(attn_mask=Memory(expanded=True)), "attn_mask is expanded"),
        (PLAIN.replace(dropout=0.1, grads="qkvm"), "gradient of attn_mask"),
    ],
    ids=str,
)
def test_the_rest_is_not_taken(problem: Problem, words: str) -> None:
    (reason,) = families.against_hopper_backward(problem, H200)
    assert re.search(words, reason)
    assert all(each.backward is None for each in config.configs(problem, H200))


def test_times_of_the_portable_kernels_are_of_the_past() -> None:
    assert is_outdated(PLAIN, H200, "h100/choice-fit-2.json")
    assert not is_outdated(PLAIN.replace(mask=None), H200, "h100/choice-fit-2.json")
    for sinks in (True, False):
        p = PLAIN.replace(mask=None, sinks=sinks, grads="")
        assert is_outdated(p, H200, "h200/bench-serving.json") == sinks
        assert is_outdated(p.replace(alibi=True), H200, "h200/bench-serving.json")


# -- what is launched --------------------------------------------------------------------------------------------------


def launches(p: Problem, device: Device) -> Any:
    """The backward with such a tile, as ``kernel.py`` lays it out."""
    chosen = next(config.configs(p, device))
    return kernel._backward(p, config.replace(chosen, backward=choice.gradients(p)), device)


@pytest.mark.parametrize(("axes", "kind"), [("hqk", 1), ("bk", 2)])
def test_rows_are_prepared_for_a_float_mask(axes: str, kind: int) -> None:
    """Rest lies behind base, and where the mask has rows for queries, tiles of it are brought as well."""
    p = Problem.parse(f"b2.h16/4.s1000.d128.bf16.mask=bf16:{axes}.grad")
    made, plain = launches(p, H200), launches(p.replace(mask=None), H200)
    steps = [(step.variant.family, step.variant.kernel) for step in made.steps]
    hopper = [("hopper", name) for name in ("prepare", "backward", "finish")]
    assert steps == [("portable", "prepare_added"), *hopper]
    assert [step.blocks for step in made.steps[1:]] == [step.blocks for step in plain.steps]
    rows = 2 * 16 * 1024
    assert made.space == plain.space + rows
    assert made.begins == (0, *(at + 4 * rows for at in plain.begins[1:]))
    assert made.look is None
    flags = {"MASKED": 0, "SOFTCAP": 0, "BIAS": kind, "ALIBI": 0, "DROPOUT": 0}
    assert dict(made.steps[2].variant.flags) == flags
    assert made.steps[2].variant.shared <= H200.on_chip
    places = [(0, *(64,) * 4)] * (5 if kind == 1 else 4)
    assert len(made.maps(*places)) == len(places)


# -- builds ------------------------------------------------------------------------------------------------------------

#: Bytes that a thread spills.
SPILLED = {("128", "hqk", ".softcap=30.0"): 16, ("128", "bk", ".softcap=30.0"): 16}


@disassembled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "axes", "more"), list(itertools.product(("64", "128"), ("hqk", "bk"), ("", ".softcap=30.0")))
)
def test_products_overlap_and_stay_in_registers(dims: str, axes: str, more: str, tmp_path: Path) -> None:
    """ptxas lets products come one after another where it cannot follow them, and says so in its log alone."""
    p = Problem.parse(f"b4.h16.s4096.d{dims}.bf16{more}.mask=bf16:{axes}.grad")
    chosen = backward._backward(p, choice.gradients(p))
    cubin = nvrtc.cubin(chosen, "sm_90a")
    text = sass.listing(cubin, tmp_path)
    registers, found = sass.overwritten(text)
    assert found == []
    own = chosen.columns // 16
    assert text.count("WARPGROUP.DEPBAR") == 6
    assert text.count("HGMMA.64x") == 2 * chosen.dim // 16 + 2 * own + 2 * 8
    assert registers == 2 * own
    assert ("LDSM.16.MT88.4" in text) is (axes == "hqk")  # of which a lane gets neighbouring queries of one key
    assert usage(cubin).local <= SPILLED.get((dims, axes, more), 0)


# -- gradients, emulated -----------------------------------------------------------------------------------------------

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
#: What hides padding, in each type.
FAR = {"bfloat16": -1e9, "float16": -6e4}


def sizes(p: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of query, key, value and the output's gradient."""
    queries, keys = (p.batch, p.heads_q, p.seq_q), (p.batch, p.heads_kv, p.seq_k)
    return (*queries, p.dim_qk), (*keys, p.dim_qk), (*keys, p.dim_v), (*queries, p.dim_v)


def added(p: Problem) -> Any:
    """Numbers about 0; -inf here and there, in a whole tile, and in whole rows; in others numbers far from 0."""
    assert p.mask_shape is not None
    rng = np.random.default_rng(p.seq_k)
    mask = rng.standard_normal(p.mask_shape)
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    mask[..., 70:75] = FAR[p.dtype]
    if mask.shape[2] > 1:
        mask[:, :, :64, :128] = -np.inf
        mask[:, :, 70:80, : p.seq_k // 2] = FAR[p.dtype]
        mask[:, :, 80:90] = FAR[p.dtype]
        mask[:, -1:, 90:95] = -np.inf
        mask[:, :1, 95:99] = 1e4
    return mask.astype(TYPES[p.dtype])


def visible(p: Problem, lengths: list[int] | None) -> Any:
    """Which keys queries see by position and length: (B, 1, Lq, Lk)."""
    ends = np.array(lengths or [p.seq_k] * p.batch)[:, None, None, None]
    i, j = np.arange(p.seq_q)[:, None], np.arange(p.seq_k)[None, :]
    place = i + (ends - p.seq_q if p.bottom_right else 0)
    left, right = p.reach
    seen = j < ends
    if right is not None:
        seen = seen & (j <= place + right)
    return seen if left is None else seen & (j >= place - left)


def expected(p: Problem, arrays: list[Any], mask: Any, grad_lse: Any, seen: Any) -> tuple[Any, Any, list[Any]]:
    """Output, lse and gradients by the formula, of scores in float32."""
    q, k, v, grad = (x.astype(np.float64) for x in arrays)
    k, v = (np.repeat(x, p.group, 1) for x in (k, v))
    products = p.softmax_scale * q @ k.swapaxes(-1, -2)
    tanh = np.tanh(products / p.softcap) if p.softcap else np.zeros_like(products)
    raw = np.float32(p.softcap * tanh if p.softcap else products)
    s = np.float64(raw + mask.astype(np.float32))
    seen = np.broadcast_to(seen, s.shape) & (mask != -np.inf)
    top = np.max(s, -1, keepdims=True, where=seen, initial=-np.inf)
    weights = np.exp(np.where(seen, s - np.where(np.isinf(top), 0, top), -np.inf))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    weights = weights / np.maximum(total, 1e-300)
    out, dp = weights @ v, grad @ v.swapaxes(-1, -2)
    inner = weights * (dp - (weights * dp).sum(-1, keepdims=True) + grad_lse[..., None]) * (1 - tanh**2)
    heads = (p.batch, p.heads_kv, p.group)
    of_key, of_value = (
        (x.swapaxes(-1, -2) @ y).reshape(*heads, *y.shape[2:-2], p.seq_k, -1).sum(2)
        for x, y in ((inner, q), (weights, grad))
    )
    return out, lse, [p.softmax_scale * inner @ k, p.softmax_scale * of_key, of_value]


def compare(
    text: str,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int] | None = None,
    made: Callable[[Problem], Any] = added,
) -> list[Any]:
    """Gradients beside the formula; what lies past the lengths is NaN."""
    monkeypatch.setattr(backward, "splits", lambda *_: parts)
    p = Problem.parse(text)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(TYPES[p.dtype]) for shape in sizes(p)]
    mask, grad_lse = made(p), rng.standard_normal((p.batch, p.heads_q, p.seq_q))
    out, lse, right = expected(p, arrays, mask, grad_lse, visible(p, lengths))
    q, k, v, grad = arrays
    for b, length in enumerate(lengths or ()):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    inputs = Inputs(q, k, v, mask, None if lengths is None else np.array(lengths))
    given = out.astype(q.dtype), lse.astype(np.float32), grad, grad_lse.astype(np.float32)
    got = launches(p, Device.cpu())(inputs, *given)
    unit = 2.0**-8 if p.dtype == "bfloat16" else 2.0**-11
    for name, mine, wanted in zip("qkv", got[:3], right, strict=True):
        if name not in p.grads:
            assert mine is None
            continue
        worst = np.abs(mine.astype(np.float64) - wanted).max()
        assert worst <= 2 * unit * np.abs(wanted).max(), name
    hidden = np.isneginf(lse)
    assert got[0] is None or not got[0][hidden].any()
    return list(got)


@compiled
@pytest.mark.parametrize("axes", ["bhqk", "hqk", "bqk", "qk", "hk", "bk", "k"])
@pytest.mark.parametrize(
    "dims", ["64", pytest.param("96", marks=pytest.mark.nightly), pytest.param("128", marks=pytest.mark.slow)]
)
def test_gradients_are_right(dims: str, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(f"b2.h2.s150x200.d{dims}.bf16.mask=bf16:{axes}.grad", 1, monkeypatch)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("b1.h4/2.s150x200.d64.fp16.causal.mask=fp16:hqk.grad", 3),
        ("b1.h4/2.s150x200.d64.fp16.causal.mask=fp16:hk.grad", 2),
        ("b1.h4/1.s150x304.d72/40.fp16.mask=fp16:qk.grad", 2),
        ("b1.h2.s200x152.d128.bf16.causal-br.mask=bf16:hqk.grad", 1),
        ("b1.h2.s200x152.d64.bf16.causal-br.mask=bf16:k.grad", 2),
        ("b2.h2.s104x304.d72.bf16.window=40,3.mask=bf16:bqk.grad", 1),
        ("b2.h2.s304x400.d64.bf16.window=150,20.mask=bf16:bk.grad", 1),
        ("b1.h2.s104.d96/64.fp16.softcap=3.0.mask=fp16:hqk.grad", 2),
        ("b1.h2.s150x200.d64.fp16.causal.softcap=3.0.mask=fp16:qk.grad", 1),
        ("b1.h2.s150x200.d64.bf16.causal.softcap=3.0.mask=bf16:k.grad", 1),
        ("b1.h2.s150x200.d128.bf16.causal.mask=bf16:hqk.grad=q", 1),
        ("b1.h2.s150x200.d64.bf16.mask=bf16:hqk.grad=kv", 2),
    ],
)
def test_what_goes_together_with_a_mask(text: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(text, parts, monkeypatch)


@compiled
@pytest.mark.parametrize("axes", ["bqk", "k"])
@pytest.mark.parametrize(("dims", "queries"), [("64", 200), pytest.param("128", 104, marks=pytest.mark.slow)])
def test_lengths_end_within_tiles(dims: str, queries: int, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"b3.h2.s{queries}x304.d{dims}.bf16.lengths.causal-br.mask=bf16:{axes}.grad"
    compare(text, 2, monkeypatch, lengths=[130, 0, 304])


def of_rows_far_from_0(p: Problem) -> Any:
    """Every row is one level throughout: lse says nothing of the sum."""
    assert p.mask_shape is not None
    mask = np.full(p.mask_shape, FAR[p.dtype])
    mask[..., 1::2, :] *= 0.5
    return mask.astype(TYPES[p.dtype])


@compiled
@pytest.mark.parametrize(
    "text",
    [
        "b1.h2.s104x152.d64.bf16.mask=bf16:hqk.grad",
        "b1.h2.s104x152.d64.bf16.mask=bf16:hk.grad",
        "b1.h2.s104x152.d128.bf16.causal.mask=bf16:qk.grad",
        "b1.h2.s104x152.d64.fp16.softcap=3.0.mask=fp16:qk.grad",
    ],
)
def test_rows_far_from_0_have_their_gradients(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(text, 1, monkeypatch, made=of_rows_far_from_0)


def inf_where_positions_hide(p: Problem) -> Any:
    """Above the diagonal, or at keys that come after all queries, some of them in a tile with others."""
    mask = added(p)
    if mask.shape[2] > 1:
        mask[..., ~np.tri(p.seq_q, p.seq_k, dtype=bool)] = np.inf
    else:
        mask[..., p.seq_q :] = np.inf
    return mask


@compiled
@pytest.mark.parametrize("more", ["", ".softcap=3.0"])
@pytest.mark.parametrize("axes", ["qk", "k"])
def test_positions_hide_whatever_the_mask_has(axes: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"b1.h2.s104x152.d64.fp16.causal.mask=fp16:{axes}{more}.grad"
    compare(text, 1, monkeypatch, made=inf_where_positions_hide)


@compiled
@pytest.mark.parametrize("more", ["", ".softcap=3.0"])
@pytest.mark.parametrize("axes", ["qk", "k"])
def test_what_is_hidden_may_overflow(axes: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last key S and dP are infinite, and the mask hides it."""
    p = Problem.parse(f"b1.h2.s104x152.d64.bf16{more}.mask=bf16:{axes}.grad")
    rng = np.random.default_rng(3)
    q, k, v, grad = (rng.standard_normal(shape) for shape in sizes(p))
    q, k, v, grad = q * 1e5, k * 1e-5, v * 1e-30, grad * 1e30
    hidden = [x.copy() for x in (k, v)]
    k[..., -1, :], v[..., -1, :] = 1e36, 1e30
    mask = rng.standard_normal(p.mask_shape)
    mask[..., -1] = -np.inf
    kind, mask = TYPES[p.dtype], mask.astype(TYPES[p.dtype])
    zeros = np.zeros((p.batch, p.heads_q, p.seq_q))
    exact = [x.astype(kind) for x in (q, *hidden, grad)]
    out, lse, right = expected(p, exact, mask, zeros, visible(p, None))
    monkeypatch.setattr(backward, "splits", lambda *_: 1)
    given = out.astype(kind), lse.astype(np.float32), exact[3], zeros.astype(np.float32)
    got = launches(p, Device.cpu())(Inputs(exact[0], k.astype(kind), v.astype(kind), mask), *given)
    for name, mine, wanted in zip("qkv", got[:3], right, strict=True):
        assert np.abs(mine.astype(np.float64) - wanted).max() <= 2**-7 * np.abs(wanted).max(), name


@compiled
@pytest.mark.parametrize("more", ["", ".softcap=3.0"])
@pytest.mark.parametrize("axes", ["qk", "k"])
def test_hidden_keys_may_have_scores_that_are_no_numbers(axes: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sums that overflow both ways are: dK and dV have zeros there. And no weight is above 1: lse may be rounded."""
    p = Problem.parse(f"b1.h2.s104x152.d64.bf16{more}.mask=bf16:{axes}.grad=kv")
    rng = np.random.default_rng(4)
    q, k, v, grad = (rng.standard_normal(shape).astype(TYPES[p.dtype]) for shape in sizes(p))
    assert p.mask_shape is not None
    mask = np.full(p.mask_shape, -np.inf, TYPES[p.dtype])
    mask[..., 5] = 0  # all see one key, which weighs 1
    k[..., 6, :] = np.nan
    out, lse = np.repeat(v[..., 5:6, :], p.seq_q, 2), np.full((1, 2, p.seq_q), -30, np.float32)
    monkeypatch.setattr(backward, "splits", lambda *_: 1)
    got = launches(p, Device.cpu())(Inputs(q, k, v, mask), out, lse, grad, np.zeros_like(lse))
    right = np.zeros(v.shape)
    right[..., 5, :] = grad.astype(np.float64).sum(2)
    np.testing.assert_allclose(got[2].astype(np.float64), right, rtol=2**-7)
    assert np.abs(got[1].astype(np.float64)).max() < 0.1


@compiled
def test_the_emulated_choice_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``attnswitch verify --emulate`` draws comes to it by an odd number of keys."""
    monkeypatch.setenv(emulator.VARIABLE, "1")
    for keys, taken in ((53, True), (54, False)):
        p = Problem.parse(f"b1.h2.s70x{keys}.d64.bf16.mask=bf16:qk.grad")
        assert (next(config.configs(p, Device.cpu())).backward is not None) is taken


LIES = {"odd": Memory(align=2), "strided": Memory(strided=True), "turned round": Memory(align=2, negative=True)}


@compiled
@pytest.mark.parametrize("lies", LIES)
def test_a_mask_in_no_rows_of_16_byte_steps_is_copied(lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public call, whose kernels are Hopper's: forward where queries are odd, backward where keys are."""
    p = Problem.parse("b1.h2.s151.d64.fp16.mask=fp16:hqk.grad").replace(attn_mask=LIES[lies])
    chosen = next(config.configs(p, Device.cpu()))
    assert isinstance(chosen.forward, HopperTile)
    assert chosen.backward == choice.gradients(p)
    monkeypatch.setenv(emulator.VARIABLE, "1")
    planner.forget()
    attend.forget()
    rng = np.random.default_rng(5)
    q, grad = (rng.standard_normal((1, 2, 151, 64)).astype("f2") for _ in range(2))
    k, v = (rng.standard_normal((1, 2, 151, 64)).astype("f2") for _ in range(2))
    whole = rng.standard_normal((1, 2, 151, 302)).astype("f2")
    mask = {"odd": whole[..., :151].copy(), "strided": whole[..., ::2], "turned round": whole[..., 150::-1]}[lies]
    found = {}
    for backend, kind in (("cuda", "f2"), ("reference", "f8")):
        arrays = [x.astype(kind) if kind == "f8" else x for x in (q, k, v, grad)]
        call: dict[str, Any] = {"attn_mask": mask.astype(kind) if kind == "f8" else mask, "backend": backend}
        out, lse = attnswitch.attention(*arrays[:3], return_lse=True, **call)
        found[backend] = out, *attnswitch.attention_backward(arrays[3], *arrays[:3], out=out, lse=lse, **call)[:3]
    for mine, right in zip(found["cuda"], found["reference"], strict=True):
        want: Any = right
        assert np.abs(np.asarray(mine, "f8") - want).max() <= 4e-3 * np.abs(want).max()
    planner.forget()
    attend.forget()
