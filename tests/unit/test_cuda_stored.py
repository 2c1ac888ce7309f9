"""Caches of 8 bits by the CUDA kernels, emulated: every number of a type, scales of every kind, and what is launched.

Results are held to ``reference`` in float64 on the same elements and scales.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attnswitch import Problem, Unsupported, attention_paged
from attnswitch.call.finite import checking
from attnswitch.machine.device import Device
from attnswitch.problem import CACHES

backend = importlib.import_module("attnswitch.backends.cuda.backend")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

NEAR = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 3e-6, "float64": 1e-12}
SCALES = ["none", "number", "head", "page", "page and head"]
#: What is no number of its type: NaN, and of float8_e5m2 inf.
NONE = {"float8_e4m3fn": [0x7F, 0xFF], "float8_e5m2": [0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF], "int8": []}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulator.VARIABLE, "1")


class Cache:
    """Caches of sequences of ``lengths`` in shuffled pages; NaN lies in what no sequence has, in scales too."""

    def __init__(self, dtype: str, scales: str, page: int, heads: int, dims: tuple[int, int], lengths: list[int]):
        torch.manual_seed(page)
        width = -(-max(*lengths, 1) // page)
        count = len(lengths) * width + 2
        self.table = torch.randperm(count)[: len(lengths) * width].reshape(len(lengths), width).int()
        self.lengths = torch.tensor(lengths)
        self.key, self.value = (self._elements(dtype, (count, page, heads, dim)) for dim in dims)
        by = {"number": (), "head": (heads,), "page": (count, 1), "page and head": (count, heads)}
        self.scales: dict[str, Any] = {}
        if scales in by:
            self.scales = {f"{role}_scale": torch.rand(by[scales]) + 0.1 for role in ("key", "value")}
        if dtype == "int8":
            self.scales = {role: scale / 32 for role, scale in (self.scales or _ONES).items()}
        for b, length in enumerate(lengths):
            for j, number in enumerate(self.table[b].tolist()):
                rows = max(0, min(page, length - j * page))
                self._spoil(number, rows, dtype)
                if not rows:
                    self.table[b, j] = 2**31 - 1
        for number in set(range(count)) - set(self.table.flatten().tolist()):
            self._spoil(number, 0, dtype)

    def _elements(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape)
        return (drawn * 32).round().clamp(-128, 127).to(torch.int8) if dtype == "int8" else drawn.to(of(dtype))

    def _spoil(self, page: int, rows: int, dtype: str) -> None:
        if NONE[dtype]:
            for cache in (self.key, self.value):
                cache.view(torch.uint8)[page, rows:] = NONE[dtype][-1]
        for scale in self.scales.values():
            if not rows and torch.is_tensor(scale) and scale.dim() == 2:
                scale[page] = float("nan")


_ONES: dict[str, Any] = {"key_scale": 1.0, "value_scale": 1.0}


def of(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def compare(query: torch.Tensor, cache: Cache, **said: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``cuda`` on ``query`` is near to what float64 makes of it."""
    given: Any = cache.scales | said
    out, lse = attention_paged(
        query, cache.key, cache.value, cache.table, cache.lengths, backend="cuda", return_lse=True, **given
    )
    right: Any = {role: scale.double() if torch.is_tensor(scale) else scale for role, scale in cache.scales.items()}
    table, named = cache.table.clamp(max=len(cache.key) - 1), "reference"
    with checking("never"):
        expected = attention_paged(
            query.double(), cache.key, cache.value, table, cache.lengths, backend=named, return_lse=True, **right | said
        )
    assert out.dtype == query.dtype
    near = NEAR[str(query.dtype).removeprefix("torch.")]
    for got, one in zip((out, lse), expected, strict=True):
        size = one[one.isfinite()].abs().max().item() if one.isfinite().any() else 1.0
        torch.testing.assert_close(got.double(), one, rtol=0, atol=near * max(1.0, size))
    return out, lse


