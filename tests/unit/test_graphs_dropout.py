"""Dropout without a seed in a graph: a forward that is made again has its mask again, and no two calls have one."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnswitch

OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def varlen(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return attnswitch.attention_varlen(q, k, v, OFFSETS, OFFSETS, max_seqlen_q=5, max_seqlen_k=5, dropout_p=0.5)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: attnswitch.attention(q, k, v, dropout_p=0.5),
    "sdpa": lambda q, k, v: attnswitch.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "varlen": varlen,
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def tensors(*batch: int) -> list[torch.Tensor]:
    return [torch.randn(*batch, 1, 2, 8, 4, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("name", CALLS)
def test_a_checkpoint_makes_the_mask_again(name: str, backend: str) -> None:
    """The output is linear in value: its sum is what value and its gradient are together."""
    q, k, v = tensors()

    def call(*operands: Any) -> Any:
        return checkpoint(CALLS[name], *operands, use_reentrant=False)

    out = torch.compile(call, backend=backend, fullgraph=True)(q, k, v)
    out.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(out.sum(), (v * v.grad).sum())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_two_calls_have_two_masks(name: str, grad: bool) -> None:
    q, k, v = (x.detach().requires_grad_(grad) for x in tensors())
    call = CALLS[name]
    difference = torch.compile(lambda *x: call(*x) - call(*x), backend="aot_eager", fullgraph=True)
    assert difference(q, k, v).abs().max() > 0


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_examples_have_masks_as_vmap_says(randomness: str) -> None:
    one = torch.randn(1, 1, 2, 8, 4).expand(3, 1, 2, 8, 4).clone().requires_grad_()
    mapped = torch.vmap(CALLS["attention"], randomness=randomness)
    first, second, third = torch.compile(mapped, backend="aot_eager")(one, one, one)
    assert torch.equal(first, second) is torch.equal(first, third) is (randomness == "same")


def test_a_call_on_meta_tensors_draws_nothing() -> None:
    before = torch.get_rng_state()
    x = torch.empty(1, 2, 8, 4, device="meta")
    assert attnswitch.attention(x, x, x, dropout_p=0.5).shape == x.shape
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_lies_on_the_cpu_whatever_the_default_device() -> None:
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with torch.device("meta"):
        (grad,) = torch.autograd.grad(attnswitch.attention(x, x, x, dropout_p=0.5, seed=3).sum(), x)
        drawn = attnswitch.attention(x, x, x, dropout_p=0.5)
    assert grad.device == drawn.device == x.device
    (same,) = torch.autograd.grad(attnswitch.attention(x, x, x, dropout_p=0.5, seed=3).sum(), x)
    torch.testing.assert_close(grad, same)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_seed_may_be_an_argument_of_a_graph(dynamic: bool | None) -> None:
    x = torch.randn(1, 2, 8, 4)

    def call(x: Any, seed: int) -> Any:
        return attnswitch.attention(x, x, x, dropout_p=0.5, seed=seed)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seed in (1, 2, 7, 2**40, 2**63 - 1):
        torch.testing.assert_close(compiled(x, seed), call(x, seed), rtol=0, atol=0)
