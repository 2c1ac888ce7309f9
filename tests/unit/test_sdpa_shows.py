"""What the results of torch's CPU kernel show of NaN and inf, on random operands: the promise of ``Shows``."""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.backend import Config, Inputs, Shows
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.problem import Mask

flash = importlib.import_module("attnswitch.backends.sdpa.flash")

CPU = Device.of("cpu", 0)
D = 16
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: One tile of 512 keys and several, the last of which is whole vectors of 16 keys, or ends short of one, or is short.
KEYS = (1, 3, 8, 16, 17, 33, 100, 300, 512, 513, 519, 520, 527, 528, 540, 1025, 1031, 1040)
MODES = ("plain", "causal", "bool", "float", "lengths", "window", "bool.causal")


def kernel_of(text: str) -> Any:
    return planner.kernel("sdpa-flash", Problem.parse(text), CPU)[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s1x300.d64.fp32", "LSE"),
        ("s1x2000.d64.fp32", "LSE"),
        ("s1x2001.d64.bf16", "LSE"),
        ("s1x300.d64.fp32.causal-br", "LSE"),
        ("s4x300.d64.fp32.causal", "EITHER"),
        ("s1x300.d64.fp32.mask=bool", "EITHER"),
        ("s1x2001.d64.fp32.mask=fp32", "EITHER"),
        ("s4x300.d64.fp32.lengths", "EITHER"),
        ("s4x300.d64.fp32.window=3,3", "EITHER"),
        ("s4x300.d64.fp32.grad", "NOWHERE"),
        ("s4x300.d64.fp32.mask=bool.grad", "NOWHERE"),
    ],
)
def test_what_is_promised(text: str, shown: str) -> None:
    assert kernel_of(f"b1.h2.{text}").shows is Shows.__members__.get(shown, Shows.NOWHERE)


def test_zeros_that_help_nan_through_take_no_memory() -> None:
    zeros = kernel_of("b1.h2.s64x2001.d64.fp32").plain.mask
    assert zeros.shape == (1, 1, 64, 2001)
    assert zeros.untyped_storage().nbytes() == 4
    assert kernel_of("b1.h2.s64x2000.d64.fp32").plain.mask is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_lse_or_output_shows_every_row_that_is_wrong(mode: str, seed: int) -> None:
    draw = random.Random(f"{mode} {seed}")
    torch.manual_seed(seed)
    wrong = 0
    for _ in range(25):
        inputs, problem, visible = drawn(mode, draw)
        spoil(inputs, draw)
        kernel = flash.FlashBackend().compile(problem, CPU, Config())
        assert kernel.shows is (Shows.LSE if mode == "plain" else Shows.EITHER)
        lengths = inputs.key_lengths is not None
        given = [operand for operand in inputs[:4] if operand is not None]
        for out, lse in (kernel.forward(inputs), *([] if lengths else [kernel.prepared(inputs)(*given)])):
            bad = rows_that_differ(inputs, problem, visible, out)
            shown = (lse == 0) | ~lse.isfinite()
            if mode != "plain":
                shown |= out.isnan().any(-1)
            assert not bool((bad & ~shown).any()), (problem, bad.nonzero(), lse)
            wrong += int(bad.sum())
    assert wrong


