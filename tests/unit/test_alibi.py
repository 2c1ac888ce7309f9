"""``alibi_slopes`` through the public calls, against the formula written out in float64 and against a float mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formula import written_out

import attnswitch
import attnswitch.call.operators
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


# -- where torch looks at a call before its tensors do -----------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("slopes", [SLOPES, OF_EACH, SLOPES.tolist()], ids=["heads", "batch", "list"])
@pytest.mark.parametrize("beside", [{}, {"sinks": SLOPES.tolist()}], ids=["alone", "sinks"])
@pytest.mark.parametrize("options", [*OPTIONS, {"dropout_p": 0.3, "seed": 5}, {"layout": "BLHD"}], ids=str)
def test_a_whole_graph_gives_what_a_call_gives(options: dict[str, Any], beside: dict[str, Any], slopes: Any) -> None:
    leaves = tensors(Q, K, V, grad=True)
    if options.get("layout") == "BLHD":
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    slopes = torch.from_numpy(slopes) if isinstance(slopes, np.ndarray) else slopes

    def call(*operands: Any) -> Any:
        out, lse = attention(*operands, alibi_slopes=slopes, return_lse=True, **beside, **options)
        return out * 2, lse

    found, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(out.sin().sum() + torch.sigmoid(lse).sum(), leaves) for out, lse in (found, expected)]
    torch.testing.assert_close(*both)


def test_a_plan_in_a_whole_graph() -> None:
    q, k, v = tensors(Q, K, V)
    slopes = torch.tensor(SLOPES)
    plan = attnswitch.plan(q, k, v, alibi_slopes=slopes, **BOTTOM, backend="reference")
    compiled = torch.compile(lambda *x: plan(*x, alibi_slopes=slopes), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), plan(q, k, v, alibi_slopes=slopes), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's
def test_an_operator_as_torch_checks_one() -> None:
    q, k, v = tensors(Q, K, V, grad=True)
    operator = torch.ops.attnswitch.attention_forward.default
    given = q, k, v, None, None, torch.tensor(OF_EACH)
    torch.library.opcheck(operator, given, {"grads": "qkv", "is_causal": True, "return_lse": True})


@pytest.mark.parametrize("of_example", [False, True])
@pytest.mark.parametrize("slopes", [SLOPES, OF_EACH], ids=["heads", "batch"])
def test_vmap_and_grad(slopes: Any, of_example: bool) -> None:
    """Of examples one after the other; slopes are shared, or each example's own."""
    examples = [torch.randn(3, *x.shape, dtype=torch.float64) for x in (Q, K, V)]
    every = torch.tensor(np.stack([slopes, 2 * slopes, -slopes])) if of_example else torch.tensor(slopes)
    axes = (0, 0, 0, 0 if of_example else None)

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return attention(q, k, v, alibi_slopes=slopes, is_causal=True).sin().sum()

    grad: Any = torch.func.grad
    functions: tuple[Any, ...] = call, grad(call), grad(call, argnums=1), grad(call, argnums=2)
    for function in functions:
        found = torch.vmap(function, axes)(*examples, every)
        expected = [function(*(x[n] for x in examples), every[n] if of_example else every) for n in range(3)]
        torch.testing.assert_close(found, torch.stack(expected))
    with pytest.raises(InvalidProblem, match=r"alibi_slopes requires_grad"):
        grad(call, argnums=3)(*(x[0] for x in examples), torch.tensor(slopes))


def test_forward_mode_says_why_not() -> None:
    q, k, v = tensors(Q, K, V)
    call = lambda q: attention(q, k, v, alibi_slopes=torch.tensor(SLOPES))  # noqa: E731
    with pytest.raises(Unsupported, match=r"sdpa-math.*alibi"):
        torch.func.jvp(call, (q,), (q,))


def test_a_seed_of_numpy_within_vmap() -> None:
    examples = [torch.randn(3, *x.shape, dtype=torch.float64) for x in (Q, K, V)]
    call = {"alibi_slopes": torch.tensor(SLOPES), "dropout_p": 0.5, "seed": np.int64(5)}
    found = torch.vmap(lambda *x: attention(*x, **call))(*examples)
    torch.testing.assert_close(found[1], attention(*(x[1] for x in examples), **call))


def test_tensors_without_elements() -> None:
    q, k, v = (x.to("meta") for x in tensors(Q, K, V))
    assert attention(q, k, v, alibi_slopes=SLOPES.tolist()).shape == q.shape
    with pytest.raises(InvalidProblem, match=r"alibi_slopes has shape \(3,\): expected \(4,\) or \(2, 4\)"):
        attention(q, k, v, alibi_slopes=SLOPES[:3].tolist())