# -- every number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 40], ids=["few", "many"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("stored", CACHES)
def test_every_number_is_exact(stored: str, dtype: str, queries: int) -> None:
    """The only key weighs 1, and its score is that column of it which the query has: NaN and inf are among values."""
    every = torch.arange(256, dtype=torch.uint8)
    value = every.view(of(stored))
    key = torch.where(torch.isin(every, torch.tensor(NONE[stored], dtype=torch.uint8)), 0, every).view(of(stored))
    query = torch.eye(256, dtype=of(dtype)).reshape(16, 1, 16, 256).expand(-1, queries, -1, -1)
    caches: Any = [part.reshape(1, 1, 1, 256).expand(1, 16, 1, 256).clone() for part in (key, value)]
    with checking("never"):
        out, lse = attention_paged(
            query,
            caches[0],
            caches[1],
            [[0]] * 16,
            [1] * 16,
            scale=1.0,
            is_causal=False,
            return_lse=True,
            backend="cuda",
        )
    torch.testing.assert_close(out, value.to(of(dtype)).expand(16, queries, 16, 256), rtol=0, atol=0, equal_nan=True)
    scores = key.to(lse.dtype).reshape(16, 16, 1).expand(-1, -1, queries)
    torch.testing.assert_close(lse, scores, rtol=1e-6, atol=0)


def test_nan_of_a_key_is_of_every_query_that_sees_it() -> None:
    cache = Cache("float8_e4m3fn", "none", 16, 1, (64, 64), [20, 20])
    cache.key.view(torch.uint8)[cache.table[1, 0], 3, 0, 5] = 0x7F
    given: Any = cache.key, cache.value, cache.table, cache.lengths
    with checking("never"):
        out = attention_paged(torch.randn(2, 1, 2, 64).bfloat16(), *given, backend="cuda")
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


# -- scales and forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("stored", CACHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scales_of_every_kind(dtype: str, stored: str, scales: str) -> None:
    """A decoding step of four heads on two, sequences of several tiles, one, and none."""
    compare(torch.randn(3, 1, 4, 64).to(of(dtype)), Cache(stored, scales, 16, 2, (64, 64), [150, 0, 7]))


@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64, 128])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_pages_of_every_size(queries: int, page: int) -> None:
    """Each way to find pages, of few queries and of many, each page with scales of its own."""
    query = torch.randn(3, queries, 4, 64).bfloat16()
    compare(query, Cache("float8_e4m3fn", "page and head", page, 2, (64, 64), [170, 0, 33]))


@pytest.mark.slow
@pytest.mark.parametrize("stored", CACHES)
@pytest.mark.parametrize("page", [8, 16, 64])
@pytest.mark.parametrize(
    "said",
    [
        {"softcap": 5.0},
        {"window": (20, 3)},
        {"num_splits": 3},
        {"num_splits": 1, "is_causal": False},
        {"sinks": [0.5, -1.0, 2.0, 0.0], "alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    ],
    ids=lambda said: next(iter(said)),
)
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_forms_of_every_kind(dtype: str, queries: int, said: dict[str, Any], page: int, stored: str) -> None:
    query = torch.randn(3, queries, 4, 64).to(of(dtype))
    compare(query, Cache(stored, "page and head" if page == 16 else "head", page, 2, (64, 64), [170, 0, 33]), **said)


@pytest.mark.parametrize("dims", [(33, 20), (96, 48), (16, 16), (64, 128)])
@pytest.mark.parametrize("queries", [1, 40])
def test_heads_of_any_size(queries: int, dims: tuple[int, int]) -> None:
    """Rows that wide copies do not reach, half steps of columns, and columns that nobody has."""
    for dtype in ("bfloat16", "float32"):
        query = torch.randn(2, queries, 4, dims[0]).to(of(dtype))
        compare(query, Cache("float8_e5m2", "page", 16, 2, dims, [70, 9]))


def test_columns_that_lie_apart() -> None:
    cache = Cache("int8", "head", 16, 2, (64, 64), [70, 9])
    for role in ("key", "value"):
        apart = torch.empty(*getattr(cache, role).shape, 2, dtype=torch.int8)[..., 0]
        setattr(cache, role, apart.copy_(getattr(cache, role)))
    for queries in (1, 40):
        compare(torch.randn(2, queries, 4, 64).half(), cache)


def test_packed_queries() -> None:
    cache = Cache("float8_e4m3fn", "page and head", 16, 2, (64, 64), [70, 0, 33])
    for longest, edges in ((1, [0, 1, 2, 3]), (40, [0, 40, 40, 43])):
        query = torch.randn(edges[-1] + 2, 4, 64).half()
        out, lse = compare(query, cache, cu_seqlens_q=torch.tensor(edges), max_seqlen_q=longest)
        assert not out[edges[-1] :].any()
        assert (lse[:, edges[-1] :] == -torch.inf).all()


def test_a_tree_of_drafts() -> None:
    cache = Cache("float8_e4m3fn", "head", 16, 2, (64, 64), [70, 33])
    bits = torch.randint(0, 256, (2, 5, 1), dtype=torch.uint8)
    compare(torch.randn(2, 5, 4, 64).bfloat16(), cache, tree_mask=bits)


@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1e6, 1e30])
def test_scales_that_lie_far_apart(spread: float) -> None:
    """Weights times scales are in no float16; relative to the largest of their tile they are."""
    cache = Cache("int8", "page", 16, 2, (64, 64), [150, 150])
    cache.scales["value_scale"] *= spread ** torch.linspace(0, 1, len(cache.key))[:, None]
    cache.scales["value_scale"] /= max(1.0, spread)
    compare(torch.randn(2, 1, 4, 64).half(), cache)


