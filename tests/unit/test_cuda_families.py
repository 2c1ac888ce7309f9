"""Which family of the CUDA backend takes a forward, what ``explain`` says of it, and what a Hopper launch is given."""

from __future__ import annotations

import ctypes
import importlib
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Mask, Memory

backend = importlib.import_module("attnswitch.backends.cuda.backend")
config = importlib.import_module("attnswitch.backends.cuda.config")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
hopper_tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")
families = importlib.import_module("attnswitch.backends.cuda.families")
hopper = importlib.import_module("attnswitch.backends.cuda.hopper.forward")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")
tensor_maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")

H200 = Device.named("h200")
PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16.causal.grad")
ODD = Problem.parse("b4.h16.s1024.d64.bf16.m=align2.grad")


def first(problem: Problem, device: Device = H200) -> Any:
    return next(config.configs(problem, device)).forward


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        PLAIN.replace(dtype="float16", lse=True),
        PLAIN.replace(alignment="bottom_right", seq_q=300, window=(64, 5), key_lengths=True),
        *(PLAIN.replace(dim_qk=dim, dim_v=dim) for dim in (8, 64, 80, 192, 256)),
        PLAIN.replace(dim_qk=192),
        PLAIN.replace(dim_qk=20, query=Memory(align=16)),
        PLAIN.replace(scale=2.0, nonfinite=True, causal=False),
        *(PLAIN.replace(mask=Mask("bool", axes), key_lengths=True, window=(64, 5)) for axes in ("", "bk", "q", "bhqk")),
        PLAIN.replace(mask=Mask("bool"), attn_mask=Memory(align=1, strided=True, expanded=True, negative=True)),
        *(PLAIN.replace(softcap=30.0, scale=scale) for scale in (None, -0.5, 1e-30)),
        PLAIN.replace(softcap=1e35),
        PLAIN.replace(dropout=0.1),
        # Enough tiles of queries for the SMs; with fewer, keys are split, unless something besides is asked for.
        *(PLAIN.replace(batch=1, heads_q=36, seq_q=128, seq_k=keys, causal=False) for keys in (4096, 16384)),
        PLAIN.replace(batch=1, heads_q=32, seq_q=128, seq_k=16384, causal=False, softcap=30.0),
        PLAIN.replace(batch=1, heads_q=32, seq_q=128, seq_k=16384),  # whose queries see 128 keys
        PLAIN.replace(batch=1, heads_q=20, seq_q=128, seq_k=2048, causal=False),
        PLAIN.replace(batch=1, heads_q=20, seq_q=128, seq_k=8192, causal=False, dim_qk=256, dim_v=256),
        *(PLAIN.replace(mask=Mask("bfloat16", axes), softcap=3.0) for axes in ("k", "bk", "qk", "bhqk")),
        ODD.replace(mask=Mask("bfloat16", "qk"), batch=2, grads=""),
        ODD.replace(mask=Mask("bfloat16", "bhqk")),
        *(PLAIN.replace(sinks=True, mask=mask) for mask in (None, Mask("bool", "bk"), Mask("bfloat16"))),
        Problem.parse("b1.h64/8.s8192.d64.bf16.causal.window=127,0.sinks"),
        PLAIN.replace(sinks=True, varlen=True, dropout=0.1),
    ],
    ids=str,
)
def test_hopper_takes_the_forward(problem: Problem) -> None:
    assert families.against_hopper(problem, H200) == ()
    assert isinstance(first(problem), hopper_tiles.HopperTile)


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (PLAIN, "a100", r"A100, sm_80.*compute capability 9\.0"),
        (PLAIN, "b200", r"B200, sm_100.*compute capability 9\.0"),
        (PLAIN.replace(dtype="float32"), "h200", "float32"),
        *((PLAIN.replace(mask=Mask(kind)), "h200", f"attn_mask of {kind}") for kind in ("float16", "float32")),
        (PLAIN.replace(mask=Mask("bfloat16", "bq")), "h200", "attn_mask is the same for all keys"),
        (ODD.replace(mask=Mask("bfloat16"), batch=1, seq_q=64), "h200", "attn_mask lies in no rows"),
        (ODD.replace(mask=Mask("bfloat16", "bhqk"), grads=""), "h200", "a copy would take longer"),
        (ODD.replace(mask=Mask("bfloat16", "qk"), batch=2), "h200", "a copy would take longer"),
        (PLAIN.replace(mask=Mask("bfloat16"), attn_mask=Memory(expanded=True)), "h200", "attn_mask is expanded"),
        *((PLAIN.replace(softcap=30.0, scale=scale), "h200", "scale=.*softcap=30: ") for scale in (0.0, 1e-38, 1e40)),
        (PLAIN.replace(softcap=1e-39), "h200", "softcap=1e-39"),
        *((PLAIN.replace(scale=scale), "h200", "scale=") for scale in (0.0, -0.5, 1e-40, 1e39)),
        (PLAIN.replace(seq_q=0), "h200", "nothing to compute"),
        (PLAIN.replace(seq_k=0), "h200", "nothing to compute"),
        (PLAIN.replace(dim_v=20), "h200", "dim_v=20"),
        (PLAIN.replace(seq_q=1), "h200", "1 queries"),
        (PLAIN.replace(batch=1, heads_q=4, seq_q=300, seq_k=9000), "h200", "12 tiles of queries for 132 SMs"),
        (PLAIN.replace(batch=1, heads_q=16, seq_q=50, seq_k=4096), "h200", "16 tiles of queries for 132 SMs"),
        *(
            (PLAIN.replace(batch=1, seq_k=8192, alignment="bottom_right", **sizes), "h200", "it does not split keys")
            for sizes in (
                {"heads_q": 32, "seq_q": 128},
                {"heads_q": 40, "seq_q": 35, "dim_qk": 96, "dim_v": 96},
                {"heads_q": 24, "seq_q": 200, "dim_qk": 64, "dim_v": 64},
                {"heads_q": 24, "seq_q": 64, "dim_qk": 256, "dim_v": 256},
            )
        ),
        (PLAIN.replace(batch=1, seq_k=2048, seq_q=64, causal=False), "h200", "it does not split keys"),
        (PLAIN.replace(query=Memory(align=8)), "h200", "query is aligned to 8 bytes"),
        (PLAIN.replace(key=Memory(strided=True)), "h200", "key is strided"),
        (PLAIN.replace(value=Memory(expanded=True)), "h200", "value is expanded"),
        (PLAIN.replace(value=Memory(negative=True)), "h200", "value is turned round"),
    ],
    ids=str,
)
def test_the_portable_family_takes_the_rest(problem: Problem, device: str, words: str) -> None:
    where = Device.named(device)
    (reason,) = families.against_hopper(problem, where)
    assert re.search(words, reason)
    assert isinstance(first(problem, where), tiles.Tile)
    remark = backend.CudaBackend().remarks(problem, where, "")[0]
    assert (reason in remark) == (where.capability == (9, 0)), "elsewhere there is nothing to say"


