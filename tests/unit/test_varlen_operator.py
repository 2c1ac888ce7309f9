"""attention_varlen as an operator of torch's: what compiles, exports, traces and counts a program sees it."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import attnswitch
from attnswitch import InvalidProblem, Unsupported, attention_backward, attention_varlen, attention_varlen_backward
from attnswitch.call.operators import calls, schema

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # opcheck's
]
OPS = torch.ops.attnswitch
#: Lengths of 5, 0 and 8 queries, and of 4, 3 and 6 keys; two rows lie past the last.
CU_Q, CU_K = [0, 5, 5, 13], [0, 4, 7, 13]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (3, None)},
    "lse": {"return_lse": True},
    "dropout": {"dropout_p": 0.5, "seed": 2**64 - 3},
    "longest": {"max_seqlen_q": 8, "max_seqlen_k": 9, "softcap": 2.0},
    "slopes": {"alibi_slopes": [0.5, 0.0, -0.25, 2.0], "return_lse": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def tensors(grad: bool = True, rows: int = 15) -> list[torch.Tensor]:
    return [torch.randn(rows, heads, dim, requires_grad=grad) for heads, dim in ((4, 16), (2, 16), (2, 8))]


def offsets() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(CU_Q), torch.tensor(CU_K, dtype=torch.int32)


def loss(result: Any) -> torch.Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    finite = [part.masked_fill(part.isinf(), 0.0) for part in parts]  # the lse of rows that see nothing
    return torch.stack([(part * torch.arange(part.numel()).view(part.shape).sin()).sum() for part in finite]).sum()


def told(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the operators are told of such a call."""
    options = {**KINDS[kind]}
    options.pop("seed", None)
    slopes = options.pop("alibi_slopes", None)
    longest = options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
    given = [options.get(name, usual) for name, usual in schema.USUAL.items()]
    return calls.told_varlen(tuple(tensors()), offsets(), slopes, longest, None, None, given)


@every_kind
def test_opcheck(kind: str) -> None:
    given, said = told(kind)
    torch.library.opcheck(OPS.attention_varlen_forward.default, given, {**said, "seed": 5})
    out, lse, state = OPS.attention_varlen_forward(*given, **said, seed=5)
    upstream = torch.randn_like(out), torch.randn_like(lse) if "return_lse" in KINDS[kind] else None
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in (*upstream, *given, out, lse, state))
    torch.library.opcheck(OPS.attention_varlen_backward.default, detached, said)


def test_opcheck_of_a_call_that_keeps_nothing() -> None:
    q, k, v = tensors(grad=False)
    torch.library.opcheck(OPS.attention_varlen.default, (q, k, v, *offsets(), None, None, None), {"is_causal": True})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_kind
def test_a_whole_graph_gives_what_a_call_gives(kind: str, backend: str) -> None:
    operands, where = tensors(), offsets()

    def function(*operands: torch.Tensor) -> Any:
        return attention_varlen(*(x * 2 for x in operands), *where, **KINDS[kind])

    expected = function(*operands)
    found = torch.compile(function, fullgraph=True, backend=backend)(*operands)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(loss(x), operands) for x in (found, expected)]
    torch.testing.assert_close(*both)


def test_some_gradients_of_a_graph() -> None:
    q, k, v = tensors(grad=False)
    v.requires_grad_()
    where = offsets()
    found = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")(q, k, v, *where)
    (grad,) = torch.autograd.grad(loss(found), [v])
    torch.testing.assert_close(grad, torch.autograd.grad(loss(attention_varlen(q, k, v, *where)), [v])[0])


@pytest.mark.slow
def test_inductor_compiles_forward_and_backward() -> None:
    operands, where = tensors(), offsets()

    def function(*operands: torch.Tensor) -> Any:
        return attention_varlen(operands[0].sin(), *operands[1:], *where, is_causal=True).cos()

    found = torch.compile(function, fullgraph=True)(*operands)
    torch.testing.assert_close(found, function(*operands))
    torch.testing.assert_close(*(torch.autograd.grad(loss(x), operands) for x in (found, function(*operands))))