@pytest.mark.parametrize("keys", [513, 520, 527, 1031])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_last_tile_of_nan_is_shown(keys: int, hidden: bool, dtype: str) -> None:
    """Without help the kernel leaves such a tile out. With ``hidden`` the first of its keys score -inf."""
    problem = Problem.parse(f"b1.h1.s2x{keys}.d{D}.{dtype}")
    query, key, value = (torch.rand(1, 1, n, D, dtype=getattr(torch, problem.dtype)) for n in (2, keys, keys))
    key[:, :, keys // 512 * 512 :] = torch.nan
    if hidden:
        key[:, :, 512:] = -torch.inf
        key[:, :, -1] = torch.nan
    lse: Any = kernel_of(str(problem)).prepared(Inputs(query, key, value))(query, key, value)[1]
    assert not lse.isfinite().any()


def drawn(mode: str, draw: random.Random) -> tuple[Inputs, Problem, Any]:
    """Random operands, their problem, and which keys each row sees."""
    dtype, queries, keys = draw.choice(DTYPES), draw.choice((1, 1, 2, 5, 33)), draw.choice(KEYS)
    query, key, value = (torch.randn(1, 2, n, D).to(dtype) for n in (queries, keys, keys))
    options: dict[str, Any] = {
        "causal": "causal" in mode,
        "window": (draw.randrange(keys + 1), 1) if mode == "window" else None,
    }
    visible = torch.ones(1, 2, queries, keys, dtype=torch.bool)
    mask: Any = None
    lengths: Any = None
    if mode in ("bool", "float", "bool.causal"):
        first, last = draw.randrange(keys + 1), draw.randrange(keys + 1)
        hide: Any = (
            slice(first, None),
            slice(None, last),
            slice(None, keys // 16 * 16),
            slice(keys // 512 * 512, None),
        )
        visible[..., draw.choice(hide)] = False
        if draw.random() < 0.3:
            visible = torch.rand(1, 2, queries, keys) < 0.5
        mask = visible
        if mode == "float":
            wide = torch.float64 if dtype is torch.float64 else draw.choice((torch.float32, dtype))
            mask = torch.randn(1, 2, queries, keys).to(wide).masked_fill(~visible, -torch.inf)
    if mode == "lengths":
        lengths = torch.tensor([draw.randrange(keys + 1)])
        options["key_lengths"] = True
    kind = None if mask is None else Mask(named(mask.dtype), "hqk")
    problem = Problem(1, 2, 2, queries, keys, D, D, named(dtype), mask=kind, **options)
    seen = visible.clone()
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    left, right = problem.reach
    seen &= (j >= i - left) if left is not None else True
    seen &= (j <= i + right) if right is not None else True
    seen &= (j < lengths) if lengths is not None else True
    return Inputs(query, key, value, mask, lengths), problem, seen


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spoil(inputs: Inputs, draw: random.Random) -> None:
    """NaN, inf and huge numbers, in runs that are or are not whole vectors and tiles."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        operand = draw.choice((inputs.query, inputs.key, inputs.key, inputs.value))
        length, first = operand.shape[2], draw.randrange(operand.shape[2])
        where: Any = draw.choice(
            (
                slice(first, first + draw.choice((1, 4, 16, 64, 600))),
                slice(length // 16 * 16, None),
                slice(length // 16 * 16),
                slice(length // 512 * 512, None),
            )
        )
        column = draw.choice((slice(None), slice(None), draw.randrange(D)))
        most = torch.finfo(operand.dtype).max
        number = draw.choice((math.nan, math.nan, math.inf, -math.inf, most, -most))
        operand[0, draw.randrange(2), where, column] = number


def rows_that_differ(inputs: Inputs, problem: Problem, visible: Any, out: torch.Tensor) -> torch.Tensor:
    """Rows whose output is not what arithmetic makes of them, but for those that see numbers that overflow."""
    mask = problem.mask and Mask("bool" if problem.mask.is_bool else "float64", problem.mask.axes)
    double = problem.replace(dtype="float64", mask=mask)
    arrays = [
        None if x is None else x.numpy() if x.dtype in (torch.bool, torch.int64) else x.double().numpy()
        for x in inputs[:5]
    ]
    exact = torch.from_numpy(planner.kernel("reference", double, CPU)[1].forward(Inputs(*arrays))[0])
    most = torch.finfo(out.dtype).max
    huge = [((x.abs() > most / 2) & x.isfinite()).any(-1) for x in inputs[:3]]
    left_out = huge[0] | (visible & (huge[1] | huge[2])[:, :, None]).any(-1)
    got, wanted = out.double().numpy(), exact.to(out.dtype).double().numpy()
    with np.errstate(invalid="ignore"):
        same = np.isclose(got, wanted, rtol=0.1, atol=0.1, equal_nan=True)
    wrong: torch.Tensor = ~torch.from_numpy(same).all(-1) & ~left_out
    return wrong
