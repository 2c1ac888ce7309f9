"""Builds of the Hopper family: whatever overlaps stays in registers, and nothing touches those that are in use."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import nights
import pytest

from attnswitch import CompileError, Problem
from attnswitch.machine.device import Device

pytest.importorskip("cupy")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
sys.path.append(str(Path(__file__).parents[2] / "fixtures"))
usage = importlib.import_module("cubin").usage
sass = importlib.import_module("sass")
sources = importlib.import_module("attnswitch.backends.cuda.compiling.sources")
config = importlib.import_module("attnswitch.backends.cuda.config")
tiles = importlib.import_module("attnswitch.backends.cuda.hopper.tiles")
hopper = importlib.import_module("attnswitch.backends.cuda.hopper.forward")

H200 = Device.named("h200")
#: Ptxas takes seconds for each.
DIMS = (
    "64",
    *(pytest.param(dims, marks=pytest.mark.slow) for dims in ("128", "256")),
    *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("96", "192/128")),
)
#: The same with features beside, each of which is one more to compile.
WITH_FEATURES = (
    pytest.param("128", marks=pytest.mark.slow),
    *(pytest.param(dims, marks=pytest.mark.nightly) for dims in ("64", "96", "192/128", "256")),
)
#: Bytes that a thread may spill, between tiles of rows: 128 rows and keys at D 128, not continued, have 168 registers,
#: and where three warpgroups compute, they have 160 each.
SPILLED = {2: 16, 3: 64}
#: The same behind a mask or a softcap, where loader and dealer spill what they look tiles up by.
SPILLED_MORE = {2: 64, 3: 128}
MORE = ("", ".mask=bool:bk", ".softcap=30.0", ".dropout=0.1", ".mask=bf16:hqk", ".sinks", ".alibi")
#: Where the machine code is read.
SOME = nights.some(MORE, 3)


def variants(dims: str, dtype: str = "bfloat16", more: str = "", causal: str = ".causal") -> list[Any]:
    """What the forward is compiled to in each of the family's configurations, the heuristic's choice first."""
    problem = Problem.parse(f"b4.h16.s4096.d{dims}.{dtype}{causal}{more}")
    configs = [c for c in config.configs(problem, H200) if isinstance(c.forward, tiles.HopperTile)]
    return [hopper.Forward(problem, chosen.forward, H200).variant for chosen in configs]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS)
def test_tiles_stay_in_registers(dims: str, dtype: str) -> None:
    for chosen in variants(dims, dtype):
        assert usage(nvrtc.cubin(chosen, "sm_90a")).local <= SPILLED[chosen.rows // 64], chosen


@pytest.mark.parametrize("more", MORE[1:])
@pytest.mark.parametrize("dims", WITH_FEATURES)
def test_the_tile_of_a_feature_stays_in_registers(dims: str, more: str) -> None:
    """But for a few addresses, and for the threads that load and deal."""
    for chosen in (variants(dims, more=more)[0], variants(dims, more=more, causal="")[0]):
        assert usage(nvrtc.cubin(chosen, "sm_90a")).local <= SPILLED_MORE[chosen.rows // 64], chosen


def test_registers_that_a_block_does_not_have_are_refused() -> None:
    """It would wait for them for ever."""
    source = sources.of_gpus()["hopper/forward.cu"]
    greedy, changed = re.subn(r"(\? MASKED \? 224 : )232\b", r"\g<1>240", source)
    assert changed == 1
    chosen = next(c for c in variants("128") if c.rows == 128)
    options = tuple(f"-D{name}={value}" for name, value in {**chosen.sizes, **dict(chosen.flags)}.items())
    with pytest.raises(CompileError, match="registers for all"):
        nvrtc.compiled(greedy, "sm_90a", options)


# -- registers of products under way -----------------------------------------------------------------------------------

disassembled = pytest.mark.skipif(sass.disassembler() is None, reason="no nvdisasm")


def listing(variant: Any, folder: Path) -> str:
    found: str = sass.listing(nvrtc.cubin(variant, "sm_90a"), folder)
    return found


@disassembled
@pytest.mark.parametrize("more", SOME)
@pytest.mark.parametrize("dims", WITH_FEATURES)
def test_weights_are_not_rewritten_under_a_product(dims: str, more: str, tmp_path: Path) -> None:
    """Compilers before CUDA 13.3 let it happen where the source does; this one is whichever is installed."""
    for chosen in variants(dims, more=more):
        products, found = sass.overwritten(listing(chosen, tmp_path))
        assert products >= 2 * chosen.columns // 16
        assert found == [], chosen


@disassembled
@pytest.mark.parametrize("more", SOME)
@pytest.mark.parametrize("dims", WITH_FEATURES)
def test_products_overlap(dims: str, more: str, tmp_path: Path) -> None:
    """Ptxas lets them come one after another for want of registers, and says so in its log alone."""
    for chosen in variants(dims, more=more):
        waits = listing(chosen, tmp_path).count("WARPGROUP.DEPBAR")
        assert waits == (6 if dict(chosen.flags)["CONTINUED"] else 4), chosen


def test_a_weight_that_is_rewritten_is_found() -> None:
    lines = [
        "/*0010*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;",
        "/*0020*/ HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR8], R88, gsb0 ;",
        "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
        "/*0040*/ @P0 F2FP.BF16.F32.PACK_AB R153, R25, R24 ;",
        "/*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
        "/*0060*/ F2FP.BF16.F32.PACK_AB R152, R25, R24 ;",
    ]
    assert sass.overwritten("\n".join(lines)) == (1, ["F2FP.BF16.F32.PACK_AB R153, R25, R24"])


# -- the same bits, whichever block a tile is of -----------------------------------------------------------------------


@disassembled
def test_the_forward_waits_for_the_look_at_its_mask_and_for_nothing_else(tmp_path: Path) -> None:
    """Programmatic dependent launch: what lets the next one begin must be waited for."""
    problem = Problem.parse("b4.h16.s2048.d128.bf16.mask=bool:bk")
    forward = hopper.Forward(problem, next(config.configs(problem, H200)).forward, H200)
    survey = listing(forward._survey.variant, tmp_path)
    assert ("PREEXIT" in survey, "ACQBULK" in survey) == (True, False)
    behind = listing(forward.variant, tmp_path)
    assert ("PREEXIT" in behind, "ACQBULK" in behind) == (False, True)
    plain = listing(variants("128")[0], tmp_path)
    assert "PREEXIT" not in plain
    assert "ACQBULK" not in plain


def roundings_of_lse(listing: str) -> list[str]:
    """What makes each float that is stored on its own: lse is all that is, but for the counter, which is a constant."""
    last: dict[str, str] = {}
    found = []
    for name, operands in sass.INSTRUCTION.findall(listing):
        if name in ("STG.E", "STG"):
            made = last[operands.rpartition(", ")[2]]
            found += [] if made.startswith(("MOV", "IMAD.MOV")) else [made]
        elif (written := re.match(r"R\d+", operands)) and not name.startswith(sass.WITHOUT_RESULT):
            last[written[0]] = name
    return found


@disassembled
@pytest.mark.parametrize("more", SOME)
@pytest.mark.parametrize("dims", WITH_FEATURES)
def test_every_way_to_end_rows_rounds_lse_alike(dims: str, more: str, tmp_path: Path) -> None:
    """A product and a sum that are fused in one place and not in another differ in the last bit."""
    for chosen in variants(dims, more=more):
        found = roundings_of_lse(listing(chosen, tmp_path))
        assert len(found) == (4 if dict(chosen.flags)["CONTINUED"] else 2), chosen
        assert set(found) == {"FFMA"}, chosen


def test_a_sum_that_is_not_fused_is_found() -> None:
    lines = [
        "/*0010*/ FFMA R25, R200, R26, R25 ;",
        "/*0020*/ STG.E desc[UR20][R206.64], R25 ;",
        "/*0030*/ FADD R25, R25, R24 ;",
        "/*0040*/ STG.E desc[UR20][R206.64+0x20], R25 ;",
    ]
    assert roundings_of_lse("\n".join(lines)) == ["FFMA", "FADD"]