def test_totals_counts_and_longest_are_compiled_once() -> None:
    counter = CompileCounter()

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor, most: int) -> Any:
        return attention_varlen(q, k, v, where, max_seqlen_q=most, max_seqlen_k=most, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 9, 2, 0, 1], [1, 3, 7, 4], [30, 12], [8, 8, 8, 8, 8]):
        where = torch.tensor([0, *lengths]).cumsum(0)
        operands = tensors(rows=sum(lengths) + 3)
        torch.testing.assert_close(compiled(*operands, where, max(lengths)), function(*operands, where, max(lengths)))
    assert counter.frame_count == 1


def test_offsets_in_lists() -> None:
    operands = tensors(grad=False)
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands, CU_Q, tuple(CU_K)), attention_varlen(*operands, CU_Q, CU_K))
    with pytest.raises(InvalidProblem, match=r"cu_seqlens_q=\[0, 16\].* beyond the 15 rows"):
        compiled(*operands, [0, 16])


def test_the_longest_in_a_tensor() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> Any:
        return attention_varlen(q, k, v, where, max_seqlen_q=where.diff().max())

    call = *tensors(grad=False), offsets()[0]
    torch.testing.assert_close(make_fx(function, tracing_mode="symbolic")(*call)(*call), function(*call))


def test_one_that_is_too_small_is_noticed_when_the_graph_runs() -> None:
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    with pytest.raises(InvalidProblem, match="max_seqlen_q=7: a sequence of 8 rows"):
        compiled(*tensors(grad=False), *offsets(), max_seqlen_q=7)


def test_a_plan_fixes_the_backend_and_the_longest_of_a_graph() -> None:
    operands, (cu_q, cu_k) = tensors(), offsets()
    said = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    plan = attnswitch.plan(*operands, **said, is_causal=True, return_lse=True, backend="tiled")
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    found = torch.compile(lambda *x: plan(*x, **said), fullgraph=True, backend=noted)(*operands)
    torch.testing.assert_close(found, plan(*operands, **said), rtol=0, atol=0)
    (node,) = (node for node in graphs[0].graph.nodes if node.target is OPS.attention_varlen_forward)
    assert node.kwargs["backend"] == "tiled"
    assert node.args[6:] == (8, 6)


