"""Parts of the keys, merged, are the whole: outputs, lse and gradients, in every library."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem

CUTS = (0, 3, 3, 10)  # the second part has no keys


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 5, 8, dtype=dtype), *(torch.randn(2, 2, 10, 8, dtype=dtype) for _ in range(2))]


def parts(query: Any, key: Any, value: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    layout = options.get("layout", "BHLD")
    axis = 2 if layout == "BHLD" else 1
    pairs = []
    for start, stop in itertools.pairwise(CUTS):
        k, v = (x[:, :, start:stop] if axis == 2 else x[:, start:stop] for x in (key, value))
        pairs.append(attnswitch.attention(query, k, v, return_lse=True, **options))
    return [out for out, _ in pairs], [lse for _, lse in pairs]


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("library", ["torch", "numpy", "bfloat16", "jax"])
def test_parts_are_the_whole(library: str, layout: str) -> None:
    tensors = operands(torch.bfloat16 if library == "bfloat16" else torch.float32)
    made: list[Any] = [tensor.transpose(1, 2).contiguous() if layout == "BLHD" else tensor for tensor in tensors]
    if library == "numpy":
        made = [tensor.numpy() for tensor in made]
    elif library == "bfloat16":
        made = [tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for tensor in made]
    elif library == "jax":
        jax: Any = pytest.importorskip("jax")
        made = [jax.numpy.asarray(tensor.numpy()) for tensor in made]
    out, lse = attnswitch.attention(*made, return_lse=True, layout=layout)
    merged, whole = attnswitch.merge(*parts(*made, layout=layout), layout=layout)
    assert type(merged) is type(out)
    assert merged.dtype == out.dtype
    close = 2e-2 if library == "bfloat16" else 1e-5
    for one, other in ((merged, out), (whole, lse)):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=close, atol=close)


def test_it_is_differentiable() -> None:
    query, key, value = (tensor.double().requires_grad_() for tensor in operands())
    upstream = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    whole = attnswitch.attention(query, key, value, return_lse=True, backend="tiled")
    wanted = torch.autograd.grad(whole, (query, key, value), upstream)
    merged = attnswitch.merge(*parts(query, key, value, backend="tiled"))
    for one, other in zip(torch.autograd.grad(merged, (query, key, value), upstream), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_has_it_whole(dynamic: bool | None) -> None:
    """As ring attention needs it."""
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))

    def ring(q: Any, k: Any, v: Any) -> Any:
        parts = [attnswitch.attention(q, k[:, :, i::2], v[:, :, i::2], return_lse=True) for i in range(2)]
        return attnswitch.merge([out for out, _ in parts], [lse for _, lse in parts])[0]

    compiled = torch.compile(ring, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, whole = compiled(q, k, v), attnswitch.attention(q, k, v)
    torch.testing.assert_close(found, whole)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, whole)]
    torch.testing.assert_close(*gradients)


def test_a_row_that_no_part_sees() -> None:
    outs = [torch.zeros(1, 1, 2, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[-torch.inf, 0.5]]], requires_grad=True) for _ in range(2)]
    out, lse = attnswitch.merge(outs, lses)
    assert out[0, 0, 0].eq(0).all()
    assert lse[0, 0, 0] == -torch.inf
    for gradient in torch.autograd.grad(out.sum() + lse[0, 0, 1], (*outs, *lses)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", ["tiled", "reference", "sdpa-flash", "sdpa-math"])
def test_gradients_of_parts_add_up(backend: str) -> None:
    """``attention_backward`` rests on the out and lse that it is given: those of the whole."""
    query, key, value = operands()
    out, lse = attnswitch.attention(query, key, value, return_lse=True, backend="tiled")
    upstream = torch.randn_like(out)
    wanted = attnswitch.attention_backward(upstream, query, key, value, out=out, lse=lse, backend="tiled")
    grads = [
        attnswitch.attention_backward(upstream, query, k, v, out=out, lse=lse, backend=backend)
        for k, v in ((key[:, :, :4], value[:, :, :4]), (key[:, :, 4:], value[:, :, 4:]))
    ]
    queries: list[Any] = [part.query for part in grads]
    torch.testing.assert_close(sum(queries), wanted.query, rtol=1e-4, atol=1e-5)
    for name in ("key", "value"):
        both = torch.cat([getattr(part, name) for part in grads], 2)
        torch.testing.assert_close(both, getattr(wanted, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "merge of 0 outs and 0 lses"),
        ([torch.ones(1, 1, 2, 4)], [], "merge of 1 outs and 0 lses"),
        (torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2), r"outs is one array of shape \(1, 1, 2, 4\): expected a list"),
        (
            [torch.ones(2, 4)],
            [torch.ones(2)],
            r"outs have shape \(2, 4\): expected four axes each, B, H, L, D, or T, H, D",
        ),
        ([torch.ones(2, 3, 4)], [torch.ones(2, 3)], r"one lse has shape \(2, 3\); expected \(3, 2\).*\(THD\)"),
        (None, None, "merge takes a list of outs"),
        ([torch.ones(1, 1, 2, 4)], [torch.ones(1, 2, 1)], r"one lse has shape \(1, 2, 1\); expected \(1, 1, 2\)"),
        ([torch.ones(1, 1, 2, 4)] * 2, [torch.ones(1, 1, 2), np.ones((1, 1, 2))], "one of lses is a numpy array"),
        ([torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4).half()], [torch.ones(1, 1, 2)] * 2, "cast them to one"),
    ],
)
def test_parts_that_do_not_go_together(outs: Any, lses: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.merge(outs, lses)
