"""``attention_varlen`` through the public calls: each sequence as if it were alone, and what is told of the odd."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem, Problem, Unsupported, attention, attention_varlen, attention_varlen_backward
from attnswitch.machine import one_by_one

QUERIES, KEYS = (5, 0, 7, 1, 6), (7, 3, 0, 4, 6)
CU_Q, CU_K = [0, *np.cumsum(QUERIES).tolist()], [0, *np.cumsum(KEYS).tolist()]
rng = np.random.default_rng(1)
Q, K, V, G = (rng.standard_normal(s) for s in ((22, 4, 8), (25, 2, 8), (25, 2, 6), (22, 4, 6)))
every_backend = pytest.mark.parametrize("backend", [None, "tiled", "reference"])


def alone(b: int, **options: Any) -> tuple[Any, Any, Any]:
    """Output, lse and gradients of a sequence by a call of its own."""
    rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
    q, k, v, g = (x.swapaxes(0, 1)[None] for x in (Q[rows], K[keys], V[keys], G[rows]))
    out, lse = attention(q, k, v, return_lse=True, backend="reference", **options)
    grads: Any = attnswitch.attention_backward(g, q, k, v, backend="reference", **options)
    return out[0].swapaxes(0, 1), lse[0], [grad[0].swapaxes(0, 1) for grad in grads[:3]]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"window": (2, 1), "causal_alignment": "bottom_right"},
    {"softcap": 2.0, "scale": 0.7},
]


@every_backend
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_sequence_is_as_alone(options: dict[str, Any], backend: str | None) -> None:
    out, lse = attention_varlen(Q, K, V, CU_Q, CU_K, return_lse=True, backend=backend, **options)
    grads: Any = attention_varlen_backward(G, Q, K, V, CU_Q, CU_K, backend=backend, **options)
    leaves: Any = [torch.from_numpy(x.copy()).requires_grad_() for x in (Q, K, V)]
    result = attention_varlen(leaves[0], leaves[1], leaves[2], CU_Q, CU_K, backend=backend, **options)
    by_torch = torch.autograd.grad(result, leaves, torch.from_numpy(G))
    for b in range(len(QUERIES)):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        right, right_lse, right_grads = alone(b, **options)
        np.testing.assert_allclose(out[rows], right, atol=1e-12)
        np.testing.assert_allclose(result.detach().numpy()[rows], right, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], right_lse, atol=1e-12)
        for found, other, grad, at in zip(grads[:3], by_torch, right_grads, (rows, keys, keys), strict=True):
            np.testing.assert_allclose(found[at], grad, atol=1e-12)
            np.testing.assert_allclose(other.numpy()[at], grad, atol=1e-12)


@every_backend
def test_rows_past_the_last_sequence_have_no_part(backend: str | None) -> None:
    q, k, v = Q.copy(), K.copy(), V.copy()
    q[CU_Q[-1] :] = k[CU_K[-1] :] = v[CU_K[-1] :] = np.nan
    out, lse = attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, backend=backend)
    same, _ = attention_varlen(Q, K, V, CU_Q, CU_K, return_lse=True, backend=backend)
    grads: Any = attention_varlen_backward(G, q, k, v, CU_Q, CU_K, backend=backend)
    np.testing.assert_array_equal(out, same)
    assert (out[CU_Q[-1] :] == 0).all()
    assert (lse[:, CU_Q[-1] :] == -np.inf).all()
    assert all((grad[last:] == 0).all() for grad, last in zip(grads[:3], (CU_Q[-1], CU_K[-1], CU_K[-1]), strict=True))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_dropout_counts_sequences_as_batch_entries(backend: str) -> None:
    """Of sequences that are all as long as the longest, the same as of a batch."""
    q, k, v = (rng.standard_normal((3, 2, 9, 8)) for _ in range(3))
    whole = attention(q, k, v, dropout_p=0.4, seed=7, backend=backend)
    flat: Any = [x.swapaxes(1, 2).reshape(27, 2, 8) for x in (q, k, v)]
    out = attention_varlen(flat[0], flat[1], flat[2], [0, 9, 18, 27], dropout_p=0.4, seed=7, backend=backend)
    np.testing.assert_allclose(out.reshape(3, 9, 2, 8).swapaxes(1, 2), whole, atol=1e-12)


@pytest.mark.parametrize(
    "cu_seqlens",
    [CU_Q, tuple(CU_Q), np.array(CU_Q, np.int16), np.array(CU_Q, np.uint8), np.array(CU_Q).repeat(2)[::2]],
    ids=lambda x: type(x).__name__ + str(getattr(x, "dtype", "")),
)
def test_offsets_of_every_kind(cu_seqlens: Any) -> None:
    right = attention_varlen(Q, K, V, CU_Q, CU_K)
    np.testing.assert_array_equal(attention_varlen(Q, K, V, cu_seqlens, CU_K, max_seqlen_q=9), right)


def test_keys_begin_where_queries_do_unless_said() -> None:
    right = attention_varlen(Q, Q[:, :2], Q[:, 2:], CU_Q, CU_Q)
    np.testing.assert_array_equal(attention_varlen(Q, Q[:, :2], Q[:, 2:], CU_Q, max_seqlen_q=7), right)


@pytest.mark.parametrize("rows", [0, 4])
def test_no_sequences(rows: int) -> None:
    q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3))
    out = attention_varlen(q, k, v, [0], backend="tiled")
    assert out.shape == (rows, 2, 8)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_plan_is_the_call() -> None:
    said: dict[str, Any] = {"is_causal": True, "max_seqlen_q": 7, "max_seqlen_k": 7}
    plan = attnswitch.plan(Q, K, V, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **said)
    assert plan.problem == Problem.parse("b5.h4/2.s7.d8/6.fp64.causal.varlen.v=align8").replace(
        value=plan.problem.value, query=plan.problem.query, key=plan.problem.key
    )
    assert "each sequence by a call of its own" in str(plan)
    right = attention_varlen(Q, K, V, CU_Q, CU_K, **said)
    np.testing.assert_array_equal(plan(Q, K, V, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K), right)
    with pytest.raises(InvalidProblem, match="the plan is for b5"):
        plan(Q, K, V, cu_seqlens_q=CU_Q[:-1], cu_seqlens_k=CU_K[:-1])
    with pytest.raises(InvalidProblem, match="its call takes cu_seqlens_q"):
        plan(Q, K, V)
    for layout in ("BHLD", "BLHD"):
        with pytest.raises(InvalidProblem, match="nor layout"):
            plan(Q, K, V, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, layout=layout)
    with pytest.raises(InvalidProblem, match="not for sequences one after another"):
        attnswitch.plan(Q[None], K[None], V[None], layout="BLHD")(
            Q[None], K[None], V[None], layout="BLHD", cu_seqlens_q=CU_Q
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens_k": [0, 22]}, "without cu_seqlens_q"),
        ({"max_seqlen_q": 22}, "without cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 22], "layout": "BLHD"}, "take none of them"),
        ({"cu_seqlens_q": [0, 22], "attn_mask": np.ones((22, 22), bool)}, "take none of them"),
    ],
)
def test_what_a_plan_does_not_take(options: dict[str, Any], message: str) -> None:
    operands = (Q,) * 3 if "cu_seqlens_q" in options else (Q[None],) * 3
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.explain(*operands, **options)
    with pytest.raises(InvalidProblem, match="a described problem stands alone"):
        attnswitch.explain("b1.h4.s22.d8.fp64", **options)


def test_the_calls_are_recorded() -> None:
    with attnswitch.record() as recording:
        attention_varlen(Q, K, V, CU_Q, CU_K)
    (problem,) = recording.problems
    assert problem.varlen
    assert (problem.batch, problem.seq_q, problem.seq_k) == (5, 7, 7)


def test_its_text() -> None:
    text = "b3.h4.s40x60.d16.fp32.causal-br.varlen.grad"
    assert str(Problem.parse(text)) == text
    for beside in ("mask=bool", "lengths"):
        with pytest.raises(InvalidProblem, match="no attn_mask, and have lengths of their own"):
            Problem.parse(f"{text}.{beside}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [1, 5]}, r"cu_seqlens_q=\[1, 5\]: expected 0 first"),
        ({"cu_seqlens_q": [0, 6, 5]}, r"none less than the one before"),
        ({"cu_seqlens_q": [0, 23]}, r"none beyond the 22 rows"),
        ({"cu_seqlens_q": []}, r"cu_seqlens_q=\[\]: expected B \+ 1 integers"),
        ({"cu_seqlens_q": 5}, r"cu_seqlens_q=5: expected B \+ 1 integers"),
        ({"cu_seqlens_q": [0, 1.5]}, r"expected B \+ 1 integers"),
        ({"cu_seqlens_q": np.zeros((2, 2), int)}, r"cu_seqlens_q has shape \(2, 2\): expected \(B \+ 1,\)"),
        ({"cu_seqlens_q": np.array([0.0, 5.0])}, r"cu_seqlens_q has dtype float64: expected integers"),
        ({"cu_seqlens_q": torch.tensor(CU_Q)}, r"cu_seqlens_q is a torch array"),
        ({"cu_seqlens_k": CU_K[:-1]}, r"cu_seqlens_q tells 5 sequences apart and cu_seqlens_k 4"),
        ({"cu_seqlens_q": [0, 2**70]}, r"none beyond the 22 rows"),
        ({"cu_seqlens_q": torch.tensor(CU_Q, device="meta")}, r"only torch can read"),
        ({"cu_seqlens_k": None}, r"query has 22 rows and key 25: pass cu_seqlens_k"),
        ({"max_seqlen_q": 6}, r"max_seqlen_q=6: a sequence of 7 rows is in cu_seqlens_q; expected 7 or more"),
        ({"max_seqlen_q": -1}, r"max_seqlen_q=-1: expected an integer, the rows of the longest"),
        ({"max_seqlen_k": "7"}, r"max_seqlen_k='7': expected an integer"),
        ({"max_seqlen_q": True}, r"max_seqlen_q=True: expected an integer"),
        ({"max_seqlen_q": torch.tensor(14.9)}, r"max_seqlen_q=tensor\(14\.9.*: expected an integer"),
        ({"max_seqlen_q": np.array("a")}, r"max_seqlen_q=array\('a'.*: expected an integer"),
        ({"attn_mask": np.ones(1)}, r"attention_varlen has no attn_mask: sequences are"),
        ({"layout": "BLHD"}, r"attention_varlen has no layout"),
        ({"backend": ["tiled"]}, r"backend=\['tiled'\]: expected the name"),
        ({"query": Q[None]}, r"query has shape \(1, 22, 4, 8\): expected three axes, \(T, H, D\)"),
        ({"key": K[:-1]}, r"the length of key and value must agree"),
        ({"value": V.tolist()}, r"value is a list"),
        ({"is_casual": True}, r"attention_varlen: there is an unexpected keyword 'is_casual'.*is_causal"),
        ({"seed": -1}, r"seed=-1"),
        ({"backend": "fastest"}, r"backend 'fastest' is not known"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"query": Q, "key": K, "value": V, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes
    with pytest.raises(InvalidProblem, match=message):
        attention_varlen(**asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_out": None}, r"grad_out is None"),
        ({"grad_out": G[:-1]}, r"grad_out has shape \(21, 4, 6\): expected \(22, 4, 6\), as \(T, H, D\)"),
        ({"grad_lse": G[..., 0]}, r"grad_lse has shape \(22, 4\): expected \(4, 22\)"),
        ({"dropout_p": 0.5}, r"dropout needs the seed"),
        ({"grad_out": torch.ones(22, 4, 6, device="meta")}, r"only torch can read"),
        ({"return_lse": True}, r"returns gradients only"),
        ({"layout": "BLHD"}, r"has no layout"),
        ({"attn_mask": None}, r"has no attn_mask"),
        ({"window_size": 3}, r"unexpected keyword 'window_size'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense_backward(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"grad_out": G, "query": Q, "key": K, "value": V, "cu_seqlens_q": CU_Q}
    asked |= {"cu_seqlens_k": CU_K} | changes
    with pytest.raises(InvalidProblem, match=message):
        attention_varlen_backward(**asked)


def test_gradients_of_given_results_and_of_the_lse() -> None:
    """A part's gradients, from the results of the whole: keys dealt between two calls add up."""
    out, lse = attention_varlen(Q, K, V, CU_Q, CU_K, return_lse=True)
    grad_lse = rng.standard_normal(lse.shape)
    right: Any = attention_varlen_backward(G, Q, K, V, CU_Q, CU_K, grad_lse=grad_lse, backend="reference")
    found: Any = attention_varlen_backward(G, Q, K, V, CU_Q, CU_K, out=out, lse=lse, grad_lse=grad_lse, backend="tiled")
    for one, other in zip(found[:3], right[:3], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_what_one_backend_does_not_take_is_told() -> None:
    q, k, v = map(torch.from_numpy, (Q, K, V))
    with pytest.raises(Unsupported, match="varlen with a seed"):
        attention_varlen(q, k, v, CU_Q, CU_K, dropout_p=0.5, seed=1, backend="sdpa-math")
    plan = attnswitch.explain("b2.h4.s64.d64.bf16.varlen", device="h100", backend="sdpa-cudnn")
    assert plan.chosen is None
    assert "the host does not know where they begin" in str(plan)


def test_a_sequence_that_its_backend_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are asked of the longest; one that speaks against another sequence is told, and not passed over."""
    from attnswitch.machine import registry
    from attnswitch.machine.device import Device

    sdpa = registry.loaded("sdpa-math")
    reasons = type(sdpa).reasons
    monkeypatch.setattr(
        type(sdpa), "reasons", lambda self, p, d: iter(["it is odd"]) if p.seq_q == 5 else reasons(self, p, d)
    )
    problem = Problem.parse("b5.h4/2.s7.d8/6.fp64.varlen")
    assert not list(one_by_one.reasons(sdpa, problem, Device.cpu()))
    q, k, v = map(torch.from_numpy, (Q, K, V))
    with pytest.raises(Unsupported, match=r"does not take sequence 0, .*it is odd"):
        attention_varlen(q, k, v, CU_Q, CU_K, backend="sdpa-math")


def test_a_second_derivative_is_right_or_refused() -> None:
    leaves: Any = [torch.from_numpy(x.copy()).requires_grad_() for x in (Q, K, V)]
    out = attention_varlen(leaves[0], leaves[1], leaves[2], CU_Q, CU_K, backend="tiled")
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(Unsupported, match="double backward"):
        grad.sum().backward()
    out = attention_varlen(leaves[0], leaves[1], leaves[2], CU_Q, CU_K, backend="sdpa-math")
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    assert torch.autograd.grad(grad.sum(), leaves[1])[0].any()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_arrays_of_jax() -> None:
    import jax.numpy as jnp

    q, k, v = (jnp.asarray(x, jnp.float32) for x in (Q, K, V))
    out = attention_varlen(q, k, v, CU_Q, CU_K)
    assert type(out) is type(q)
    np.testing.assert_allclose(np.asarray(out), attention_varlen(Q, K, V, CU_Q, CU_K), atol=1e-5)
    grads: Any = attention_varlen_backward(jnp.asarray(G, jnp.float32), q, k, v, CU_Q, CU_K)
    right: Any = attention_varlen_backward(G, Q, K, V, CU_Q, CU_K)
    for found, other in zip(grads[:3], right[:3], strict=True):
        np.testing.assert_allclose(np.asarray(found), other, atol=1e-5)
