"""Hopper's forward of heads above 256 columns, in the emulator: latent ones, and others."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.call import varlen
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import cost

backend = importlib.import_module("attnswitch.backends.cuda.backend")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
latent = importlib.import_module("attnswitch.backends.cuda.hopper.latent")
merging = importlib.import_module("attnswitch.backends.cuda.launching.merging")
tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")
workload = importlib.import_module("attnswitch.bench.workload")

compiled = [
    pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++"),
    pytest.mark.usefixtures("emulated"),
]
H200 = Device.named("h200")


class Paged:
    """A call over pages, in which all that no sequence has is NaN."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        queries: tuple[int, ...] | int = 1,
        heads: tuple[int, int] = (6, 1),
        dims: tuple[int, int] = (576, 512),
        page: int = 64,
        within: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        **said: Any,
    ) -> None:
        draw = torch.Generator().manual_seed(sum(lengths) + page)
        most, self.said = max(lengths), said
        width = max(1, -(-most // page))
        pages = len(lengths) * width + 2
        self.table = torch.randperm(pages - 1, generator=draw)[: len(lengths) * width].view(len(lengths), width).int()
        self.key = torch.full((pages, page, heads[1], dims[0]), torch.nan, dtype=dtype)
        self.value = (
            self.key[..., : dims[1]] if within else torch.full((*self.key.shape[:3], dims[1]), torch.nan).to(dtype)
        )
        for row, length in zip(self.table, lengths, strict=True):
            for j in range(length):
                self.key[row[j // page], j % page] = torch.randn(heads[1], dims[0], generator=draw).to(dtype)
                if not within:
                    self.value[row[j // page], j % page] = torch.randn(heads[1], dims[1], generator=draw).to(dtype)
            row[-(-length // page) :] = pages - 1
        if isinstance(queries, tuple):
            self.said["cu_seqlens_q"] = torch.tensor([0, *queries]).cumsum(0).int()
            shape: tuple[int, ...] = sum(queries) + 2, heads[0], dims[0]
        else:
            shape = len(lengths), queries, heads[0], dims[0]
        self.query = torch.randn(shape, generator=draw).to(dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)

    def alone(self, n: int, rows: slice) -> Paged:
        """The n-th sequence, whose queries are those rows."""
        one = copy.copy(self)
        one.query, one.table, one.lengths = self.query[rows], self.table[n : n + 1], self.lengths[n : n + 1]
        one.said = self.said | {"cu_seqlens_q": torch.tensor([0, rows.stop - rows.start]).int()}
        return one

    def __call__(self, backend: str) -> Any:
        operands = self.query, self.key, self.value, self.table, self.lengths
        return attnswitch.attention_paged(*operands, return_lse=True, backend=backend, **self.said)


def near(found: Any, right: Any) -> None:
    """Outputs to a rounding of 16 bits or two, lse to single precision."""
    torch.testing.assert_close(found[0].float(), right[0].float(), rtol=1.6e-2, atol=8e-3)
    torch.testing.assert_close(found[1], right[1], rtol=1e-5, atol=2e-5)


CALLS: dict[str, dict[str, Any]] = {
    "one tile": {"lengths": (33,)},
    "no keys, one, a tile, one more": {"lengths": (0, 1, 64, 65)},
    "a pair of tiles, and one more key": {"lengths": (128, 129), "heads": (3, 1)},
    "pages of 16": {"lengths": (150, 67), "page": 16},
    "pages of 32, four queries": {"lengths": (150, 2), "page": 32, "queries": 4},
    "pages of 192": {"lengths": (230,), "page": 192},
    "values apart": {"lengths": (150, 67), "within": False},
    "values apart, pages of 16": {"lengths": (200, 5), "within": False, "page": 16},
    "more heads than a tile": {"lengths": (70,), "heads": (70, 1)},
    "heads of two groups": {"lengths": (100,), "heads": (6, 2), "queries": 3},
    "float16": {"lengths": (140,), "dtype": torch.float16},
    "a window": {"lengths": (400, 90), "queries": 3, "window": (70, 0)},
    "all keys": {"lengths": (90,), "queries": 5, "is_causal": False},
    "softcap": {"lengths": (140,), "softcap": 5.0},
    "packed": {"lengths": (150, 0, 67), "queries": (3, 0, 70)},
    "packed, pages of 16, split": {"lengths": (150, 300, 67), "queries": (3, 1, 2), "page": 16, "num_splits": 2},
    "split": {"lengths": (600, 0, 129), "num_splits": 3},
    "in more parts than a warp merges": {"lengths": (300,), "num_splits": 40},
    "D 512": {"lengths": (150, 67), "dims": (512, 512), "within": False},
    "D 512, keys that are values": {"lengths": (150, 67), "dims": (512, 512)},
    "D 320/264": {"lengths": (150, 67), "dims": (320, 264), "within": False, "queries": 2},
    "D 40/264": {"lengths": (150,), "dims": (40, 264), "within": False},
    "three key heads, values apart, split": {"lengths": (400, 70), "heads": (6, 3), "within": False, "num_splits": 2},
    "a window, split, two tiles of rows": {"lengths": (500,), "queries": 40, "window": (90, 0), "num_splits": 3},
    "softcap, split": {"lengths": (300,), "softcap": 5.0, "num_splits": 2},
    "D 576/8": {"lengths": (150,), "dims": (576, 8)},
    "16 rows": {"lengths": (700, 0, 65), "heads": (8, 1), "queries": 2, "page": 32, "num_splits": 2},
    "packed, 16 rows": {"lengths": (150, 300, 67), "queries": (2, 0, 1), "page": 16, "num_splits": 2},
}
#: Those with at most 16 rows to a key head.
FEW = (
    *("one tile", "no keys, one, a tile, one more", "pages of 16", "values apart, pages of 16", "softcap, split"),
    *("split", "D 512", "D 576/8", "16 rows", "packed, 16 rows"),
)


class TestResults:
    pytestmark = compiled

    @pytest.mark.parametrize("name", CALLS)
    def test_pages(self, name: str) -> None:
        call = Paged(**CALLS[name])
        near(call("cuda"), call("reference"))

    @pytest.mark.parametrize("name", FEW)
    def test_few_rows_by_either_kind_of_consumer(
        self, name: str, variants: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = Paged(**CALLS[name])
        for tile in (tiles.FEW, tiles.LATENT):
            monkeypatch.setattr(choice, "latent", lambda problem, device, tile=tile: tile)
            planner.forget()
            near(call("cuda"), call("reference"))
        assert [variant.rows for variant in variants if variant.kernel == "latent"] == [16, 64]

    @pytest.mark.parametrize("queries", [(1, 1, 2), (1, 40, 2)], ids=["beside few", "beside many"])
    def test_a_sequence_has_its_bits_beside_any_number_of_queries(self, queries: tuple[int, ...]) -> None:
        batch = Paged(lengths=(150, 300, 67), queries=queries, page=16, num_splits=2)
        found = batch("cuda")
        for n in range(len(queries)):
            rows = slice(sum(queries[:n]), sum(queries[: n + 1]))
            (out, lse), (all_out, all_lse) = batch.alone(n, rows)("cuda"), found
            assert torch.equal(out, all_out[rows])
            assert torch.equal(lse, all_lse[:, rows])

    @pytest.mark.parametrize("splits", [None, 3])
    def test_sinks_and_slopes(self, splits: int | None) -> None:
        beside: dict[str, Any] = {} if splits is None else {"num_splits": splits}
        sinks, slopes = torch.tensor([3.0, -2.0, 0.5, 9.0]), torch.tensor([0.5, 0.1, 0.02, 0.0])
        for more in ({"sinks": sinks}, {"alibi_slopes": slopes}, {"sinks": sinks, "alibi_slopes": slopes}):
            said: dict[str, Any] = {**beside, **more}
            call = Paged((300, 0, 40), 2, (4, 1), **said)
            near(call("cuda"), call("reference"))

    @pytest.mark.parametrize("dims", [(576, 512), (512, 512)])
    @pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"is_causal": True, "window": (100, 0)}])
    def test_keys_one_after_another(self, dims: tuple[int, int], options: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(1)
        query = torch.randn(1, 4, 150, dims[0], generator=draw).bfloat16()
        key = torch.randn(1, 2, 181, dims[0], generator=draw).bfloat16()
        value = key[..., : dims[1]] if dims[1] < dims[0] else torch.randn(key.shape, generator=draw).bfloat16()
        call = query, key, value
        found, right = (
            attnswitch.attention(*call, **options, return_lse=True, backend=name) for name in ("cuda", "reference")
        )
        near(found, right)

    @pytest.mark.parametrize("causal", [True, False])
    def test_sequences_one_after_another(self, causal: bool) -> None:
        """Rows past the last one are 0, and NaN of a sequence, and past the last, stay where they are."""
        draw = torch.Generator().manual_seed(2)
        query, key = (torch.randn(200, heads, 576, generator=draw).bfloat16() for heads in (3, 1))
        edges_q, edges_k = torch.tensor([0, 5, 5, 180]).int(), torch.tensor([0, 70, 70, 150]).int()

        def call(backend: str) -> Any:
            operands = query, key, key[..., :512], edges_q, edges_k
            return attnswitch.attention_varlen(*operands, is_causal=causal, return_lse=True, backend=backend)

        right = call("reference")
        key[150:] = torch.nan
        found = call("cuda")
        near(found, right)
        assert (found[0][180:] == 0).all()
        if causal:  # on the CPU such sequences are looked at, and refused
            return
        key[70] = torch.nan
        out, lse = call("cuda")
        assert torch.equal(out[:5], found[0][:5])
        assert torch.equal(lse[:, :5], found[1][:, :5])

    @pytest.mark.parametrize("queries", [0, 2])
    def test_what_is_empty(self, queries: int) -> None:
        """A step without tokens, and sequences without keys."""
        latent = torch.randn(4, 64, 1, 576).bfloat16()
        query = torch.randn(queries, 8, 576).bfloat16()
        edges = torch.tensor([0, queries]).int()
        call = query, latent, latent[..., :512], torch.zeros(1, 1).int(), torch.zeros(1).int()
        out, lse = attnswitch.attention_paged(
            *call, cu_seqlens_q=edges, max_seqlen_q=queries, return_lse=True, backend="cuda"
        )
        assert out.shape == (queries, 8, 512)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        for shape in ((1, 8, 0, 576), (1, 8, 3, 576)):
            query, key = torch.randn(shape).bfloat16(), torch.randn(1, 1, 0 if shape[2] else 5, 576).bfloat16()
            assert (attnswitch.attention(query, key, key[..., :512], backend="cuda") == 0).all()

    def test_large_scores_are_not_rounded_before_their_difference_is_taken(self) -> None:
        call = Paged((150, 67), heads=(4, 1), scale=2.0**30, dtype=torch.float16)
        near(call("cuda"), call("reference"))

    def test_values_within_the_keys_are_read_with_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By address and strides: the same bits as from memory of their own."""
        within = []
        launch = emulator.launch

        def note(variant: Any, blocks: int, a: Any, *more: Any) -> None:
            if variant.kernel == "latent":
                within.append(bool(a.values_within))
            launch(variant, blocks, a, *more)

        monkeypatch.setattr(emulator, "launch", note)
        call = Paged((150, 67), heads=(5, 1))
        found = call("cuda")
        call.value = call.value.clone()
        for one, other in zip(call("cuda"), found, strict=True):
            assert torch.equal(one, other)
        call.value = call.key[..., 64:]
        near(call("cuda"), call("reference"))
        call.value = torch.nan_to_num(call.key.view(-1, 576)[:, :512]).view(-1, 64, 1, 512)  # other strides
        near(call("cuda"), call("reference"))
        wider = Paged((150,), dims=(512, 512))
        wider.key, wider.query = wider.value[..., :40], wider.query[..., :40]
        near(wider("cuda"), wider("reference"))
        assert within == [True, False, False, False, False]

    def test_large_scores(self) -> None:
        """Bases rise in steps; a row that keeps one as its scores grow by less than ROOM loses no digits."""
        call = Paged((500,), scale=0.5)
        call.key[call.table[0].long()] *= torch.linspace(0.1, 2.0, call.table.shape[1])[:, None, None, None].bfloat16()
        near(call("cuda"), call("reference"))

    def test_a_sequence_has_the_same_bits_in_any_batch(self) -> None:
        together = Paged((300, 40, 130), 2, num_splits=3)
        outs = together("cuda")
        for b in range(3):
            alone = Paged((300, 40, 130), 2, num_splits=3)
            alone.query, alone.table, alone.lengths = (x[b : b + 1] for x in (alone.query, alone.table, alone.lengths))
            for found, whole in zip(alone("cuda"), outs, strict=True):
                assert torch.equal(found[0], whole[b])


#: Numbers behind the memory of parts.
_BEYOND = 200_000


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Keys are split evenly, whatever the problem. Filled with the blocks of each launch of the kernel.

    Parts stay in their memory, in which at first lies NaN.
    """
    monkeypatch.setattr(choice, "latent", lambda problem, device: tiles.FEW if problem.splits else tiles.EVEN)
    launched: list[int] = []
    parts: list[torch.Tensor] = []
    launch, empty = emulator.launch, merging.memory.empty

    def note(variant: Any, blocks: int, a: Any, *more: Any) -> None:
        if variant.kernel == "latent":
            launched.append(blocks)
        launch(variant, blocks, a, *more)

    def guarded(shape: tuple[int, ...], *more: Any) -> Any:
        if len(shape) > 1:
            return empty(shape, *more)
        parts.append(torch.full((shape[0] + _BEYOND,), 7.0))
        parts[-1][: shape[0]] = torch.nan
        return parts[-1][: shape[0]]

    monkeypatch.setattr(emulator, "launch", note)
    monkeypatch.setattr(merging.memory, "empty", guarded)
    yield launched
    assert parts
    assert all((memory[-_BEYOND:] == 7.0).all() for memory in parts)


class TestEvenSplits:
    """Three blocks, which have as many pairs of tiles of keys as one another, of whatever sequences."""

    pytestmark = compiled

    @pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "num_splits" not in call])
    def test_pages(self, name: str, even: list[int]) -> None:
        call = Paged(**CALLS[name])
        near(call("cuda"), call("reference"))
        assert even == [3]

    @pytest.mark.parametrize(
        "lengths",
        [
            (1000, 1, 0, 129),  # rows in three blocks, and three that one block has
            (1, 1, 1, 1, 1, 1, 1, 1000),
            (0, 0, 0),
            (5,),  # fewer pairs than blocks
            (130, 130),
            (40,) * 70,  # more sequences than a warp has lanes
            (0,) * 33 + (300,) + (0,) * 40,
            (0,) * 390 + (300, 5),  # more than a block has threads
            (40,) + (0,) * 800 + (300,),
        ],
    )
    @pytest.mark.parametrize("heads", [(3, 1), (130, 2)])
    def test_lengths(self, lengths: tuple[int, ...], heads: tuple[int, int], even: list[int]) -> None:
        call = Paged(lengths, heads=heads, sinks=torch.linspace(-2, 2, heads[0]))
        near(call("cuda"), call("reference"))
        assert even == [3]

    def test_more_parts_than_a_warp_merges_at_once(self, even: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(latent, "_EMULATED", 40)
        call = Paged((5000, 30), heads=(2, 1))
        near(call("cuda"), call("reference"))
        assert even == [40]

    def test_sinks_and_slopes(self, even: list[int]) -> None:
        sinks, slopes = torch.tensor([3.0, -2.0, 0.5, 9.0]), torch.tensor([0.5, 0.1, 0.02, 0.0])
        call = Paged((300, 0, 40), 2, (4, 1), sinks=sinks, alibi_slopes=slopes)
        near(call("cuda"), call("reference"))

    @pytest.mark.parametrize("within", [True, False])
    @pytest.mark.parametrize("dims", [(576, 512), (512, 512)])
    @pytest.mark.parametrize("page", [16, 64])
    def test_blocks_go_on_to_other_rows(
        self, within: bool, dims: tuple[int, int], page: int, even: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(latent, "_EMULATED", 2)
        call = Paged((700, 3, 260, 1, 129), within=within, dims=dims, page=page)
        near(call("cuda"), call("reference"))
        assert even == [2]

    def test_it_repeats_to_the_bit_whatever_the_order_of_warps(
        self, even: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = Paged((700, 3, 260), 2, (4, 1))
        first = call("cuda")
        for seed in (1, 2):
            monkeypatch.setattr(emulator, "residents", emulator.Residents(1, seed))
            for one, other in zip(call("cuda"), first, strict=True):
                assert torch.equal(one, other)
        assert even == [3, 3, 3]

    def test_sequences_without_keys_or_without_queries(self, even: list[int]) -> None:
        for lengths, queries in (((0, 40), (0, 0)), ((0, 0, 90), (0, 2, 0)), ((70, 0), (0, 3))):
            call = Paged(lengths, queries)
            near(call("cuda"), call("reference"))
        assert even == [3, 3, 3]

    @pytest.mark.parametrize(
        "edges",
        [
            (0, 4, 8, 12, 16),  # four queries each, where one was promised
            (3, 4, 4, 9, 9),  # rows that are nobody's
            (0, 9, 2, 11, 4),  # that go back
        ],
    )
    def test_offsets_that_are_wrong_reach_no_memory_but_their_own(
        self, edges: tuple[int, ...], even: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of a GPU are not looked at by the host. On the CPU they are, but for this test."""
        monkeypatch.setattr(varlen, "check_edges", lambda *_: None)
        key = torch.randn(1600, 1, 576).bfloat16()
        query = torch.full((16, 16, 576), 0.5).bfloat16()
        keys = torch.arange(5).int() * 400
        out = attnswitch.attention_varlen(
            query,
            key,
            key[..., :512],
            torch.tensor(edges).int(),
            keys,
            max_seqlen_q=1,
            max_seqlen_k=100,
            backend="cuda",
        )
        assert even == [3]
        assert out.shape == (16, 16, 512)


class TestChoice:
    @pytest.mark.parametrize(
        ("text", "even"),
        [
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.page=64", True),
            ("b128.h128/1.s1x4096.d576/512.bf16.lengths.page=64", False),  # two tiles of rows have the same keys
            ("b64.h4/1.s4x4096.d576/512.bf16.causal.varlen", True),
            ("b16.h16/1.s1x4096.d576/512.bf16.lengths.page=64", False),  # rows would have nine parts each
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.page=64.alibi", True),
            ("b64.h16/1.s1x4096.d576/512.bf16", False),  # all of one length, which the host knows
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.page=64.splits=4", False),  # bits are promised
            ("b600.h16/1.s1x4096.d576/512.bf16.lengths", False),  # more tiles of rows than SMs by far
        ],
    )
    def test_keys_are_split_evenly_where_the_gpu_alone_knows_how_many(self, text: str, even: bool) -> None:
        first = next(config.configs(Problem.parse(text), H200))
        assert first.forward.even is even
        assert ("even" in str(first)) is even

    @pytest.mark.parametrize(
        ("text", "rows"),
        [
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.page=64.splits=4", 16),
            # Of sequences one after another some may have more than one query.
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.varlen.page=64.splits=4", 64),
            ("b64.h16/1.s2x4096.d576/512.bf16.lengths.page=64.splits=4", 64),
        ],
    )
    @pytest.mark.parametrize("device", ["h200", "cpu"])
    def test_one_tile_where_bits_are_promised(self, text: str, rows: int, device: str) -> None:
        for more in ("", ".window=100,0"):
            (only,) = config.configs(Problem.parse(text + more), Device.named(device))
            assert (only.forward.queries, only.splits) == (rows, 4)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("b1.h8/1.s1x4096.d576/512.bf16.lengths.page=64", ""),
            ("b1.h8/1.s1x4096.d576/512.bf16.lengths.page=16", ""),
            ("b2.h8.s512.d512.fp16.causal.softcap=30.0", ""),
            ("b1.h8/1.s1x4096.d576/512.bf16.lengths.page=8", "page=8"),
            ("b1.h8/1.s1x4080.d576/512.bf16.lengths.page=48", "page=48"),
            ("b1.h8/1.s1x4096.d576.bf16", "dim_v=576"),
            ("b1.h8.s512.d512.bf16.grad", "gradients"),
            ("b1.h8.s512.d512.bf16.mask=bool", "attn_mask"),
            ("b1.h8.s512.d512.bf16.dropout=0.1", "dropout"),
            ("b1.h8.s512.d512.fp32", "float32"),
            ("b1.h8/1.s4x4096.d576/512.bf16.causal-br.lengths.page=64.tree", "tree_mask"),
            ("b1.h8.s512.d512/260.bf16", "dim_v=260"),
            ("b1.h8.s512.d512.bf16.k=align8", "key is aligned"),
        ],
    )
    def test_what_it_refuses_has_a_reason(self, text: str, why: str) -> None:
        problem = Problem.parse(text)
        reasons = families.against_latent(problem, H200)
        assert bool(reasons) == bool(why), reasons
        assert why in "; ".join(reasons)
        refused = list(backend.CudaBackend().reasons(problem, H200))
        assert bool(refused) == bool(why), refused

    def test_other_gpus_have_none(self) -> None:
        problem = Problem.parse("b1.h8/1.s1x4096.d576/512.bf16.lengths.page=64")
        for name in ("a100", "b200"):
            assert any("at most 256" in why for why in backend.CudaBackend().reasons(problem, Device.named(name)))

    def test_narrow_heads_keep_their_kernels(self) -> None:
        for text in ("b4.h16.s2048.d256.bf16", "b16.h32/8.s1x4096.d128.bf16.lengths.page=64"):
            first = next(config.configs(Problem.parse(text), H200))
            assert not isinstance(first.forward, tiles.LatentTile)

    @pytest.mark.parametrize(
        ("text", "least", "most"),
        [
            ("b128.h128/1.s1x4096.d576/512.bf16", 1, 1),  # two rounds of blocks
            ("b16.h128/1.s1x4096.d576/512.bf16", 4, 4),  # 32 blocks for 132 SMs
            ("b1.h16/1.s1x65536.d576/512.bf16", 64, 128),
            ("b1.h16/1.s1x100.d576/512.bf16", 1, 1),
            ("b2.h8.s4096.d512.bf16.causal", 1, 1),
        ],
    )
    def test_splits_fill_the_gpu(self, text: str, least: int, most: int) -> None:
        assert least <= choice.latent_splits(Problem.parse(text), H200) <= most

    def test_a_box_holds_the_heads_of_a_tile(self) -> None:
        """As many rows of as many heads as make 64."""
        for heads, pack in ((128, 64), (64, 64), (40, 64), (16, 16), (20, 32), (3, 4), (1, 1)):
            problem = Problem.parse(f"b2.h{heads}/1.s7x100.d576/512.bf16")
            assert tiles.latent_heads(problem, tiles.LATENT) == pack
            launches = latent.Forward(problem, tiles.LATENT, 1, H200)
            assert launches.blocks == 2 * -(-heads // pack) * -(-7 // (64 // pack))

    @pytest.mark.parametrize(
        ("text", "few"),
        [
            ("b64.h16/1.s1x4096.d576/512.bf16.lengths.page=64", True),
            ("b64.h12/1.s1x4096.d576/512.bf16.lengths.page=64", True),
            ("b64.h8/1.s2x4096.d576/512.bf16.causal-br.lengths.page=64", True),
            ("b64.h12/1.s2x4096.d576/512.bf16.causal-br.lengths.page=64", False),
            ("b64.h128/1.s1x4096.d576/512.bf16.lengths.page=64", False),
            ("b2.h8.s16x512.d512.bf16", True),
            ("b2.h8.s17x512.d512.bf16", False),
        ],
    )
    def test_few_rows_have_a_tile_of_their_own(self, text: str, few: bool) -> None:
        problem = Problem.parse(text)
        tile = choice.latent(problem, H200)
        assert (tile.queries, tile.stages) == ((16, 3) if few else (64, 2))
        assert next(config.configs(problem, H200)).forward == choice.latent(problem, H200)
        assert tiles.latent_shared(problem, choice.latent(problem, H200)) <= 227 * 1024


class TestCost:
    def test_latent_values_are_read_with_the_keys(self) -> None:
        latent = Problem.parse("b16.h128/1.s1x4096.d576/512.bf16.lengths.page=64")
        assert cost.kv_read(latent) == 16 * 4096 * 576 * 2
        for text in ("b2.h8.s4096.d512.bf16", "b16.h16/1.s1x4096.d192/128.bf16", "b2.h4/2.s1x64.d576/512.bf16"):
            assert cost.kv_read(Problem.parse(text)) == cost.kv_bytes(Problem.parse(text))

    @pytest.mark.parametrize(
        "text",
        [
            *("b2.h4/1.s1x128.d576/512.bf16", "b2.h4/1.s1x128.d576/512.bf16.varlen", "b2.h4/1.s64.d576/512.bf16.grad"),
            *(f"b2.h4/1.s1x128.d576/512.bf16.lengths{form}" for form in ("", ".page=64", ".page=64.cache=fp8e4m3")),
            *("b2.h4/1.s2x128.d576/512.bf16.lengths.varlen.page=64", "b2.h4/1.s1x128.d512.bf16.lengths.page=64"),
        ],
    )
    def test_a_benchmark_has_them_in_the_keys(self, text: str) -> None:
        work = workload.of(Problem.parse(text), "cpu")
        assert (work.value.data_ptr() == work.key.data_ptr()) == cost.is_latent(work.problem)
        assert work.value.shape[-1] == 512