def test_all_of_both_families_can_be_searched() -> None:
    found = list(config.configs(PLAIN, H200))
    own = [chosen for chosen in found if isinstance(chosen.forward, hopper_tiles.HopperTile)]
    assert own == found[: len(own)]
    assert len(own) > 1
    assert first(PLAIN, Device.named("a100")) in {chosen.forward for chosen in found[len(own) :]}
    assert len({str(chosen) for chosen in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("b4.h16.s4096.d128.bf16", 192),
        ("b1.h16.s16384.d128.bf16.causal", 192),
        ("b1.h16.s2048.d128.bf16", 128),  # 176 tiles of 192 rows are two turns of 132 SMs, as are 256 of 128
        ("b16.h16.s1024.d128.bf16.causal", 128),  # much of 192 rows is past the diagonal, and past the last query
        ("b16.h32.s1024.d64.bf16.causal", 128),  # 36 tiles of keys for 8 of 128 rows, 32 for 6 of 192
        ("b4.h32.s4096.d64.bf16.causal", 192),
        ("b1.h16.s2048.d64.bf16", 128),
    ],
)
def test_the_height_of_a_tile_is_what_keeps_all_sms_busy(text: str, queries: int) -> None:
    assert first(Problem.parse(text)).queries == queries


@pytest.mark.parametrize(
    ("dim", "more", "tile"),
    [
        (64, ".mask=bool", (128, 128)),
        (96, ".mask=bool", (128, 128)),
        (128, ".mask=bool", (192, 80)),
        (128, ".mask=bool.softcap=30.0", (128, 128)),
        (256, ".mask=bool", (128, 80)),
        (64, ".softcap=30.0", (128, 128)),
        (128, ".softcap=30.0", (128, 128)),
        (256, ".softcap=30.0", (128, 64)),
        (64, ".dropout=0.1", (128, 128)),
        (96, ".causal.dropout=0.1", (128, 128)),
        (128, ".causal.dropout=0.1", (128, 128)),
        (256, ".dropout=0.1", (128, 64)),
    ],
)
def test_what_takes_registers_takes_a_tile_that_leaves_them(dim: int, more: str, tile: tuple[int, int]) -> None:
    chosen = first(Problem.parse(f"b4.h16.s4096.d{dim}.bf16{more}"))
    assert (chosen.queries, chosen.keys) == tile
    assert not (chosen.continued and "dropout" in more)


