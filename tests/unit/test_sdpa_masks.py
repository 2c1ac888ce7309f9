"""What torch's operators are told about hidden positions."""

from __future__ import annotations

import importlib

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine.backend import Inputs

masks = importlib.import_module("attnswitch.backends.sdpa.masks")

FLOAT, BOOL = "b1.h2.s3x4.d8.fp32.mask=fp32:hqk", "b1.h2.s3x4.d8.fp32.mask=bool:hqk"


def inputs(mask: torch.Tensor | None, lengths: torch.Tensor | None = None) -> Inputs:
    query, key, value = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)
    return Inputs(query, key, value, mask, lengths)


@pytest.mark.parametrize("text", [FLOAT, BOOL])
def test_a_mask_whose_rows_all_see_something_is_given_as_it_is(text: str) -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[..., 1:] = -torch.inf
    given = mask if text == FLOAT else mask == 0
    hiding = masks.compose(Problem.parse(text), inputs(given), torch.float32)
    assert hiding.mask is given
    assert (hiding.causal, hiding.alive, hiding.shift) == (False, None, None)


@pytest.mark.parametrize("text", [FLOAT, BOOL])
def test_a_row_that_sees_nothing_sees_everything_and_is_told(text: str) -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 1, 2] = -torch.inf
    hiding = masks.compose(Problem.parse(text), inputs(mask if text == FLOAT else mask == 0), torch.float32)
    dead = torch.zeros(1, 2, 3, dtype=torch.bool)
    dead[0, 1, 2] = True
    assert torch.equal(hiding.alive, ~dead)
    assert torch.equal(hiding.mask, torch.zeros(1, 2, 3, 4) if text == FLOAT else torch.ones(1, 2, 3, 4) > 0)


def test_a_row_far_below_zero_is_lifted() -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 0, 1] = torch.tensor([-1e9, -1e9, -1e9 - 64, -torch.inf])
    hiding = masks.compose(Problem.parse(FLOAT), inputs(mask), torch.float32)
    assert hiding.shift[0, 0].tolist() == [0.0, -1e9, 0.0]
    assert hiding.mask[0, 0, 1].tolist() == [0.0, 0.0, -64.0, -torch.inf]
    assert hiding.alive.all()


def test_nan_in_a_mask_stays_where_it_is() -> None:
    mask = torch.zeros(1, 2, 3, 4)
    mask[0, 0, 1, 2] = torch.nan
    hiding = masks.compose(Problem.parse(FLOAT), inputs(mask), torch.float32)
    assert torch.equal(hiding.mask.isnan(), mask.isnan())


def test_lengths_hide_no_row_but_those_of_length_0() -> None:
    problem = Problem.parse("b1.h2.s3x4.d8.fp32.lengths")
    hiding = masks.compose(problem, inputs(None, torch.tensor([2])))
    assert hiding.alive is None
    assert hiding.mask.flatten().tolist() == [True, True, False, False]
    none = masks.compose(problem, inputs(None, torch.tensor([0])))
    assert not none.alive.any()
