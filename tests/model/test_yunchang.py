"""attnswitch in yunchang: what two processes come to, by ring and by Ulysses, is what one call makes of the whole.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed as dist
from yunchang import (
    EXTRACT_FUNC_DICT,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    ring_flash_attn_func,
    set_seq_parallel_pg,
    stripe_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from yunchang.globals import PROCESS_GROUP
from yunchang.hybrid.utils import RING_IMPL_DICT

import attnswitch
from attnswitch import api
from attnswitch.integrations import yunchang as integration
from attnswitch.integrations.yunchang import NAME, register
from attnswitch.verify import Case

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
import ranks
from parts import GRADIENTS, Whole

kernels = importlib.import_module("yunchang.kernels")
BACKEND = "tiled"
CASE = Case(batch=2, heads_kv=2, group=2, seq_q=24, seq_k=24, dim_qk=16, dim_v=24, library="torch", grads="qkv")
HALF, SINGLE, DOUBLE = CASE.replace(dtype="bfloat16"), CASE.replace(dtype="float32"), CASE.replace(dtype="float64")
PACKED = HALF.replace(heads_kv=4, group=1, dim_v=16, causal=True)
RINGS = {"basic": ring_flash_attn_func, "zigzag": zigzag_ring_flash_attn_func, "strip": stripe_flash_attn_func}


class Way(NamedTuple):
    """Who is called, how a case is dealt, and what the call says beside that it is causal."""

    entry: str
    case: Case
    deal: str = "basic"
    degrees: tuple[int, int] = (2, 1)  # of the ring, of Ulysses
    said: Mapping[str, Any] = MappingProxyType({})
    backward: bool = True


WAYS = {
    "ring": Way("function", HALF),
    "ring, causal": Way("function", HALF.replace(causal=True)),
    "ring, scale and softcap": Way(
        "function", HALF.replace(scale=0.4, softcap=2.0), said={"softmax_scale": 0.4, "softcap": 2.0}
    ),
    "ring, forward in float32": Way("function", SINGLE.replace(causal=True), backward=False),
    "ring, by the layer": Way("layer", HALF.replace(causal=True)),
    "zigzag": Way("function", HALF.replace(causal=True), "zigzag"),
    "zigzag, float16": Way("function", CASE.replace(dtype="float16", causal=True), "zigzag"),
    "zigzag, by the layer": Way("layer", HALF.replace(causal=True), "zigzag"),
    "zigzag, packed": Way("packed", PACKED, "zigzag"),
    "stripe": Way("function", HALF.replace(causal=True), "strip"),
    "stripe, float16": Way("function", CASE.replace(dtype="float16", causal=True), "strip"),
    "ulysses, float64": Way("ulysses", DOUBLE, degrees=(1, 2)),
    "ulysses, float32, causal": Way("ulysses", SINGLE.replace(causal=True), degrees=(1, 2)),
    "ulysses, bfloat16": Way("ulysses", HALF, degrees=(1, 2)),
    "ulysses, a window and softcap": Way(
        "ulysses",
        DOUBLE.replace(window=(5, 3), softcap=2.0),
        degrees=(1, 2),
        said={"window_size": (5, 3), "softcap": 2.0, "deterministic": True},
    ),
    "ulysses by the layer, forward": Way("layer", SINGLE.replace(causal=True), degrees=(1, 2), backward=False),
}
#: Two rings of two, each with half of the heads.
OF_FOUR = {deal: Way("layer", HALF.replace(causal=True), deal, (2, 2)) for deal in RINGS}
FAULTY = "zigzag"


# -- in each process ---------------------------------------------------------------------------------------------------


def ours() -> Any:
    return kernels.AttnType.from_string(NAME)


def share(array: torch.Tensor, way: Way) -> torch.Tensor:
    """This rank's part of (B, L, H, D), dealt by yunchang."""
    ring, ulysses = way.degrees
    dealt: torch.Tensor = EXTRACT_FUNC_DICT[way.deal](
        array, dist.get_rank(), dist.get_world_size(), rd=ring, ud=ulysses
    )
    return dealt.clone()


