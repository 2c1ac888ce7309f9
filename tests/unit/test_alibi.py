"""``alibi_slopes`` through the public calls, against the formula written out in float64 and against a float mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formula import written_out

import attnswitch
from attnswitch import InvalidProblem, Unsupported

B, HQ, HK, LQ, LK, D = 2, 4, 2, 5, 7, 8
#: As they are called here, with operands in lists.
attention: Any = attnswitch.attention
attention_backward: Any = attnswitch.attention_backward
attention_varlen: Any = attnswitch.attention_varlen
formula: Any = written_out

rng = np.random.default_rng(3)
Q, K, V, G = (rng.standard_normal((B, h, n, D)) for h, n in ((HQ, LQ), (HK, LK), (HK, LK), (HQ, LQ)))
SLOPES = np.array([0.5, 0.0, -0.25, 8.0])
OF_EACH = rng.standard_normal((B, HQ))
BOTTOM: dict[str, Any] = {"causal_alignment": "bottom_right"}
OPTIONS: list[dict[str, Any]] = [
    {},
    BOTTOM,  # where nothing is hidden, distances depend on it all the same
    {"is_causal": True, "softcap": 1.0},
    {"is_causal": True, "key_lengths": [3, 7], **BOTTOM},
    {"window": (2, 1), "key_lengths": [6, 0]},
]
every_backend = pytest.mark.parametrize("backend", [None, "tiled", "reference"])


def tensors(*values: Any, grad: bool = False) -> list[Any]:
    return [torch.tensor(value, requires_grad=grad) for value in values]


@every_backend
@pytest.mark.parametrize("slopes", [SLOPES, OF_EACH], ids=["heads", "batch"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_formula(options: dict[str, Any], slopes: Any, backend: str | None) -> None:
    leaves, others = tensors(Q, K, V, grad=True), tensors(Q, K, V, grad=True)
    call: dict[str, Any] = {"alibi_slopes": torch.tensor(slopes), "return_lse": True, "backend": backend}
    out, lse = attention(*leaves, **call, **options)
    right, right_lse = formula(*others, None, torch.tensor(slopes), **options)
    torch.testing.assert_close((out, lse), (right, right_lse))
    grads = torch.autograd.grad(out, leaves, torch.from_numpy(G))
    expected = torch.autograd.grad(right, others, torch.from_numpy(G))
    torch.testing.assert_close(grads, tuple(x.nan_to_num() for x in expected))
    explicit: Any = attention_backward(G, Q, K, V, alibi_slopes=slopes, backend=backend, **options)
    for one, other in zip(explicit[:3], grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_it_is_a_float_mask_after_softcap() -> None:
    distance = np.abs(np.arange(LQ)[:, None] - np.arange(LK))
    mask = -SLOPES[:, None, None] * distance
    by_mask = attention(Q, K, V, attn_mask=mask, softcap=2.0, sinks=SLOPES)
    np.testing.assert_allclose(attention(Q, K, V, alibi_slopes=SLOPES, softcap=2.0, sinks=SLOPES), by_mask, atol=1e-12)
    both = attention(Q, K, V, alibi_slopes=SLOPES, attn_mask=mask, softcap=2.0)
    np.testing.assert_allclose(both, attention(Q, K, V, attn_mask=2 * mask, softcap=2.0), atol=1e-12)


@pytest.mark.parametrize("slopes", [SLOPES, OF_EACH], ids=["heads", "batch"])
def test_sequences_count_their_own_distances(slopes: Any) -> None:
    starts_q, starts_k = [0, 2, 5], [0, 4, 7]
    q, k, v = (x[0].swapaxes(0, 1) for x in (Q, K, V))
    out = attention_varlen(q, k, v, starts_q, starts_k, alibi_slopes=slopes, **BOTTOM)
    for b in range(2):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        own = slopes if slopes.ndim == 1 else slopes[b : b + 1]
        call: dict[str, Any] = {"alibi_slopes": own, "layout": "BLHD", **BOTTOM}
        np.testing.assert_allclose(out[rows], attention(q[None, rows], k[None, keys], v[None, keys], **call)[0])


def test_a_plan_is_the_call_and_keeps_the_alignment() -> None:
    plan = attnswitch.plan(Q, K, V, alibi_slopes=SLOPES, **BOTTOM)
    assert str(plan.problem) == "b2.h4/2.s5x7.d8.fp64.bottom-right.alibi"
    assert attnswitch.Problem.parse(str(plan.problem)) == plan.problem
    np.testing.assert_array_equal(plan(Q, K, V, alibi_slopes=SLOPES), attention(Q, K, V, alibi_slopes=SLOPES, **BOTTOM))


@pytest.mark.parametrize(
    ("slopes", "message"),
    [
        (OF_EACH[0][:3], r"alibi_slopes has shape \(3,\): expected \(4,\) or \(2, 4\)"),
        (OF_EACH.T, r"alibi_slopes has shape \(4, 2\)"),
        (OF_EACH[:1], r"alibi_slopes has shape \(1, 4\)"),
        (np.ones(HQ, bool), "alibi_slopes has dtype bool"),
        ([0.0, 1.0, float("nan"), 2.0], "alibi_slopes holds nan: expected finite numbers"),
        ([0.0, 1.0, -float("inf"), 2.0], "alibi_slopes holds -inf: expected finite numbers"),
    ],
)
def test_what_makes_no_sense(slopes: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attention(Q, K, V, alibi_slopes=slopes)


def test_slopes_have_no_gradient() -> None:
    q, k, v = tensors(Q, K, V)
    slopes = torch.tensor(SLOPES, requires_grad=True)
    with pytest.raises(InvalidProblem, match=r"alibi_slopes requires_grad.*float attn_mask"):
        attention(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        attention(q, k, v, alibi_slopes=slopes)


def test_where_only_torch_can_look() -> None:
    q, k, v = tensors(Q, K, V)
    slopes = torch.tensor(SLOPES)

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, alibi_slopes=slopes) * 2

    with pytest.raises(Exception, match="pass -slope"):
        torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(torch.compile(call, backend="eager")(q, k, v), call(q, k, v))
    with pytest.raises(Unsupported, match=r"pass -slope \* distance as a float attn_mask"):
        torch.vmap(call)(q[None], k[None], v[None])
