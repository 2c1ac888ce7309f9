"""``sinks`` through the public calls: one more key of value 0, against the formula written out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formula import written_out
from torch._subclasses.fake_tensor import FakeTensorMode

import attnswitch
from attnswitch import InvalidProblem, Unsupported
from attnswitch.machine.backend import Gradients

B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 5, 7, 8, 6
#: As they are called here, with operands in lists.
attention: Any = attnswitch.attention
attention_backward: Any = attnswitch.attention_backward
attention_varlen: Any = attnswitch.attention_varlen
attention_varlen_backward: Any = attnswitch.attention_varlen_backward

rng = np.random.default_rng(2)
Q, K, V, G = (rng.standard_normal(s) for s in ((B, HQ, LQ, D), (B, HK, LK, D), (B, HK, LK, DV), (B, HQ, LQ, DV)))
G_LSE = rng.standard_normal((B, HQ, LQ))
SINKS = np.array([0.3, -2.0, 1.5, 0.0])
#: No sink, one that outweighs all keys, one that vanishes.
EXTREME = np.array([-np.inf, 1e4, 0.5, -1e4])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "causal_alignment": "bottom_right", "key_lengths": [3, 7]},  # rows that see nothing
    {"window": (1, 0), "softcap": 2.0},
    {"key_lengths": [0, 4]},
]
every_backend = pytest.mark.parametrize("backend", [None, "tiled", "reference"])


def tensors(*values: Any, dtype: Any = torch.float64, grad: bool = False) -> list[Any]:
    return [torch.tensor(value, dtype=dtype, requires_grad=grad) for value in values]


def right(sinks: Any, options: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """Output, lse, and gradients of q, k, v and the sinks, with an upstream gradient of lse where it is finite."""
    leaves = tensors(Q, K, V, sinks, grad=True)
    out, lse = written_out(*leaves, **options)
    alive = lse.isfinite()
    g_lse = torch.where(alive, torch.from_numpy(G_LSE), 0.0)
    kept = torch.where(alive, lse, 0.0)
    grads = torch.autograd.grad((out, kept), leaves, (torch.from_numpy(G), g_lse))
    return out.detach(), lse.detach(), [torch.nan_to_num(grad) for grad in grads]


@every_backend
@pytest.mark.parametrize("sinks", [SINKS, EXTREME], ids=["usual", "extreme"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_formula(options: dict[str, Any], sinks: Any, backend: str | None) -> None:
    out, lse, grads = right(sinks, options)
    leaves = tensors(Q, K, V, sinks, grad=True)
    got = attention(*leaves[:3], sinks=leaves[3], return_lse=True, backend=backend, **options)
    torch.testing.assert_close(got, (out, lse))
    found = torch.autograd.grad(got, leaves, (torch.from_numpy(G), torch.from_numpy(G_LSE)))
    torch.testing.assert_close(found, tuple(grads))
    of_numpy = attention(Q, K, V, sinks=sinks, return_lse=True, backend=backend, **options)
    np.testing.assert_allclose(of_numpy[0], out)
    np.testing.assert_allclose(of_numpy[1], lse)
    upstream = {"grad_lse": G_LSE, "sinks_grad": True}
    explicit: Any = attention_backward(G, Q, K, V, sinks=sinks, backend=backend, **upstream, **options)
    for one, other in zip((*explicit[:3], explicit.sinks), grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_sinks_alone_may_have_a_gradient() -> None:
    q, k, v = tensors(Q, K, V)
    sinks = torch.tensor(SINKS, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: attention(q, k, v, sinks=s, is_causal=True), [sinks])
    assert torch.autograd.gradcheck(lambda s: attention(q, k, v, sinks=s, return_lse=True)[1], [sinks])


def test_every_operand_has_its_gradient() -> None:
    leaves = tensors(Q, K, V, SINKS, grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v, s: attention(q, k, v, sinks=s, return_lse=True), leaves)


def test_with_a_mask_of_one_axis_and_its_gradient() -> None:
    mask = rng.standard_normal(LK)
    leaves = tensors(Q, K, V, mask, SINKS, grad=True)
    out = attention(*leaves[:3], attn_mask=leaves[3], sinks=leaves[4])
    found = torch.autograd.grad(out, leaves, torch.from_numpy(G))
    given: Any = attention_backward(G, Q, K, V, attn_mask=mask, mask_grad=True, sinks=SINKS, sinks_grad=True)
    assert given.attn_mask.shape == (LK,)
    for one, other in zip((*given, given.sinks), found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_gradient_has_the_dtype_of_the_sinks(dtype: Any) -> None:
    q, k, v = tensors(Q, K, V, dtype=torch.float32)
    sinks = torch.tensor(SINKS, dtype=dtype, requires_grad=True)
    out = attention(q, k, v, sinks=sinks)
    out.backward(torch.from_numpy(G).float())
    assert out.dtype == torch.float32
    assert sinks.grad is not None
    assert sinks.grad.dtype == dtype
    same = attention_backward(G.astype("f"), *(x.astype("f") for x in (Q, K, V)), sinks=SINKS, sinks_grad=True)
    np.testing.assert_allclose(sinks.grad.float(), same.sinks, rtol=0.05)


def test_a_list_is_taken_and_gradients_unpack_into_four() -> None:
    out = attention(Q, K, V, sinks=SINKS.tolist())
    np.testing.assert_array_equal(out, attention(Q, K, V, sinks=SINKS))
    of_four = attention_backward(G, Q, K, V, sinks=SINKS.tolist(), sinks_grad=True)
    dq, _, _, dmask = of_four
    assert isinstance(of_four, Gradients)
    assert dmask is None
    np.testing.assert_array_equal(dq, attention_backward(G, Q, K, V, sinks=SINKS).query)
    assert not hasattr(attention_backward(G, Q, K, V, sinks=SINKS), "sinks")


def test_layout_dropout_and_strides() -> None:
    turned = [x.swapaxes(1, 2) for x in (Q, K, V)]
    call: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
    plain = attention(Q, K, V, sinks=SINKS, **call)
    twice = np.repeat(SINKS, 2)[::-2][::-1]
    np.testing.assert_array_equal(attention(*turned, sinks=twice, layout="BLHD", **call), plain.swapaxes(1, 2))
    out, lse = attention(*turned, sinks=SINKS, layout="BLHD", return_lse=True, **call)
    given: dict[str, Any] = {"sinks": SINKS, "sinks_grad": True, "layout": "BLHD", **call}
    again: Any = attention_backward(G.swapaxes(1, 2), *turned, **given)
    of_results: Any = attention_backward(G.swapaxes(1, 2), *turned, out=out, lse=lse, **given)
    straight: Any = attention_backward(G, Q, K, V, sinks=SINKS, sinks_grad=True, **call)
    for grads in (again, of_results):
        np.testing.assert_allclose(grads.key, straight.key.swapaxes(1, 2), atol=1e-12)
        np.testing.assert_allclose(grads.sinks, straight.sinks, atol=1e-12)


@every_backend
def test_sequences_without_padding(backend: str | None) -> None:
    starts_q, starts_k = [0, 3, 3, 5], [0, 0, 3, 7]  # one sees nothing, one has no queries
    rows = [x[0].swapaxes(0, 1).copy() for x in (Q, K, V, G)]
    leaves = tensors(*rows[:3], SINKS, grad=True)
    call: dict[str, Any] = {"return_lse": True, "is_causal": True, "backend": backend}
    out, lse = attention_varlen(*leaves[:3], starts_q, starts_k, sinks=leaves[3], **call)
    grads = torch.autograd.grad(out, leaves, torch.from_numpy(rows[3]))
    np.testing.assert_array_equal(out[:3].detach(), np.zeros((3, HQ, DV)))
    np.testing.assert_array_equal(lse[:, :3].detach(), np.repeat(SINKS[:, None], 3, 1))
    last = [x.detach()[None, at] for x, at in zip(leaves, (slice(3, 5), slice(3, 7), slice(3, 7)), strict=False)]
    alone = [x.requires_grad_() for x in last]
    sinks = torch.tensor(SINKS, requires_grad=True)
    same = attention(*alone, sinks=sinks, layout="BLHD", is_causal=True)
    torch.testing.assert_close(same[0], out[3:])
    of_last = torch.autograd.grad(same, (*alone, sinks), torch.from_numpy(rows[3])[None, 3:])
    torch.testing.assert_close(grads[3], of_last[3])
    torch.testing.assert_close(grads[1][3:], of_last[1][0])
    beside: dict[str, Any] = {"sinks": SINKS, "sinks_grad": True, "is_causal": True}
    given: Any = attention_varlen_backward(rows[3], *rows[:3], starts_q, starts_k, **beside)
    np.testing.assert_allclose(given.sinks, grads[3], atol=1e-12)


def test_a_plan_is_the_call() -> None:
    plan = attnswitch.plan(Q, K, V, sinks=SINKS, is_causal=True)
    assert str(plan.problem) == "b2.h4/2.s5x7.d8/6.fp64.causal.sinks"
    np.testing.assert_array_equal(plan(Q, K, V, sinks=SINKS), attention(Q, K, V, sinks=SINKS, is_causal=True))
    others: list[dict[str, Any]] = [{}, {"sinks": SINKS, "alibi_slopes": SINKS}]
    for wrong in others:
        with pytest.raises(InvalidProblem, match="make a plan for it"):
            plan(Q, K, V, **wrong)
    leaves = tensors(Q, K, V, grad=True)
    sinks = torch.tensor(SINKS, requires_grad=True)
    stepping = attnswitch.plan(*leaves, sinks=torch.tensor(SINKS))
    out = stepping(*leaves, sinks=sinks)
    by_plan, by_call = (torch.autograd.grad(x.sum(), sinks) for x in (out, attention(*leaves, sinks=sinks)))
    torch.testing.assert_close(by_plan, by_call)


def test_a_plan_and_nan() -> None:
    poisoned = Q.copy()
    poisoned[0, 0, 3, 5] = np.nan
    with pytest.raises(InvalidProblem, match=r"query, key or value holds NaN or inf, .* attention chooses"):
        attnswitch.plan(Q, K, V, sinks=SINKS)(poisoned, K, V, sinks=SINKS)
    plan = attnswitch.plan(poisoned, K, V, sinks=SINKS)
    assert plan.problem.nonfinite
    assert np.isnan(plan(poisoned, K, V, sinks=SINKS)[0, 0, 3]).all()
    np.testing.assert_allclose(plan(Q, K, V, sinks=SINKS), attention(Q, K, V, sinks=SINKS), atol=1e-12)


@pytest.mark.parametrize("way", ["at once", "in a graph", "in a mode", "in a transform"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_a_plan_that_chose_nothing_says_so(name: str, way: str) -> None:
    torch._dynamo.reset()
    q, k, v, numbers = tensors(Q, K, V, np.ones(HQ), dtype=torch.float32)
    plan = attnswitch.explain(q, k, v, backend="sdpa-flash", **{name: numbers})
    assert plan.backend is None

    def call(query: Any) -> Any:
        return plan(query, k, v, **{name: numbers})

    def in_a_mode(query: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return call(mode.from_tensor(query))

    graph, transform = torch.compile(call, backend="eager"), torch.func.vmap(call)
    ways = {"at once": call, "in a graph": graph, "in a mode": in_a_mode, "in a transform": transform}
    with pytest.raises(Unsupported, match="the plan chose nothing"):
        ways[way](q[None] if way == "in a transform" else q)


def test_its_text() -> None:
    text = "b1.h4.s8.d16.bf16.lengths.sinks.alibi"
    assert str(attnswitch.Problem.parse(text)) == text
    plan = attnswitch.explain(text, device="cpu")
    assert plan.backend in ("tiled", "reference")
    assert "sinks: its kernels know of none" in str(plan)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (SINKS[:3], r"sinks has shape \(3,\): expected \(4,\), one score for each query head"),
        (SINKS[None], r"sinks has shape \(1, 4\)"),
        (np.arange(4), "sinks has dtype int64: expected one of float16"),
        (torch.tensor(SINKS), "sinks is a torch array on cpu:0, query a numpy array"),
        ([0.0, 1.0, float("nan"), 2.0], "sinks holds nan: expected finite numbers, or -inf where a head has none"),
        ([0.0, 1.0, float("inf"), 2.0], "sinks holds inf"),
        (["a", "b", "c", "d"], "expected an array, or a list of numbers"),
        ([[1.0], [2.0, 3.0]], "expected an array, or a list of numbers"),
        (1.0, "sinks=1.0: expected an array, or a list of numbers"),
    ],
)
def test_what_makes_no_sense(sinks: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attention(Q, K, V, sinks=sinks)
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.explain(Q, K, V, sinks=sinks)


def test_what_else_makes_no_sense() -> None:
    with pytest.raises(InvalidProblem, match="a gradient of sinks was asked for, but there are none"):
        attention_backward(G, Q, K, V, sinks_grad=True)
    for flag in ("sinks_grad", "mask_grad"):
        with pytest.raises(InvalidProblem, match=f"{flag}='no': expected True or False"):
            attention_backward(G, Q, K, V, sinks=SINKS, **{flag: "no"})
    with pytest.raises(Unsupported, match="sdpa-math"):
        attention(Q, K, V, sinks=SINKS, backend="sdpa-math")


@pytest.mark.parametrize("lost", ["sinks", "operands"])
def test_sinks_on_another_device_are_refused(lost: str) -> None:
    q, sinks = torch.zeros(1, 2, 4, 8), torch.zeros(2)
    q, sinks = (q, sinks.to("meta")) if lost == "sinks" else (q.to("meta"), sinks)
    with pytest.raises(
        InvalidProblem, match=rf"sinks is on {sinks.device}, query on {q.device}: pass both on one device"
    ):
        attnswitch.attention(q, q, q, sinks=sinks)


def test_a_second_derivative_is_refused() -> None:
    leaves = tensors(Q, K, V, SINKS, grad=True)
    out = attention(*leaves[:3], sinks=leaves[3])
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    for grad in grads:
        for leaf in (leaves[0], leaves[3]):
            with pytest.raises(Unsupported, match="double backward"):
                torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


def test_sinks_written_to_before_the_backward_are_noticed() -> None:
    leaves = tensors(Q, K, V, SINKS, grad=True)
    out = attention(*leaves[:3], sinks=leaves[3])
    with torch.no_grad():
        leaves[3].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- where torch looks at the call before its tensors do ---------------------------------------------------------------


@pytest.mark.parametrize("sinks", [SINKS, EXTREME], ids=["usual", "extreme"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2] | {"layout": "BLHD"}], ids=str)
def test_a_graph_holds_the_call(options: dict[str, Any], sinks: Any) -> None:
    turned = options.get("layout") == "BLHD"
    given = [x.swapaxes(1, 2).copy() if turned else x for x in (Q, K, V)]

    def both(q: Any, k: Any, v: Any, s: Any) -> Any:
        return attention(q, k, v, sinks=s, return_lse=True, **options)

    found = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        leaves = tensors(*given, sinks, grad=True)
        out, lse = function(*leaves)
        g = torch.from_numpy(G.swapaxes(1, 2).copy() if turned else G)
        found.append((out, lse, torch.autograd.grad((out, lse), leaves, (g, torch.from_numpy(G_LSE)))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("number", [np.inf, np.nan])
@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_numbers_are_looked_at_in_a_graph_as_they_are_without(number: float, kind: Any) -> None:
    q, k, v = tensors(Q, K, V)
    rows = [x[0].transpose(0, 1) for x in (q, k[:, :, :LQ], v[:, :, :LQ])]
    sinks = kind([0.0, number, 1.0, -np.inf])
    calls = {
        "out": lambda s: attention(q, k, v, sinks=s),
        "lse": lambda s: attention(q, k, v, sinks=s, return_lse=True)[1],
        "varlen": lambda s: attention_varlen(*rows, [0, LQ], sinks=s),
        "backward": lambda s: attention_backward(q[..., :DV], q, k, v, sinks=s).query,
    }
    for call in calls.values():
        for function in (call, *(torch.compile(call, fullgraph=True, backend=x) for x in ("eager", "aot_eager"))):
            with pytest.raises(InvalidProblem, match=f"sinks holds {number}: expected finite numbers, or -inf"):
                function(sinks)
        torch.compiler.reset()


def test_numbers_are_looked_at_under_vmap() -> None:
    q, k, v = tensors(Q, K, V)
    for axis in (0, 1):
        several = torch.tensor(np.stack([SINKS, np.where(SINKS == 0.0, np.inf, SINKS)], axis))
        with pytest.raises(InvalidProblem, match="sinks holds inf"):
            torch.vmap(lambda s: attention(q, k, v, sinks=s), in_dims=axis)(several)


def test_function_transforms() -> None:
    q, k, v = tensors(Q, K, V)
    several = torch.tensor(np.stack([SINKS, SINKS + 1.0]))
    mapped = torch.vmap(lambda s: attention(q, k, v, sinks=s))(several)
    torch.testing.assert_close(mapped, torch.stack([attention(q, k, v, sinks=s) for s in several]))
    by_func = torch.func.grad(lambda s: attention(q, k, v, sinks=s).sum())(several[0])
    leaf = several[0].clone().requires_grad_()
    torch.testing.assert_close(by_func, torch.autograd.grad(attention(q, k, v, sinks=leaf).sum(), leaf)[0])


def test_tensors_without_memory() -> None:
    q, k, v = (torch.empty(x.shape, device="meta") for x in (Q, K, V))
    sinks = torch.empty(HQ, device="meta")
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert out.shape == (B, HQ, LQ, DV)
    assert lse.shape == (B, HQ, LQ)
    with pytest.raises(InvalidProblem, match=r"sinks has shape \(1,\)"):
        attention(q, k, v, sinks=sinks[:1])