@pytest.mark.parametrize(
    ("text", "continued"),
    [
        ("b5.h8.s306.d128.bf16", False),  # one turn: no next rows
        ("b12.h12.s173.d128.bf16.causal", False),  # about two, of few keys
        ("b41.h32.s202.d128.bf16.causal", True),  # twenty
        ("b4.h16.s4096.d128.bf16", True),
        ("b2.h12.s91.d64.bf16.causal", False),
    ],
)
def test_the_next_rows_are_begun_early_where_there_are_many(text: str, continued: bool) -> None:
    assert first(Problem.parse(text)).continued == continued


def test_a_tile_is_chosen_for_any_length_in_no_time() -> None:
    start = time.process_time()
    assert first(Problem.parse("b1.h8.s100000000.d64.bf16.causal")).queries == 192
    assert time.process_time() - start < 1


@pytest.mark.parametrize("more", [".lengths", ".mask=bool:bk", ".mask=bool:bqk"])
def test_tiles_of_all_sizes_fill_gaps_and_are_not_continued(more: str) -> None:
    """Lengths and masks leave some rows less than others; but not so little that 176 of 192 take but one turn."""
    chosen = first(Problem.parse(f"b4.h16.s2048.d128.bf16{more}"))
    assert (chosen.queries, chosen.keys, chosen.continued) == (192, 80, False)
    assert first(Problem.parse("b4.h16.s2048.d128.bf16")).queries == 128
    assert first(Problem.parse(f"b1.h16.s2048.d128.bf16{more}")).queries == 128


@pytest.mark.parametrize(
    ("dims", "compiled"),
    [
        ((64, 64), (64, 64)),
        ((72, 80), (96, 96)),
        ((96, 8), (96, 96)),
        ((8, 104), (128, 128)),
        ((136, 128), (192, 128)),
        ((192, 64), (192, 128)),
        ((192, 192), (256, 256)),
    ],
)
def test_head_dimensions_are_filled_up_to_the_next(dims: tuple[int, int], compiled: tuple[int, int]) -> None:
    assert hopper_tiles.dims(PLAIN.replace(dim_qk=dims[0], dim_v=dims[1])) == compiled


@pytest.mark.parametrize("mask", [None, Mask("bool"), Mask("bfloat16"), Mask("bfloat16", "bk")])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_every_tile_fits_a_block(dims: tuple[int, int], mask: Mask | None) -> None:
    problem = PLAIN.replace(dim_qk=dims[0], dim_v=dims[1], mask=mask)
    for chosen in config.configs(problem, H200):
        tile = chosen.forward
        if isinstance(tile, hopper_tiles.HopperTile):
            assert tile.queries % 64 == 0
            assert tile.keys in (64, 80, 112, 128), "which products there are instructions for"
            assert hopper_tiles.shared(tile, problem) <= H200.shared_memory