def attended(way: Way, operands: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Output (B, L, H, Dv), and lse (B, L, H) where it is told."""
    said = {"causal": way.case.causal, **way.said, "attn_type": ours()}
    if way.entry == "function":
        out, lse, _ = RINGS[way.deal](*operands, **said, return_attn_probs=True, group=PROCESS_GROUP.RING_PG)
        return {"out": out, "lse": lse.transpose(1, 2)}
    kernel = {"attn_type": said.pop("attn_type")}
    if way.entry == "packed":
        layer = LongContextAttentionQKVPacked(ring_impl_type=way.deal, **kernel)
        operands = [torch.stack(operands, 2)]
    elif way.entry == "layer":
        layer = LongContextAttention(ring_impl_type=way.deal, **kernel)
    else:
        layer = UlyssesAttention(PROCESS_GROUP.ULYSSES_PG, **kernel)
    return {"out": layer(*operands, **said)}


def computed(way: Way) -> dict[str, torch.Tensor]:
    """Of this rank: where its rows are in the sequence, output, lse and gradients, all (B, H, L, ...)."""
    ring, ulysses = way.degrees
    set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())
    *operands, grad_out = (share(x.transpose(1, 2), way) for x in Whole.of(way.case).arrays()[:4])
    for tensor in operands:
        tensor.requires_grad_(way.backward)
    with attnswitch.record() as recording:
        results = attended(way, operands)
    assert recording.problems
    if way.backward:
        results |= dict(zip(GRADIENTS, torch.autograd.grad(results["out"], operands, grad_out), strict=True))
    rows = share(torch.arange(way.case.seq_q)[None, :, None], way)
    return {"rows": rows.flatten(), **{name: x.detach().transpose(1, 2) for name, x in results.items()}}


@contextmanager
def of_its_own_keys() -> Iterator[None]:
    """A fault: gradients of each part come from its own output and lse, not from those of all keys."""
    right = api.attention_backward
    with mock.patch.object(api, "attention_backward", lambda *call, out, lse, **said: right(*call, **said)):
        yield


def process() -> None:
    """One rank: everything, so that the libraries are loaded once."""
    ranks.joined()
    register(backend=BACKEND)
    if dist.get_world_size() == 4:
        ranks.save({name: computed(way) for name, way in OF_FOUR.items()})
    results = {name: computed(way) for name, way in WAYS.items()}
    with of_its_own_keys():
        results["faulty"] = computed(WAYS[FAULTY])
    ranks.save(results)


# -- against the whole -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(__file__, 2, tmp_path_factory)


def parts(way: Way) -> list[slice]:
    """What a ring computes at a time."""
    ring, length = way.degrees[0], way.case.seq_k
    if way.deal == "strip":
        return [slice(n, None, ring) for n in range(ring)]
    count = 2 * ring if way.deal == "zigzag" else ring
    return [slice(length * n // count, length * (n + 1) // count) for n in range(count)]


def check(found: list[dict[str, torch.Tensor]], way: Way) -> None:
    """What all ranks came to, put in its place, against float64 within what rounding allows."""
    rows, results = torch.cat([x["rows"] for x in found]).numpy(), {}
    assert sorted(rows) == list(range(way.case.seq_q))
    for name in found[0].keys() - {"rows"}:
        dealt = np.concatenate([x[name].double().numpy() for x in found], 2)
        results[name] = np.empty_like(dealt)
        results[name][:, :, rows] = dealt
    whole = Whole.of(way.case)
    whole.check(results, whole.precision(BACKEND), parts(way), parts(way))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_two_processes_are_the_whole(name: str, two: list[dict[str, Any]]) -> None:
    """Output and all gradients, and the lse of the rings' own functions; grouped heads, Dv unlike D."""
    check([found[name] for found in two], WAYS[name])


@pytest.mark.slow
def test_local_lse_in_the_backward_would_be_seen(two: list[dict[str, Any]]) -> None:
    """The control of the above: its forward is right, and a gradient is beyond its bound."""
    found = [each["faulty"] for each in two]
    check([{name: each[name] for name in ("rows", "out", "lse")} for each in found], WAYS[FAULTY])
    for name in GRADIENTS:
        with pytest.raises(AssertionError, match="more than rounding explains"):
            check([{key: each[key] for key in ("rows", name)} for each in found], WAYS[FAULTY])


@pytest.mark.nightly
def test_four_processes_are_the_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    """USP, two by two: by ring, by zigzag and by stripe."""
    found = ranks.run(__file__, 4, tmp_path_factory)
    for name, way in OF_FOUR.items():
        check([each[name] for each in found], way)


# -- every argument ----------------------------------------------------------------------------------------------------


def kernel(module: str, stage: str) -> Any:
    register()
    return importlib.import_module(module).select_flash_attn_impl(ours(), stage)


def operands(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Query, key and value, (B, L, H, D)."""
    torch.manual_seed(1)
    return [torch.randn(2, 6, 4, 8).to(dtype) for _ in range(3)]


def test_ulysses_takes_what_flash_attn_takes() -> None:
    """Slopes are of the heads that are here; dropout has no seed."""
    q, k, v = operands(torch.float64)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = kernel("yunchang.ulysses.attn_layer", "fwd-bwd")(
        q, k, v, softmax_scale=0.3, causal=True, alibi_slopes=slopes
    )
    expected = attnswitch.attention(q, k, v, scale=0.3, is_causal=True, alibi_slopes=slopes, layout="BLHD")
    torch.testing.assert_close(found, expected)
    with attnswitch.record() as recording:
        kernel("yunchang.ulysses.attn_layer", "fwd-bwd")(q, k, v, dropout_p=0.5)
    assert [problem.dropout for problem in recording.problems] == [0.5]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1: yunchang's rings keep no state"),
        ({"window_size": (4, 0)}, r"window_size=\(4, 0\): in yunchang's rings it counts from the corner of each part"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: in yunchang's rings distances count within each part"),
        ({"deterministic": True}, "deterministic=True: yunchang's rings do not tell their forward"),
    ],
)
def test_what_a_part_cannot_honour_is_refused(said: dict[str, Any], reason: str) -> None:
    q, k, v = operands()
    if "deterministic" not in said:
        with pytest.raises(attnswitch.Unsupported, match=reason):
            kernel("yunchang.ring.ring_flash_attn", "fwd-only")(q, k, v, **said)
    plain = {"dropout_p": 0.0, "scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    rest = plain | {"alibi_slopes": None, "deterministic": False} | said
    out, lse = kernel("yunchang.ring.ring_flash_attn", "fwd-only")(q, k, v)
    buffers = [torch.empty_like(x) for x in (q, k, v)]
    with pytest.raises(attnswitch.Unsupported, match=reason):
        kernel("yunchang.ring.ring_flash_attn", "bwd-only")(out, q, k, v, out, lse, *buffers, *rest.values())


@pytest.mark.parametrize(
    ("ring", "dtype", "reason"),
    [
        ("ring_flash_attn", "float16", "rounds that of the query to bfloat16"),
        ("ring_flash_attn", "float32", "writes each part's over the sum of those before"),
        ("zigzag_ring_flash_attn", "float32", "writes each part's over the sum of those before"),
        ("stripe_flash_attn", "float32", "writes each part's over the sum of those before"),
    ],
)
def test_gradients_that_a_ring_spoils_are_refused(ring: str, dtype: str, reason: str) -> None:
    q, k, v = operands(getattr(torch, dtype))
    out, lse = kernel(f"yunchang.ring.{ring}", "fwd-only")(q, k, v)
    buffers = [torch.empty_like(x) for x in (q, k, v)]
    rest = 0.0, None, False, (-1, -1), 0.0, None, False
    with pytest.raises(attnswitch.Unsupported, match=f"gradients in torch.{dtype}: this ring of yunchang {reason}"):
        kernel(f"yunchang.ring.{ring}", "bwd-only")(out, q, k, v, out, lse, *buffers, *rest)


def test_other_refusals() -> None:
    q, k, v = operands(torch.float64)
    with pytest.raises(attnswitch.Unsupported, match="float64: yunchang's rings merge their parts in float32"):
        kernel("yunchang.ring.ring_flash_attn", "fwd-only")(q, k, v)
    with pytest.raises(attnswitch.Unsupported, match="return_attn_probs: attnswitch gives no attention weights"):
        kernel("yunchang.ulysses.attn_layer", "fwd-bwd")(q, k, v, return_attn_probs=True)
    with pytest.raises(attnswitch.Unsupported, match="attn_processor"):
        kernels.select_flash_attn_impl(ours(), "fwd-only", torch.nn.Identity())
    with pytest.raises(attnswitch.InvalidProblem, match="stage='fwd'"):
        kernels.select_flash_attn_impl(ours(), "fwd")
    with pytest.raises(attnswitch.Unsupported, match="'basic_pytorch' has a kernel of its own"):
        RING_IMPL_DICT["basic_pytorch"](q, k, v, attn_type=ours())


# -- registering -------------------------------------------------------------------------------------------------------


def test_names() -> None:
    register()
    member = kernels.AttnType(NAME)
    register(backend="reference")
    assert kernels.AttnType(NAME) is kernels.AttnType.from_string(NAME) is kernels.AttnType.ATTNSWITCH is member
    assert list(kernels.AttnType).count(member) == 1
    q, k, v = operands(torch.float64)
    with pytest.raises(attnswitch.Unsupported, match="reference"):  # which has no dropout without a seed
        kernels.select_flash_attn_impl(member)(q, k, v, dropout_p=0.5)
    for wrong in ({"backend": "no-such"}, {"policy": "no-such"}):
        with pytest.raises(attnswitch.InvalidProblem, match="no-such"):
            register(**wrong)


def test_other_kernels_stay_what_they_were() -> None:
    register()
    for module in ("yunchang.kernels", "yunchang.ring.ring_flash_attn", "yunchang.ulysses.attn_layer"):
        select = importlib.import_module(module).select_flash_attn_impl
        assert select(kernels.AttnType.FA, "fwd-only") is kernels.flash_attn_forward
        with pytest.raises(ValueError, match="Unknown stage: no-such"):
            select(kernels.AttnType.FA, "no-such")


@pytest.mark.parametrize("way", ["no ring", "no hook", "another hook", "other names"])
def test_another_yunchang_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = importlib.import_module("yunchang.ring.ring_flash_attn")
    if way == "no ring":
        monkeypatch.setitem(sys.modules, "yunchang.ring.ring_flash_attn", None)
    elif way == "no hook":
        monkeypatch.delattr(ring, "select_flash_attn_impl")
    elif way == "another hook":
        monkeypatch.setattr(ring, "select_flash_attn_impl", lambda impl_type, stage: None)
    else:
        monkeypatch.setattr(kernels, "AttnType", dict)
    with pytest.raises(attnswitch.Unsupported, match=r"yunchang [\d.]+ cannot take attnswitch .* use yunchang 0.6.4"):
        integration.register()


if __name__ == "__main__":
    process()
