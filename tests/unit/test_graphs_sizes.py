"""Sizes of which a graph knows nothing before it runs: how many elements are not zero, or what a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attnswitch

CALLS: dict[str, Callable[..., Any]] = {
    "attention": attnswitch.attention,
    "heads last": lambda q, k, v: attnswitch.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="BLHD"),
    "drop-in": attnswitch.scaled_dot_product_attention,
}


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    dynamo: Any = torch._dynamo
    dynamo.reset()
    with dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("what", ["which", "many"])
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_takes_them(name: str, what: str, grads: bool) -> None:
    def call(*given: Any) -> Any:
        *operands, told = given
        if what == "which":
            places = told.nonzero()[:, 0]
            return CALLS[name](*(x[:, :, places] for x in operands))
        count = int(told.item())
        torch._check(count >= 1)
        torch._check(count <= 7)
        return CALLS[name](*(x[:, :, :count] for x in operands))

    told = torch.tensor([1, 0, 1, 1, 0, 1, 1]).bool() if what == "which" else torch.tensor(5)
    operands = [torch.randn(2, 2, 7, 8, requires_grad=grads) for _ in range(3)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*operands, told), call(*operands, told)
    torch.testing.assert_close(found, expected)
    if grads:
        upstream = torch.randn_like(expected)
        for one, other in zip(*(torch.autograd.grad(x, operands, upstream) for x in (found, expected)), strict=True):
            torch.testing.assert_close(one, other)