def test_on_this_machine_what_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_missing", lambda: "cupy is not installed")
    assert families.against_hopper(PLAIN, replace(H200, present=True)) == ("cupy is not installed",)
    assert families.against_hopper(PLAIN, H200) == ()


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: None)
    families._missing.cache_clear()
    assert re.search(r"^cupy is not installed; pip install attnswitch\[cuda13\]", families._missing())
    families._missing.cache_clear()


# -- what explain says -------------------------------------------------------------------------------------------------


def told(problem: Problem, device: str) -> str:
    return str(attnswitch.explain(problem, device=device))


def test_explain_names_the_family_and_says_why() -> None:
    assert "forward by Hopper's kernel, hopper 128x128 s2\n" in told(PLAIN, "h200")
    assert "forward by the portable kernels, not by Hopper's (scale=-0.5" in told(PLAIN.replace(scale=-0.5), "h200")
    dropout = told(PLAIN.replace(dropout=0.1, dim_v=192), "h200")
    assert "backward by the portable kernels, not by Hopper's (dropout_p=0.1" in dropout
    assert re.search(r"forward by a portable kernel, 128x\d+ w\d s2 r\d\n", told(PLAIN, "a100"))
    assert "Hopper" not in told(PLAIN, "cpu")


def test_the_config_that_was_measured_says_which_family() -> None:
    portable = next(c for c in config.configs(PLAIN, H200) if isinstance(c.forward, tiles.Tile))
    forward, backward = backend.CudaBackend().remarks(PLAIN, H200, str(portable))
    assert forward == f"forward by the portable kernels, not by Hopper's ({portable.forward} was faster here)"
    assert backward == f"backward by Hopper's kernel, {portable.backward}"


# -- launches ----------------------------------------------------------------------------------------------------------


def operands(problem: Problem) -> Inputs:
    p, kind = problem, getattr(torch, problem.dtype)
    q = torch.zeros(p.batch, p.heads_q, p.seq_q, p.dim_qk, dtype=kind)
    k = torch.zeros(p.batch, p.seq_k, p.heads_kv, p.dim_qk, dtype=kind).transpose(1, 2)
    v = torch.zeros(p.batch, p.heads_kv, p.seq_k, p.dim_v, dtype=kind)
    mask = torch.ones(p.mask_shape, dtype=torch.bool) if p.mask_shape else None
    return Inputs(q, k, v, mask, key_lengths=torch.full((p.batch,), p.seq_k) if p.key_lengths else None)


def launches(problem: Problem, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> list[Any]:
    started: list[Any] = []
    monkeypatch.setattr(run, "start", lambda *parts, **_: started.append(parts))
    forward = hopper.Forward(problem, next(config.configs(problem, H200)).forward, H200)
    inputs = operands(problem)
    out = torch.zeros(problem.batch, problem.heads_q, problem.seq_q, problem.dim_v, dtype=inputs.query.dtype)
    for _ in range(times):
        forward(inputs, out, torch.zeros(out.shape[:3]))
    return [(inputs, *parts) for parts in started]


@pytest.mark.parametrize(
    ("sizes", "blocks"), [("b1.h2.s1000", 16), ("b4.h16/4.s1024", 132)], ids=["fewer-tiles-than-sms", "more"]
)
def test_there_are_no_more_blocks_than_sms(sizes: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse(f"{sizes}.d128.bf16")
    ((_, variant, launched, arguments, *_),) = launches(problem, monkeypatch)
    assert (variant.family, variant.threads, launched) == ("hopper", 384, blocks)
    assert arguments.section >= 1
    assert arguments.pack == arguments.splits == 1


def test_tiles_are_counted_where_there_are_more_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, _, blocks, arguments, _, _, counted),) = launches(PLAIN, monkeypatch)
    assert (blocks, arguments.counter, counted) == (132, None, True)  # ``run.start`` has a counter
    ((_, _, blocks, arguments, _, _, counted),) = launches(Problem.parse("b1.h4.s1024.d128.bf16"), monkeypatch)
    assert (blocks, arguments.counter, counted) == (32, None, False)


