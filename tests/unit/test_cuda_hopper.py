"""Builds of the Hopper family: whatever overlaps stays in registers, and a block asks for no more than it has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from attnswitch import CompileError

pytest.importorskip("cupy")
nvrtc = importlib.import_module("attnswitch.backends.cuda.nvrtc")
usage = importlib.import_module("attnswitch.backends.cuda.cubin").usage
sources = importlib.import_module("attnswitch.backends.cuda.sources")
Variant = importlib.import_module("attnswitch.backends.cuda.variant").Variant

OFF = ("SPECIALISED", "OVERLAP", "PINGPONG", "LAZY", "MIXED", "POLYNOMIAL", "PERSISTENT", "CONTINUED")
#: Nothing beside anything else.
PLAIN = {**dict.fromkeys(OFF, 0), "WEIGHTS": 1, "QUERY_STAGES": 1}
SPECIALISED = {**PLAIN, "SPECIALISED": 1}
OVERLAPPED = {**SPECIALISED, "OVERLAP": 1, "PINGPONG": 1}
PERSISTENT = {**OVERLAPPED, "PERSISTENT": 1, "LAZY": 1}
#: Rows, keys, dimension.
TILES = [(192, 128, 64), (128, 128, 128), (128, 80, 256)]
#: Bytes that a thread may spill: where three warpgroups compute, they have 160 registers each.
SPILLED = {64: 32, 128: 0, 256: 0}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))


def variant(flags: dict[str, int], rows: int, columns: int, dim: int, dtype: str = "bfloat16") -> Any:
    consumers, stages = rows // 64, 2
    return Variant(
        "forward",
        dtype,
        rows,
        columns,
        dim,
        dim,
        warps=4 * (consumers + flags["SPECIALISED"]),
        stages=stages,
        shared=2 * dim * (rows * flags["QUERY_STAGES"] + 2 * stages * columns) + 1024,
        flags=tuple(flags.items()),
        family="hopper",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns", "dim"), TILES)
def test_the_fastest_kernels_keep_tiles_in_registers(rows: int, columns: int, dim: int, dtype: str) -> None:
    built = nvrtc.cubin(variant({**PERSISTENT, "MIXED": 1}, rows, columns, dim, dtype), "sm_90a")
    assert usage(built).local <= SPILLED[dim]


@pytest.mark.parametrize(
    "flags",
    [
        PLAIN,
        SPECIALISED,
        OVERLAPPED,
        PERSISTENT,
        {**PERSISTENT, "CONTINUED": 1, "QUERY_STAGES": 2},
        {**PERSISTENT, "WEIGHTS": 2},
        {**PERSISTENT, "MIXED": 2, "POLYNOMIAL": 8},
    ],
    ids=["plain", "specialised", "overlapped", "persistent", "continued", "two-weights", "mixed"],
)
def test_every_stage_does(flags: dict[str, int]) -> None:
    assert usage(nvrtc.cubin(variant(flags, 128, 128, 128), "sm_90a")).local == 0


def test_registers_that_a_block_does_not_have_are_refused() -> None:
    """It would wait for them for ever."""
    source = sources.of_gpus()["hopper/forward.cu"]
    greedy, changed = re.subn(r"(CONSUMERS == 2 \? )232\b", r"\g<1>240", source)
    assert changed == 1
    chosen = variant(OVERLAPPED, 128, 128, 128)
    options = tuple(f"-D{name}={value}" for name, value in {**chosen.sizes, **dict(chosen.flags)}.items())
    with pytest.raises(CompileError, match="registers for all"):
        nvrtc.compiled(greedy, "sm_90a", options)
