"""Operands as the Triton kernels read them: in even rows, and copied where they are not."""

from __future__ import annotations

import importlib

import pytest
import torch

from attnswitch import Problem

pytest.importorskip("triton", "3.6")

operands = importlib.import_module("attnswitch.backends.triton.operands")


def buffer(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).to(torch.bfloat16).reshape(shape)


LIES = {
    "contiguous": (buffer(2, 3, 5, 16), True),
    "heads last": (buffer(2, 5, 3, 16).transpose(1, 2), True),
    "broadcast": (buffer(2, 1, 5, 16).expand(2, 3, 5, 16), True),
    "meaningless stride": (buffer(1, 3, 5, 16).as_strided((1, 3, 5, 16), (7, 80, 16, 1)), True),
    "odd dim": (buffer(2, 3, 5, 17), False),
    "odd dim in even rows": (buffer(2, 3, 5, 24)[..., :17], False),
    "odd rows": (buffer(2, 3, 5, 17)[..., :16], False),
    "odd address": (buffer(481)[1:].view(2, 3, 5, 16), False),
    "every second": (buffer(2, 3, 5, 32)[..., ::2], False),
    "columns": (buffer(2, 3, 16, 5).mT, False),
    "odd and broadcast": (buffer(2, 1, 1, 17).expand(2, 3, 5, 17), False),
    "one number": (buffer(1, 1, 1, 1).expand(2, 3, 5, 16), False),
}


@pytest.mark.parametrize("name", LIES)
def test_what_is_not_even_is_copied(name: str) -> None:
    array, even = LIES[name]
    assert operands.even(array) == even
    if even:
        assert operands.in_steps(array) is array
        return
    copy = operands.in_steps(array)
    assert copy.shape == array.shape
    assert torch.equal(copy, array)
    assert operands.even(copy) or copy.shape[3] % 8
    assert copy.untyped_storage().nbytes() <= 2 * array.untyped_storage().nbytes() + 64, "what is expanded stays so"


def test_zeros_follow_a_row_that_ends_within_a_step() -> None:
    copy = operands.copied(buffer(2, 3, 5, 17))
    assert operands.even(whole := copy.as_strided((2, 3, 5, 24), copy.stride()))
    assert not whole[..., 17:].any()


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("b2.h3.s5.d16.bf16", ()),
        ("b2.h3.s5.d16.bf16.q=expanded", ()),
        ("b2.h3.s5.d12.fp32", ()),
        ("b2.h3.s5.d12.bf16", ("query", "key", "value")),
        ("b2.h3.s5.d16/17.bf16", ("value",)),
        ("b2.h3.s5.d16.bf16.k=align8", ("key",)),
        ("b2.h3.s5.d16.bf16.q=strided.v=align2", ("query", "value")),
    ],
)
def test_the_problem_tells_which(text: str, roles: tuple[str, ...]) -> None:
    assert operands.uneven(Problem.parse(text)) == roles


def hiding(*shape: int) -> torch.Tensor:
    return buffer(*shape) % 3 == 0


MASKS = {
    "contiguous": (buffer(2, 3, 5, 32), True),
    "a row for all": (buffer(2, 1, 1, 32).expand(2, 3, 5, 32), True),
    "one for each query": (buffer(2, 3, 5, 1), True),
    "the same for every key": (buffer(2, 3, 5, 1).expand(2, 3, 5, 33), True),
    "one row": (buffer(1, 1, 1, 33), True),
    "even rows that Triton does not see": (buffer(2, 3, 5, 24), False),
    "odd keys": (hiding(2, 1, 1, 33), False),
    "odd keys for all heads": (buffer(2, 1, 5, 33).expand(2, 3, 5, 33), False),
    "odd address": (hiding(481)[1:].view(2, 3, 5, 16), False),
    "columns": (buffer(2, 3, 16, 32).mT, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_copied_where_its_elements_would_be_loaded_one_by_one(name: str) -> None:
    mask, seen = MASKS[name]
    found = operands.mask_in_steps(mask)
    assert (found is mask) == seen
    assert found.shape == mask.shape
    assert torch.equal(found, mask)
    if not seen:
        assert found.data_ptr() % 16 == 0
        assert not any(stride % 16 for stride in found.stride()[:3])
        assert operands.mask_in_steps(found) is found
        assert found.untyped_storage().nbytes() <= 2 * mask.untyped_storage().nbytes() + 64, "what is expanded stays so"