def test_only_what_follows_a_look_at_a_mask_begins_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone waits by itself for the end of the launch before."""
    named: list[tuple[str, bool]] = []
    for problem in (PLAIN, PLAIN.replace(mask=Mask("bool", "bk"))):
        forward = hopper.Forward(problem, next(config.configs(problem, H200)).forward, H200)
        inputs = operands(problem)
        out = torch.zeros(problem.batch, problem.heads_q, problem.seq_q, problem.dim_v, dtype=inputs.query.dtype)
        with monkeypatch.context() as patch:
            patch.setattr(run, "start", lambda variant, *_, beside=False: named.append((variant.kernel, beside)))
            forward(inputs, out, torch.zeros(out.shape[:3]))
    assert named == [("forward", False), ("survey", False), ("forward", True)]


def test_a_mask_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch makes the counter blank that the forward takes its tiles from; each call has both to itself."""
    found = launches(PLAIN.replace(mask=Mask("bool", "bqk")), monkeypatch, times=2)
    assert [parts[1].kernel for parts in found] == ["survey", "forward"] * 2
    for (_, survey, blocks, arguments, looked, *_), (_, forward, _, passed, *rest) in (found[:2], found[2:]):
        assert (survey.columns, survey.family) == (forward.columns, "hopper")
        assert blocks == 4 * (1024 // 64), "planes and groups of rows, of eight tiles"
        assert (arguments.mask_batch, arguments.mask_heads, arguments.mask_rows) == (4, 1, 1024)
        assert arguments.counter == looked.data_ptr() == passed.counter
        assert looked.data_ptr() < arguments.mask_sets < arguments.mask_bits < looked.data_ptr() + 4 * looked.numel()
        assert dict(forward.flags)["MASKED"] == 1
        assert len(rest) == 2, "no counter to be cleared"
    assert found[0][3].counter != found[2][3].counter


@pytest.mark.parametrize(
    ("text", "hoppers"),
    [
        ("b4.h16.s48.d64.bf16", False),
        ("b4.h16.s64.d128.fp16", False),
        ("b4.h16.s65.d64.bf16", True),
        ("b4.h16.s64x65.d64.bf16", True),
        ("b4.h16.s40x531.d64.fp16.causal", False),
        ("b4.h16.s40x531.d64.fp16.causal-br", True),
        ("b4.h16.s64.d192.bf16", True),
        ("b4.h16/4.s48.d64.bf16", True),  # whose rows fill Hopper's tiles
    ],
)
def test_few_queries_that_see_few_keys_have_small_tiles(text: str, hoppers: bool) -> None:
    problem = Problem.parse(text)
    assert (not families.against_hopper(problem, H200)) is hoppers
    chosen = next(config.configs(problem, H200)).forward
    assert (str(chosen) == "32x32 w2 s2 r1") is not hoppers


@pytest.mark.parametrize(("softcap", "flag"), [(0.0, 0), (30.0, 1)])
def test_a_softcap_is_compiled_in(softcap: float, flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, variant, _, arguments, *_),) = launches(PLAIN.replace(softcap=softcap, scale=0.6), monkeypatch)
    others = ("CONTINUED", "MASKED", "DROPOUT", "BIAS", "ALIBI", "SINKS")
    assert dict(variant.flags) == {"SOFTCAP": flag, **dict.fromkeys(others, 0)}
    assert arguments.cap == softcap
    assert arguments.factor == pytest.approx(0.6 / 30.0 if flag else 0.6 * 1.4426950408889634)


