"""What torch's operators are told about hidden positions."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs

masks = importlib.import_module("attnswitch.backends.sdpa.masks")

FLOAT, BOOL = "b1.h2.s3x4.d8.fp32.mask=fp32:hqk", "b1.h2.s3x4.d8.fp32.mask=bool:hqk"


def inputs(mask: torch.Tensor | None, lengths: torch.Tensor | None = None) -> Inputs:
    query, key, value = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)
    return Inputs(query, key, value, mask, lengths)


@pytest.mark.parametrize("text", [FLOAT, BOOL])
def test_a_mask_whose_rows_all_see_something_stays(text: str) -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[..., 1:] = -torch.inf
    given = mask if text == FLOAT else mask == 0
    hiding = masks.compose(Problem.parse(text), inputs(given))
    assert torch.equal(hiding.mask, given)
    assert not hiding.dead.any()
    assert (hiding.causal, hiding.lift) == (False, None)


@pytest.mark.parametrize("text", [FLOAT, BOOL])
def test_a_row_that_sees_nothing_sees_everything_and_is_told(text: str) -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 1, 2] = -torch.inf
    hiding = masks.compose(Problem.parse(f"{text}.lse"), inputs(mask if text == FLOAT else mask == 0))
    dead = torch.zeros(1, 2, 3, 1, dtype=torch.bool)
    dead[0, 1, 2] = True
    assert torch.equal(hiding.dead, dead)
    assert torch.equal(hiding.lift, torch.where(dead, -torch.inf, 0.0)[..., 0])
    assert torch.equal(hiding.mask, torch.zeros(1, 2, 3, 4) if text == FLOAT else torch.ones(1, 2, 3, 4) > 0)


def test_a_row_far_below_zero_is_lifted() -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 0, 1] = torch.tensor([-1e9, -1e9, -1e9 - 64, -torch.inf])
    hiding = masks.compose(Problem.parse(FLOAT), inputs(mask), lifted=True)
    assert hiding.lift[0, 0].tolist() == [0.0, -1e9, 0.0]
    assert hiding.mask[0, 0, 1].tolist() == [0.0, 0.0, -64.0, -torch.inf]
    assert not hiding.dead.any()


def test_nan_in_a_mask_stays_where_it_is() -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 0, 1, 2] = torch.nan
    hiding = masks.compose(Problem.parse(FLOAT), inputs(mask))
    assert torch.equal(hiding.mask.isnan(), mask.isnan())


def test_lengths_hide_no_row_but_those_of_length_0() -> None:
    problem = Problem.parse("b1.h2.s3x4.d8.fp32.lengths")
    hiding = masks.compose(problem, inputs(None, torch.tensor([2])))
    assert not hiding.dead.any()
    assert hiding.mask.flatten().tolist() == [True, True, False, False]
    none = masks.compose(problem, inputs(None, torch.tensor([0])))
    assert none.dead.all()


def test_a_mask_that_is_added_is_given_as_it_is() -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 1, 2] = -torch.inf
    hiding = masks.added(Problem.parse(FLOAT), (torch.float32,), inputs(mask))
    assert hiding.mask is mask
    assert (hiding.dead, hiding.lift) == (None, None)
    told = masks.added(Problem.parse(f"{BOOL}.lse"), (torch.float32,), inputs(mask == 0))
    assert torch.equal(told.mask, mask)
    assert torch.equal(told.lift, mask.amax(-1))


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("fp16.mask=fp32:hqk", torch.float32, torch.float32),
        ("fp16.mask=bf16:hqk", torch.bfloat16, torch.float32),
        ("fp16.mask=fp16:hqk", torch.float16, torch.float16),
        ("fp16.mask=fp16:hqk.grad", torch.float16, torch.float32),
        ("fp16.mask=fp64:hqk", torch.float64, torch.float32),
        ("fp16.mask=bool:hqk", torch.bool, torch.float16),
    ],
)
def test_an_added_mask_has_a_type_that_the_operator_takes(text: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    problem = Problem.parse(f"b1.h2.s3x4.d8.{text}")
    mask = torch.ones(1, 2, 3, 4, dtype=dtype)
    assert masks.added(problem, (torch.float16, torch.float32), inputs(mask)).mask.dtype is expected


@pytest.mark.parametrize("more", ["", ".grad=qkv", ".grad=qkvm"])
def test_an_added_mask_far_below_zero_is_lifted(more: str) -> None:
    mask = torch.full((1, 2, 3, 4), -1e9)
    hiding = masks.added(Problem.parse(f"{FLOAT}{more}"), (torch.float32,), inputs(mask), lifted=True)
    assert not hiding.mask.any()
    assert torch.equal(hiding.lift, mask[..., 0])


# -- what positions hide, kept from call to call -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [6, 200])  # kept, and too large for it
@pytest.mark.parametrize("more", ["causal", "causal-br", "window=2,0", "window=*,1", "window=3,2.causal-br"])
def test_positions_are_those_that_the_reference_sees(more: str, size: int) -> None:
    p = Problem.parse(f"b2.h1.s{size}x{size + 3}.d4.fp32.{more}")
    keys = torch.zeros(2, 1, size + 3, 4)
    given = Inputs(torch.zeros(2, 1, size, 4), keys, keys)
    offset = 3 if p.bottom_right else 0
    left, right = (10**6 if side is None else side for side in p.reach)
    for _ in range(2):
        seen = masks.positions(p, given)
        expected = [[i + offset - left <= j <= i + offset + right for j in range(size + 3)] for i in range(size)]
        assert torch.equal(seen, torch.tensor(expected)[None, None])
    assert (masks.positions(p, given) is seen) == (size == 6)


def test_what_is_kept_in_inference_mode_serves_gradients() -> None:
    masks._kept.cache_clear()
    query, key, value = (torch.randn(1, 1, 5, 4) for _ in range(3))
    with torch.inference_mode():
        attnswitch.attention(query, key, value, window=(1, 0), backend="sdpa-math")
    query.requires_grad_()
    attnswitch.attention(query, key, value, window=(1, 0), backend="sdpa-math").sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "uint64", "int64"])
def test_keys_past_lengths_of_every_integer_type_are_zeroed(dtype: str) -> None:
    """As on a GPU, where nobody has seen what lies there."""
    elsewhere: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    key = torch.full((2, 1, 200, 8), torch.nan)
    lengths = torch.tensor([0, 100]).to(getattr(torch, dtype))
    padded = importlib.import_module("attnswitch.backends.own.through_torch").without_padding
    for array in padded(Inputs(elsewhere, key, key, None, lengths))[1:3]:
        assert array.isnan().sum((1, 2, 3)).tolist() == [0, 800]
        assert not array[1, :, 100:].any()