class Attention(torch.nn.Module):
    """One call."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> Any:
        return attention_varlen(q, k, v, where, is_causal=True)


@pytest.mark.parametrize("strict", [True, False])
def test_export_at_any_total(strict: bool) -> None:
    total, count = torch.export.Dim("total", min=2, max=640), torch.export.Dim("count", min=3, max=64)
    exported = torch.export.export(
        Attention(),
        (*tensors(grad=False), torch.tensor(CU_Q)),
        strict=strict,
        dynamic_shapes=({0: total}, {0: total}, {0: total}, {0: count}),
    )
    other = *tensors(grad=False, rows=31), torch.tensor([0, 17, 31])
    torch.testing.assert_close(exported.module()(*other), Attention()(*other))


def test_fake_and_meta_tensors_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        q, k = torch.empty(9, 4, 8, dtype=torch.bfloat16), torch.empty(7, 2, 8, dtype=torch.bfloat16)
        v = torch.empty(7, 2, 3, dtype=torch.bfloat16)
        out, lse = attention_varlen(q, k, v, [0, 5, 9], torch.tensor([0, 6, 7]), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 3), torch.bfloat16, (4, 9), torch.float32)
    meta = [x.to("meta") for x in tensors()]
    assert attention_varlen(*meta, CU_Q, CU_K).is_meta  # offsets on the CPU beside others are like a list
    grads: Any = attention_varlen_backward(torch.empty(15, 4, 8, device="meta"), *meta, CU_Q, CU_K)
    assert [grad.shape for grad in grads[:3]] == [x.shape for x in meta]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [0, 1.5]}, r"cu_seqlens_q has dtype float32"),
        ({"cu_seqlens_q": [[0, 1]]}, r"cu_seqlens_q has shape \(1, 2\)"),
        ({"cu_seqlens_k": [0, 4]}, r"tells 3 sequences apart and cu_seqlens_k 1"),
        ({"query": torch.empty(14, 4, 16, device="meta"), "cu_seqlens_k": None}, r"query has 14 rows and key 15"),
        ({"value": torch.empty(14, 2, 8, device="meta")}, r"the length of key and value must agree"),
        ({"key": torch.empty(15, 2, 16)}, r"differ in device"),
        ({"backend": 5}, "backend"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense_is_told_without_elements(changes: dict[str, Any], message: str) -> None:
    q, k, v = (x.to("meta") for x in tensors())
    asked = {"query": q, "key": k, "value": v, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes
    with pytest.raises((InvalidProblem, RuntimeError), match=message):
        attention_varlen(**asked)
    with pytest.raises(Exception, match=message):
        torch.compile(lambda: attention_varlen(**asked), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(mode: str) -> None:
    operands, where = tensors(), offsets()

    def step(*operands: torch.Tensor) -> Any:
        return torch.autograd.grad(attention_varlen(*operands, *where).square().sum(), operands)

    graph = make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)(*operands)
    names = [str(node.target) for node in graph.graph.nodes]
    assert "attnswitch.attention_varlen_forward.default" in names
    assert "attnswitch.attention_varlen_backward.default" in names
    torch.testing.assert_close(graph(*operands), step(*operands))


def test_flops_are_counted() -> None:
    operands, where = tensors(), offsets()
    pairs = 4 * (5 * 4 + 0 * 3 + 8 * 6)
    with FlopCounterMode(display=False) as counter:
        out = attention_varlen(*operands, *where)
    assert counter.get_total_flops() == 2 * pairs * (16 + 8)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 8)


@pytest.mark.parametrize(
    ("longest", "pairs"),
    [({}, 15 * 15), ({"max_seqlen_k": 6}, 15 * 6), ({"max_seqlen_q": 5, "max_seqlen_k": 6}, 15 * 5)],
)
def test_flops_without_elements_are_the_most_that_there_can_be(longest: dict[str, int], pairs: int) -> None:
    meta = [x.to("meta") for x in tensors(grad=False)]
    where = [x.to("meta") for x in offsets()]
    with FlopCounterMode(display=False) as counter:
        attention_varlen(*meta, *where, **longest)
    assert counter.get_total_flops() == 2 * 4 * pairs * (16 + 8)


def test_autocast_casts_nothing() -> None:
    operands, where = tensors(), offsets()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")(*operands, *where)
        assert attention_varlen(*operands, *where).dtype == found.dtype == torch.float32


def test_sequences_of_another_dropout_mask_each_call() -> None:
    operands, where = tensors(), offsets()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    one, other = (compiled(*operands, *where, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(one, other)
    (grad,) = torch.autograd.grad(one.sum(), operands[2:])  # by the mask of the forward: weights of a row add up alike
    torch.testing.assert_close((grad.transpose(0, 1) * operands[2].transpose(0, 1)).sum(), one.sum())


# -- gradients that the program asks for -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bottom right", "dropout"])
def test_attention_varlen_backward_in_a_graph(kind: str, given: bool) -> None:
    operands, where, said = tensors(), offsets(), KINDS[kind]
    out, lse = (x.detach() for x in attention_varlen(*operands, *where, return_lse=True, **said))
    results = {"out": out, "lse": lse, "grad_lse": torch.where(lse.isinf(), 0.0, lse)} if given else {}
    expected: Any = attention_varlen_backward(out, *operands, *where, **results, **said)
    compiled = torch.compile(attention_varlen_backward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(out, *operands, *where, **results, **said), expected)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("said", [{"is_causal": True}, {"dropout_p": 0.5, "seed": 3}], ids=str)
def test_attention_backward_in_a_graph(said: dict[str, Any], given: bool) -> None:
    q, k, v = (x.detach().transpose(0, 1)[None] for x in tensors())
    said |= {"attn_mask": torch.randn(15, 15), "mask_grad": True}
    call = {name: x for name, x in said.items() if name != "mask_grad"}
    out, lse = attnswitch.attention(q, k, v, return_lse=True, **call)
    results = {"out": out, "lse": lse, "grad_lse": lse} if given else {}
    expected: Any = attention_backward(out, q, k, v, **results, **said)
    compiled = torch.compile(attention_backward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(out, q, k, v, **results, **said), expected)


def test_gradients_in_a_graph_need_what_others_need() -> None:
    operands, where = tensors(grad=False), offsets()
    out = torch.ones(15, 4, 8)
    for said, message in ({"dropout_p": 0.5}, "needs the seed"), ({"window_size": 3}, "unexpected keyword"):
        with pytest.raises(InvalidProblem, match=message):
            torch.compile(attention_varlen_backward, backend="eager")(out, *operands, *where, **said)
        with pytest.raises(InvalidProblem, match=message):
            torch.compile(attention_backward, backend="eager")(out[None], *(x[None] for x in operands), **said)


# -- sinks, which the operators do not take, and slopes ----------------------------------------------------------------

SINKS, SLOPES = [0.5, float("-inf"), -1.0, 30.0], [0.5, 0.0, -0.25, 2.0]
every_form = pytest.mark.parametrize("offsets_of", [offsets, lambda: (CU_Q, CU_K)], ids=["tensors", "lists"])


@every_form
@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks_in_a_whole_graph(return_lse: bool, offsets_of: Callable[[], Any]) -> None:
    leaves, where = [*tensors(), torch.tensor(SINKS, requires_grad=True)], offsets_of()

    def function(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention_varlen(q, k, v, *where, sinks=sinks, return_lse=return_lse, is_causal=True)

    expected = function(*leaves)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss(x), leaves) for x in (found, expected)))


def test_sinks_of_tensors_without_elements() -> None:
    operands = [x.to("meta") for x in tensors()]
    for where in (CU_Q, CU_K), [x.to("meta") for x in offsets()]:
        out, lse = attention_varlen(*operands, *where, sinks=SINKS, return_lse=True)
        assert (out.shape, lse.shape) == ((15, 4, 8), (4, 15))
    with pytest.raises(InvalidProblem, match=r"sinks has shape \(3,\)"):
        attention_varlen(*operands, CU_Q, CU_K, sinks=SINKS[:3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention_varlen(*tensors(), *offsets(), sinks=torch.tensor(SINKS)).shape == (15, 4, 8)


@pytest.mark.parametrize("slopes", [SLOPES, torch.rand(3, 4)], ids=["heads", "sequences"])
@pytest.mark.parametrize("beside", [{}, {"sinks": SINKS}], ids=["alone", "sinks"])
def test_slopes_in_a_whole_graph(beside: dict[str, Any], slopes: Any) -> None:
    operands, where = tensors(), offsets()

    def function(*operands: torch.Tensor) -> Any:
        return attention_varlen(*operands, *where, alibi_slopes=slopes, is_causal=True, **beside) * 2.0

    expected = function(*operands)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*operands)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss(x), operands) for x in (found, expected)))
    meta = [x.to("meta") for x in operands]
    assert attention_varlen(*meta, CU_Q, CU_K, alibi_slopes=SLOPES, **beside).shape == (15, 4, 8)


def test_slopes_that_make_no_sense() -> None:
    meta = [x.to("meta") for x in tensors()]
    with pytest.raises(InvalidProblem, match=r"alibi_slopes has shape \(2, 4\): expected \(4,\) or \(3, 4\)"):
        attention_varlen(*meta, CU_Q, CU_K, alibi_slopes=torch.rand(2, 4, device="meta"))
    slopes = torch.rand(4, requires_grad=True)
    for call in (attention_varlen, torch.compile(attention_varlen, backend="aot_eager")):
        with pytest.raises(InvalidProblem, match=r"alibi_slopes requires_grad.*float attn_mask"):
            call(*tensors(), *offsets(), alibi_slopes=slopes)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_a_plan_with_either_in_a_graph(name: str) -> None:
    operands, (cu_q, cu_k) = tensors(grad=False), offsets()
    said: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, name: torch.tensor(SLOPES)}
    plan = attnswitch.plan(*operands, **said, backend="tiled")
    compiled = torch.compile(lambda *x: plan(*x, **said), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*operands), plan(*operands, **said))


def gradient_calls() -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Both functions that return gradients, with what they take."""
    operands, out = tensors(grad=False), torch.randn(15, 4, 8)
    batched = tuple(x.transpose(0, 1)[None] for x in (out, *operands))
    return (attention_varlen_backward, (out, *operands, *offsets())), (attention_backward, batched)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.5, "seed": 3}], ids=["", "dropout"])