@pytest.mark.parametrize("zeros", [slice(20, None), slice(None, 20), slice(None)])
def test_scales_of_0(zeros: slice) -> None:
    """Pages that were never written, or pruned: their values count as 0, and leave those of others as they are."""
    cache = Cache("float8_e4m3fn", "page", 16, 2, (64, 64), [640])
    cache.scales["value_scale"][cache.table[0].long()[zeros]] = 0
    compare(torch.randn(1, 1, 4, 64).half(), cache)


def test_tiles_of_other_shapes() -> None:
    """Those of GPUs: more warps, more keys than a step has, more stages."""
    cuda = backend.CudaBackend()
    torch.manual_seed(0)
    for shape in ((16, 64, 2, 3, 1, True), (16, 32, 8, 2, 1, True), (32, 32, 2, 3), (64, 64, 4, 1)):
        tile = tiles.Tile(*shape)
        p = Problem.parse("b2.h4/2.s3x192.d64.bf16.causal-br.lengths.lse.page=16.cache=fp8e4m3")
        cache = Cache("float8_e4m3fn", "page and head", 16, 2, (64, 64), [170, 33])
        other = tiles.Tile(32, 32, 1, 1)
        chosen = config.CudaConfig(tile, other, other, other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend.CudaBackend, "configs", lambda *_, chosen=chosen: iter([chosen]))
            compare(torch.randn(2, 3, 4, 64).bfloat16(), cache)
        assert cuda.compile(p, Device.cpu(), chosen).variants()[0].eight


# -- what is launched --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page", [16, 64])
def test_as_many_bytes_are_on_their_way(page: int, dim: int) -> None:
    """A decoding step's warps wait for about as many at once as of 16 bits, and for whole pages or sections of them."""
    h200, text = Device.named("h200"), f"b64.h32/8.s1x4096.d{dim}.bf16.causal-br.lengths.page={page}"
    of_cache = []
    for p in (Problem.parse(text), Problem.parse(f"{text}.cache=fp8e4m3")):
        assert not backend.CudaBackend().supports(p, h200)
        tile = next(backend.CudaBackend().configs(p, h200)).forward
        assert tile.apart
        assert tiles.paged(p, tile) in (2, 4) or not p.cache
        held = tiles.room(tile, "forward", p, h200.on_chip)
        of_cache.append(held * tile.warps * (tile.stages - 1) * tile.keys * 2 * dim * p.element("key"))
    assert of_cache[1] >= 0.75 * of_cache[0]


def test_kernels_of_other_caches_are_others() -> None:
    """Of one class are problems whose caches have the same type."""
    h200, text = Device.named("h200"), "b64.h32/8.s1x4096.d128.bf16.causal-br.lengths.page=64"
    cuda = backend.CudaBackend()
    kernels = set()
    for cache in ("", ".cache=fp8e4m3", ".cache=fp8e5m2", ".cache=int8"):
        p = Problem.parse(text + cache)
        (variant,) = cuda.compile(p, h200, next(cuda.configs(p, h200))).variants()
        assert variant.eight == bool(cache)
        assert variant.sizes.get("EIGHT", 0) == bool(cache)
        kernels.add(variant)
    assert len(kernels) == 4


def test_wide_heads_of_8_bits_are_refused() -> None:
    p = Problem.parse("b4.h128/1.s1x4096.d576/512.bf16.causal-br.lengths.page=64.cache=fp8e4m3")
    why = "cache=float8_e4m3fn: it reads pages of query's dtype"
    assert families.against_latent(p, Device.named("h200")) == (why,)
    assert why in " ".join(backend.CudaBackend().supports(p, Device.named("h200")))
    cache = torch.zeros(1, 64, 1, 576, dtype=torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match=why):
        attention_paged(torch.zeros(1, 1, 2, 576).bfloat16(), cache, cache[..., :512], [[0]], [5], backend="cuda")