def test_tiles_are_those_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    ((inputs, variant, _, arguments, _, maps, _),) = launches(PLAIN.replace(dim_qk=80, dim_v=72), monkeypatch)
    assert (variant.dim, variant.dim_v) == (96, 96)
    assert (arguments.dim, arguments.dim_v) == (80, 72)
    assert [m.box for m in maps] == [64, variant.columns, variant.columns]
    assert [m.shape for m in maps] == [(4, 16, 1024, 80), (4, 4, 1024, 80), (4, 4, 1024, 72)]
    assert maps[0].strides == (2 * 16 * 1024 * 80, 2 * 1024 * 80, 2 * 80)
    assert maps[1].strides == (2 * 4 * 1024 * 80, 2 * 80, 2 * 4 * 80)
    assert maps[1].address == inputs.key.data_ptr()


# -- tensor maps -------------------------------------------------------------------------------------------------------


def mapped(array: Any, box: int) -> Any:
    dtype = str(array.dtype).removeprefix("torch.")
    return tensor_maps.tensor_map(dtype, tuple(array.shape), box, (array.data_ptr(), *array.stride()))


def test_strides_of_single_entries_mean_nothing() -> None:
    plain = torch.zeros(1, 1, 100, 72, dtype=torch.float16)
    odd = plain.as_strided((1, 1, 100, 72), (3, 7, 72, 1))
    assert mapped(odd, 64) == mapped(plain, 64)
    assert all(stride % 16 == 0 for stride in mapped(odd, 64).strides)


class Driver:
    """libcuda, which notes what it is asked to encode; the map holds how many that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: int = 0) -> None:
        self.asked: list[Any] = []
        self.result = result
        monkeypatch.setattr(tensor_maps.driver, "_library", lambda: self)

    def cuTensorMapEncodeTiled(self, at: int, kind: int, rank: int, address: int, *rest: int) -> int:  # noqa: N802
        kinds = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32
        arrays = [
            [each.from_address(where + n * ctypes.sizeof(each)).value for n in range(4)]
            for each, where in zip(kinds, rest, strict=False)
        ]
        self.asked.append((kind, rank, address, *arrays, rest[4:]))
        assert at % 64 == 0
        (ctypes.c_uint64 * 16).from_address(at)[:] = [len(self.asked)] * 16
        return self.result

    def cuGetErrorName(self, result: int, said: Any) -> int:  # noqa: N802 - CUDA's name
        said._obj.value = f"CUDA_ERROR_{result}".encode()
        return 0


def encoded(made: Any) -> list[int]:
    return list((ctypes.c_uint64 * 16).from_address(made.pointer))


def test_the_driver_is_told_dimensions_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    value = torch.zeros(2, 3, 100, 72, dtype=torch.bfloat16)
    made = mapped(value, 80)
    assert encoded(made) == [1] * 16
    ((kind, rank, address, sizes, strides, box, steps, rest),) = driver.asked
    assert (kind, rank, address) == (9, 4, value.data_ptr())
    assert sizes == [72, 100, 3, 2]
    assert strides[:3] == [144, 14400, 43200]
    assert box == [64, 80, 1, 1]
    assert steps == [1, 1, 1, 1]
    assert rest == (0, 3, 3, 0)


def test_maps_are_encoded_once_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)

    def of(place: tuple[int, ...]) -> Any:
        return tensor_maps.tensor_map("float16", (2, 3, 100, 72), 80, place)

    here, there, strided = (64, 21600, 7200, 72, 1), (128, 21600, 7200, 72, 1), (64, 43200, 14400, 144, 1)
    assert len({of(here).pointer for _ in range(3)}) == 1
    assert len(driver.asked) == 1
    assert [encoded(of(place))[0] for place in (here, there, strided)] == [1, 2, 3]
    for address in range(0, 10**5, 16):
        of((address, 21600, 7200, 72, 1))
    assert tensor_maps.tensor_map.cache_info().currsize < 1000


def test_what_the_driver_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, result=1)
    with pytest.raises(tensor_maps.driver.DriverError, match="cuTensorMapEncodeTiled: CUDA_ERROR_1"):
        _ = mapped(torch.zeros(1, 1, 8, 8, dtype=torch.float16), 64).pointer