@pytest.mark.parametrize(
    "beside", [{"sinks": SINKS}, {"alibi_slopes": SLOPES}, {"sinks": SINKS, "alibi_slopes": SLOPES}], ids=" ".join
)
def test_gradients_with_either_in_a_whole_graph(beside: dict[str, Any], dropout: dict[str, Any], given: bool) -> None:
    for function, (out, *rest) in gradient_calls():
        forward: Any = attention_varlen if function is attention_varlen_backward else attnswitch.attention
        whole = forward(*rest, return_lse=True, **beside, **dropout)
        said = beside | dropout | (dict(zip(("out", "lse"), whole, strict=True)) if given else {})
        expected: Any = function(out, *rest, **said)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(out, *rest, **said), expected)
        torch.compiler.reset()


def test_sinks_beside_results_are_looked_at() -> None:
    for function, (out, *rest) in gradient_calls():
        lse = torch.zeros((4, 15) if function is attention_varlen_backward else (1, 4, 15))
        with pytest.raises(InvalidProblem, match=r"sinks has shape \(3,\)"):
            torch.compile(function, backend="eager")(out, *rest, out=out, lse=lse, sinks=SINKS[:3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "also", [{}, {"alibi_slopes": SLOPES}, {"dropout_p": 0.5, "seed": 3}], ids=["", "alibi", "dropout"]
)
def test_a_gradient_of_sinks_in_a_whole_graph(also: dict[str, Any], given: bool, backend: str) -> None:
    beside: dict[str, Any] = {"sinks": torch.tensor(SINKS), **also}
    for function, (out, *rest) in gradient_calls():
        forward: Any = attention_varlen if function is attention_varlen_backward else attnswitch.attention
        whole = forward(*rest, return_lse=True, **beside)
        said = beside | (dict(zip(("out", "lse"), whole, strict=True)) if given else {})
        said |= {"grad_lse": torch.randn_like(whole[1]), "sinks_grad": True}

        def differentiate(out: Any, *rest: Any, said: Any = said, function: Any = function) -> Any:
            found = function(out, *rest, **said)
            return (*found[:3], found.sinks)

        compiled = torch.compile(differentiate, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(out, *rest), differentiate(out, *rest))
        alone: Any = torch.compile(function, fullgraph=True, backend=backend)(out, *rest, **said)
        torch.testing.assert_close(alone.sinks, differentiate(out, *rest)[3])
        torch.compiler.reset()


def test_a_gradient_of_sinks_needs_tensors_with_memory_or_a_graph() -> None:
    for function, given in gradient_calls():
        meta = [x.to("meta") if x.is_floating_point() else x for x in given]
        with pytest.raises((InvalidProblem, Unsupported), match="only torch can read"):
            function(*meta, sinks=SINKS, sinks_grad=True)
        with pytest.raises(InvalidProblem, match="a gradient of sinks was asked for, but there are none"):
            torch.compile(function, backend="eager")(*given, sinks_grad=True)


# -- what looks at tensors and is refused ------------------------------------------------------------------------------


def transformed(transform: Callable[..., Any]) -> Callable[..., Any]:
    _, k, v = tensors(grad=False)
    where = offsets()
    return lambda q: transform(lambda q: attention_varlen(q, k, v, *where).square().sum())(q)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_transforms_are_refused(transform: Any) -> None:
    q = tensors(grad=False)[0]
    q = q[None] if transform is torch.func.vmap else q
    function = transformed(transform)
    with pytest.raises(Unsupported, match=r"attention_varlen within torch\.func"):
        function(q)
    for whole in (False, True):
        with pytest.raises(RuntimeError, match=r"attention_varlen within torch\.func"):
            torch.compile(function, backend="eager", fullgraph=whole)(q)


def test_gradients_within_a_transform_are_refused_in_a_graph() -> None:
    x = torch.randn(1, 2, 5, 8)
    mapped = torch.func.vmap(lambda g: attention_backward(g, x, x, x).query)
    for whole in (False, True):
        with pytest.raises(RuntimeError, match="call attention, and let torch differentiate it"):
            torch.compile(mapped, backend="eager", fullgraph=whole)(x[None])


def test_a_second_derivative_is_refused_in_a_graph() -> None:
    operands, where = tensors(), offsets()
    out = OPS.attention_varlen_forward(*operands, *where, None, None, None, grads="qkv")[0]
    (grad, *_) = torch.autograd.grad(out.square().sum(), operands, create_graph=True)
    with pytest.raises(Unsupported, match="double backward"):
        grad.sum().backward()


def test_a_problem_of_tensors_without_elements_is_not_known() -> None:
    with pytest.raises(InvalidProblem, match="their lengths are not known"):
        attnswitch.explain(*(x.to("meta") for x in tensors()), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
