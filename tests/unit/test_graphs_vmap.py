"""vmap within torch.compile: what it maps may require a gradient, and forward mode goes through it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnswitch

X = torch.arange(3 * 2 * 5 * 4, dtype=torch.float64).sin().reshape(3, 1, 2, 5, 4)
MASK = torch.arange(3 * 5 * 5, dtype=torch.float64).cos().reshape(3, 5, 5)


def formula(x: Any, mask: Any = None) -> Any:
    scores = x @ x.mT / 2 + (0 if mask is None else mask)
    return torch.softmax(scores, -1) @ x


def ours(x: Any, mask: Any = None) -> Any:
    return attnswitch.attention(x, x, x, attn_mask=mask)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("mask", [None, MASK, MASK > 0], ids=["none", "float", "bool"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_come_through_a_graph(backend: str, mask: Any) -> None:
    """They were None: of what vmap maps a graph does not say whether it requires a gradient."""
    x, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
    beside = () if mask is None else (mask,)
    torch.compile(torch.vmap(ours), backend=backend, fullgraph=True)(x, *beside).square().sum().backward()
    torch.vmap(ours)(expected, *beside).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected.grad)


WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "jvp outside": lambda f: torch.func.jvp(torch.vmap(f), (X,), (X.cos(),)),
    "hessian outside": lambda f: torch.func.hessian(lambda x: torch.vmap(f)(x).sum())(X),
    "of a mask": lambda f: torch.vmap(torch.func.jvp, in_dims=(None, 0, 0))(f, (X, MASK), (X, MASK)),
    "hessian of a mask": lambda f: torch.vmap(torch.func.hessian(lambda x, m: f(x, m).sum()))(X, MASK),
    "linearize": lambda f: torch.func.linearize(lambda x: f(x, MASK[0]), X[0])[1](X[0]),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by linearize
@pytest.mark.parametrize("name", WAYS)
def test_forward_mode_goes_through_vmap(name: str) -> None:
    torch.testing.assert_close(WAYS[name](ours), WAYS[name](formula))


def test_a_mapped_mask_by_math() -> None:
    def math(x: Any, mask: Any) -> Any:
        return attnswitch.attention(x, x, x, attn_mask=mask, backend="sdpa-math")

    torch.testing.assert_close(torch.vmap(math)(X, MASK), torch.vmap(formula)(X, MASK))


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.1, "seed": 3}])
def test_no_examples_have_no_results(dropout: dict[str, Any]) -> None:
    query, (key, value) = torch.zeros(0, 2, 2, 5, 8), torch.randn(2, 2, 2, 5, 8)
    found = torch.vmap(lambda q: attnswitch.attention(q, key, value, **dropout))(query)
    assert found.shape == query.shape
    grads = torch.vmap(torch.func.grad(lambda q: attnswitch.attention(q, key, value, **dropout).sum()))(query)
    assert grads.shape == query.shape
