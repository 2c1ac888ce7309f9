"""Among how many blocks the portable forward divides keys in pages, whose lengths the host does not know."""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine import registry
from attnswitch.machine.device import Device

config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
merging = importlib.import_module("attnswitch.backends.cuda.launching.merging")
splits = importlib.import_module("attnswitch.backends.cuda.portable.splits")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")

H200 = Device.named("h200")
EIGHT = tiles.Tile(16, 16, 8, 3, apart=True)


def paged(batch: int, more: str = "") -> Problem:
    return Problem.parse(f"b{batch}.h32/8.s1x4096.d128.bf16.lengths.page=16{more}")


def ended(lengths: list[int], parts: int, slots: int = 132) -> float:
    """When the last of ``slots`` is done that take blocks, the longest first, of 8 heads: in steps of a tile."""
    at = [0.0] * slots
    for length in sorted(lengths, reverse=True):
        for _ in range(8 * parts):
            first = at.index(min(at))
            at[first] += -(-length // (parts * EIGHT.teams * EIGHT.keys)) + splits.EXTRA
    return max(at) + (splits._MERGE if parts > 1 else 0)


def test_where_the_longest_would_decide_keys_are_divided() -> None:
    """A batch that fills the GPU once is; one that keeps it busy for several rounds is not."""
    for batch in (12, 16, 32):
        assert next(config.configs(paged(batch), H200)).splits > 1
    for batch, before in ((1, 16), (4, 4), (8, 2)):
        assert next(config.configs(paged(batch), H200)).splits == before
    for batch in (64, 128):
        assert next(config.configs(paged(batch), H200)).splits == 1
    assert splits.schedule(paged(16).replace(page=0), H200, EIGHT)[1] == 1


@pytest.mark.parametrize("batch", [9, 16])
def test_as_many_splits_as_blocks_that_take_turns_would_want(batch: int) -> None:
    """Beside a simulation of lengths drawn at random: within 6 % of the best number, and far from whole rows."""
    draw = random.Random(batch)
    drawn = [[draw.randrange(4096) for _ in range(batch - 1)] + [4096] for _ in range(100)]
    means = {parts: sum(ended(lengths, parts) for lengths in drawn) / len(drawn) for parts in range(1, 9)}
    assert means[splits.schedule(paged(batch), H200, EIGHT)[1]] <= 1.06 * min(means.values())
    assert means[1] > 1.2 * min(means.values())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("b13.h1.s26x7885.d80.bf16.causal", 1),  # 26 keys are seen: 16.3 us in 25 parts, 8.5 in one (an H200)
        ("b1.h8.s64x8192.d64.bf16.window=100,100", 1),  # 265 are: 14.7 us in parts, 8.7 in one
        ("b4.h64/8.s1x8192.d64.bf16.causal-br.window=127,0", 1),
        ("b4.h64/8.s1x8192.d64.bf16.causal-br", 4),
    ],
)
def test_keys_that_no_query_sees_are_not_divided(text: str, parts: int) -> None:
    assert next(config.configs(Problem.parse(text), H200)).splits == parts


@pytest.mark.parametrize(
    ("text", "stages", "parts"),
    [
        ("b10.h12.s32x2720.d128.fp32.causal-br", 1, 3),  # 258 us; with three stages, and whole, 444 (an H200)
        ("b64.h16.s32x512.d128.fp32", 1, 1),
        ("b10.h12.s32x2720.d64.fp32", 3, 3),  # they fit four times
    ],
)
def test_stages_leave_room_for_other_blocks(text: str, stages: int, parts: int) -> None:
    chosen = next(config.configs(Problem.parse(text), H200))
    assert (chosen.forward.stages, chosen.splits) == (stages, parts)


def test_what_is_asked_for_is_what_is_done() -> None:
    for batch, parts in itertools.product((1, 16, 128), (1, 3, 40)):
        assert [each.splits for each in config.configs(paged(batch, f".splits={parts}"), H200)] == [parts]


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_more_parts_than_memory_is_to_hold_are_refused(name: str) -> None:
    backend = registry.loaded(name)
    assert not list(backend.reasons(paged(16, ".splits=4096"), H200))
    (reason,) = backend.reasons(paged(16, ".splits=1000000"), H200)
    assert reason == "num_splits=1000000: each part of the keys is kept in memory, of 4096 at most"


def test_others_are_there_to_be_tuned() -> None:
    """By the tile that is first, and by one of more warps; each once."""
    found = list(itertools.islice(config.configs(paged(16), H200), 25))
    assert len(set(found)) == len(found)
    for warps in (4, 8, 12):
        assert {1, 2, 3, 4} <= {each.splits for each in found if each.forward.warps == warps}


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_each_sequence_has_its_own_where_the_longest_come_first(integers: torch.dtype) -> None:
    """As many as a warp has lanes, and one more, in any order, some of them alike."""
    draw = torch.Generator().manual_seed(0)
    for batch in (2, 32, 33):
        lengths = torch.randint(0, 30, (batch,), generator=draw).to(integers)
        query = torch.randn(batch, 1, 2, 16, generator=draw)
        cache = torch.randn(batch * 4, 8, 1, 16, generator=draw)
        table = torch.randperm(batch * 4, generator=draw).view(batch, 4).int()
        call: dict[str, Any] = {"block_table": table, "cache_lengths": lengths, "num_splits": 2}
        found, right = (
            attnswitch.attention_paged(query, cache, cache, **call, backend=name) for name in ("cuda", "reference")
        )
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("sinks", [None, (0.5, -2.0)], ids=["plain", "sinks"])
@pytest.mark.parametrize("parts", [2, 32, 33, 60])
def test_a_warp_or_a_block_merges_a_row(
    parts: int, sinks: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are no multiple of a block's, some of which see nothing."""
    monkeypatch.setattr(splits, "_MOST_MERGED", 0)
    assert merging.alone(parts) == (parts <= 32)
    draw = torch.Generator().manual_seed(parts)
    lengths = torch.tensor([0, 5, 300])
    query = torch.randn(3, 3, 2, 40, generator=draw)
    cache = torch.randn(3 * 19, 16, 1, 40, generator=draw)
    call: dict[str, Any] = {
        "block_table": torch.randperm(3 * 19, generator=draw).view(3, 19).int(),
        "cache_lengths": lengths,
        "num_splits": parts,
        "return_lse": True,
        "sinks": None if sinks is None else torch.tensor(sinks),
    }
    found, right = (
        attnswitch.attention_paged(query, cache, cache, **call, backend=name) for name in ("cuda", "reference")
    )
    for ours, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
