"""The way past torch's second dispatch: taken where nothing is differentiated or looked at, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnswitch.call.operators  # noqa: F401 - defines them

direct = importlib.import_module("attnswitch.call.operators.direct")


@pytest.fixture
def calls() -> Iterator[tuple[list[str], Any]]:
    """What a call goes through, and a library's operator ``twice`` whose kernel and formula say so."""
    seen: list[str] = []
    library = direct.Library("attnswitch_test", "FRAGMENT")
    name = library.define("twice(Tensor x, *, float by=2.0) -> Tensor")

    def kernel(x: Any, *, by: float = 2.0) -> Any:
        seen.append("kernel")
        return x * by

    def formula(ctx: Any, grad: Any) -> Any:
        return grad * 2

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("attnswitch_test::twice", lambda x, by=2.0: torch.empty_like(x), lib=library)
    torch.library.register_autograd("attnswitch_test::twice", formula, lib=library)
    yield seen, torch.ops.attnswitch_test.twice
    library._destroy()


@pytest.fixture
def redispatched(entered: Any) -> Any:
    """Whether torch's dispatcher is gone through again: a Python function of its own is entered then."""
    return lambda call: "autograd_impl" in [name for _, name in entered(call)]


def test_without_gradients_the_kernel_is_called_at_once(calls: Any, redispatched: Any) -> None:
    seen, twice = calls
    x = torch.ones(3)
    assert not redispatched(lambda: twice(x))
    with torch.no_grad():
        assert not redispatched(lambda: twice(x.requires_grad_()))
    assert seen == ["kernel", "kernel"]


def test_with_gradients_torch_differentiates(calls: Any, redispatched: Any) -> None:
    seen, twice = calls
    x = torch.ones(3, requires_grad=True)
    assert redispatched(lambda: twice(x))
    (grad,) = torch.autograd.grad(twice(x, by=2.0).sum(), x)
    assert grad.tolist() == [2.0, 2.0, 2.0]
    assert "kernel" in seen


def test_modes_see_the_call(calls: Any) -> None:
    seen, twice = calls
    with FakeTensorMode() as mode:
        assert twice(torch.ones(3)).shape == (3,)
    assert twice(mode.from_tensor(torch.ones(4))).shape == (4,)
    assert seen == []
