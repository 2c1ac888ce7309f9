"""attention as operators of torch's: what compiles, exports, transforms and counts a program sees them."""

# mypy: disable-error-code="arg-type, misc, no-untyped-call"

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import attnswitch
from attnswitch.call import operators
from attnswitch.call.operators import schema
from attnswitch.errors import InvalidProblem, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # opcheck's
]
KINDS = ["plain", "causal", "bool mask", "float mask", "lengths", "window", "softcap", "lse", "BLHD", "GQA", "dropout"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def tensors(grad: bool = False, length: int = 12, heads: int = 4, dtype: Any = torch.float32) -> list[torch.Tensor]:
    shapes = (2, 4, length, 16), (2, heads, length, 16), (2, heads, length, 16)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def call_of(kind: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Operands with gradients, and keywords of such a call."""
    keywords: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "bool mask": {"attn_mask": torch.rand(12, 12) > 0.3},
        "float mask": {"attn_mask": torch.randn(2, 1, 12, 12, requires_grad=True)},
        "lengths": {"key_lengths": torch.tensor([12, 5])},
        "window": {"window": (3, None), "causal_alignment": "bottom_right"},
        "softcap": {"softcap": 2.0},
        "lse": {"return_lse": True},
        "BLHD": {"layout": "BLHD", "is_causal": True},
        "dropout": {"dropout_p": 0.5, "seed": 2**64 - 3},
    }
    operands = tensors(grad=True, heads=2 if kind == "GQA" else 4)
    if kind == "BLHD":
        operands = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in operands]
    return operands, keywords.get(kind, {})


def leaves(operands: list[torch.Tensor], keywords: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in (*operands, *keywords.values()) if isinstance(x, torch.Tensor) and x.requires_grad]


def loss(result: Any) -> torch.Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    return torch.stack([(part * torch.arange(part.numel()).view(part.shape).sin()).sum() for part in parts]).sum()


def told(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (q, k, v), keywords = call_of(kind)
    options = [keywords.get(name, usual) for name, usual in schema.USUAL.items()]
    return operators.told(q, k, v, keywords.get("attn_mask"), keywords.get("key_lengths"), None, None, None, options)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    given, said = told(kind)
    torch.library.opcheck(torch.ops.attnswitch.attention_forward.default, given, {**said, "seed": 5})
    out, lse, state = torch.ops.attnswitch.attention_forward(*given, **said, seed=5)
    upstream = torch.randn_like(out), torch.randn_like(lse) if kind == "lse" else None
    everything = *upstream, *given, out, lse, state
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in everything)
    torch.library.opcheck(torch.ops.attnswitch.attention_backward.default, detached, said)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lse"])
def test_opcheck_of_a_call_that_keeps_nothing(kind: str) -> None:
    with torch.no_grad():
        given, said = told(kind)
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
    torch.library.opcheck(torch.ops.attnswitch.attention_forward.default, detached, {**said, "seed": 5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_of_what_looks_at_sinks(dtype: Any) -> None:
    sinks = torch.tensor([0.5, -math.inf, -3.0], dtype=dtype)
    torch.library.opcheck(torch.ops.attnswitch.absent_sinks, (sinks,))
    assert torch.ops.attnswitch.absent_sinks(sinks).tolist() == [False, True, False]


def test_the_lse_is_there_whether_or_not_it_was_asked_for() -> None:
    q, k, v = (x.detach() for x in tensors())
    _, lse, _ = torch.ops.attnswitch.attention_forward(q, k, v, None, None, None, backend="tiled")
    torch.testing.assert_close(lse, attnswitch.attention(q, k, v, return_lse=True)[1])
    with pytest.raises(Unsupported, match="return_lse"):
        torch.ops.attnswitch.attention_forward(q, k, v, None, None, None, backend="sdpa-math")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_graph_gives_what_a_call_gives(kind: str, backend: str) -> None:
    operands, keywords = call_of(kind)

    def function(*operands: torch.Tensor) -> Any:
        return attnswitch.attention(*(x * 2 for x in operands), **keywords)

    expected = function(*operands)
    found = torch.compile(function, fullgraph=True, backend=backend)(*operands)
    torch.testing.assert_close(found, expected)
    asked = leaves(operands, keywords)
    torch.testing.assert_close(torch.autograd.grad(loss(found), asked), torch.autograd.grad(loss(expected), asked))


@pytest.mark.slow
def test_inductor_compiles_forward_and_backward() -> None:
    operands = tensors(grad=True)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attnswitch.attention(q.sin(), k, v.transpose(2, 3).transpose(2, 3), is_causal=True).cos()

    found = torch.compile(function, fullgraph=True)(*operands)
    torch.testing.assert_close(found, function(*operands))
    both = [torch.autograd.grad(loss(x), operands) for x in (found, function(*operands))]
    torch.testing.assert_close(*both)


def test_ten_lengths_are_compiled_once() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: attnswitch.attention(q, k, v, is_causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    for length in range(10, 20):
        operands = tensors(length=length)
        torch.testing.assert_close(compiled(*operands), torch_attention(*operands, is_causal=True))
    assert counter.frame_count == 1


def test_a_plan_fixes_the_backend_of_a_graph() -> None:
    operands = tensors()
    plan = attnswitch.plan(*operands, is_causal=True, return_lse=True, backend="tiled")
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    found = torch.compile(lambda *x: plan(*x), fullgraph=True, backend=noted)(*operands)
    torch.testing.assert_close(found, plan(*operands), rtol=0, atol=0)
    (node,) = (node for node in graphs[0].graph.nodes if node.target is torch.ops.attnswitch.attention_forward)
    assert node.kwargs["backend"] == "tiled"


def test_what_makes_no_sense_is_told_while_the_graph_is_made() -> None:
    q, k, _ = tensors()
    with pytest.raises(Exception, match="head dimension of query and key must agree"):
        torch.compile(attnswitch.attention, fullgraph=True, backend="eager")(q, k[..., :8], k)


class Attention(torch.nn.Module):
    """One call."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attnswitch.attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("beside", ["sinks", "alibi_slopes"])
def test_an_error_in_a_graph_of_gradients_leaves_gradients_enabled(beside: str) -> None:
    q = torch.randn(1, 2, 3, 8)
    compiled = torch.compile(attnswitch.attention_backward, fullgraph=True, backend="eager")
    with pytest.raises(InvalidProblem, match=f"{beside} holds nan"):
        compiled(q, q, q, q, **{beside: torch.tensor([0.0, math.nan])})
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("strict", [True, False])
def test_export_at_any_length(strict: bool) -> None:
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(Attention(), tuple(tensors()), strict=strict, dynamic_shapes=({2: length},) * 3)
    other = tensors(length=31)
    torch.testing.assert_close(exported.module()(*other), torch_attention(*other, is_causal=True))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.__version__ < "2.12", reason="torch 2.11's loader ends the process beside a GPU"
)
@pytest.mark.slow
def test_aot_inductor_packages_the_call(tmp_path: Any) -> None:
    operands = tuple(tensors())
    with torch.no_grad():
        exported = torch.export.export(Attention(), operands)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        found = torch._inductor.aoti_load_package(path)(*operands)
    torch.testing.assert_close(found, torch_attention(*operands, is_causal=True))


def test_fake_and_meta_tensors_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 5, 8, dtype=torch.bfloat16), torch.empty(2, 2, 7, 8, dtype=torch.bfloat16)
        v = torch.empty(2, 2, 7, 3, dtype=torch.bfloat16)
        out, lse = attnswitch.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 5, 3), torch.bfloat16, (2, 4, 5), torch.float32)
    assert attnswitch.attention(q, k, v).shape == (2, 4, 5, 3)  # out of the mode as well
    assert attnswitch.attention(*(x.to("meta") for x in tensors())).is_meta
    with pytest.raises(InvalidProblem, match="differ in device"):
        attnswitch.attention(torch.empty(1, 1, 2, 8), *torch.empty(2, 1, 1, 2, 8, device="meta"))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operators(mode: str) -> None:
    operands = tensors(grad=True)

    def step(*operands: torch.Tensor) -> Any:
        return torch.autograd.grad(attnswitch.attention(*operands).square().sum(), operands)

    graph = make_fx(step, tracing_mode=mode)(*operands)
    names = [str(node.target) for node in graph.graph.nodes]
    assert "attnswitch.attention_forward.default" in names
    assert "attnswitch.attention_backward.default" in names
    torch.testing.assert_close(graph(*operands), step(*operands))


# -- torch.func and forward mode ---------------------------------------------------------------------------------------


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> Any:
    return attnswitch.attention(q, k, v, attn_mask=mask)


def through_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return attnswitch.attention(q, k, v, backend="sdpa-math")


def squared(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*operands).square().sum()


def mapped(function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    return torch.func.vmap(function, in_dims)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
@pytest.mark.parametrize("whole", [False, True])
def test_transforms_that_differentiate_are_refused_in_a_graph(transform: Any, whole: bool) -> None:
    """torch before 2.15 took the operator there for a constant: its gradient came out 0."""
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 1, 2, 8, 8).unbind()

    def differentiated(query: torch.Tensor) -> Any:
        return transform(lambda q: attnswitch.attention(q, key, value).square().sum())(query)

    compiled = torch.compile(differentiated, backend="eager", fullgraph=whole)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"attention within torch\.func\.grad, .* let backward\(\) differentiate"
        ):
            compiled(query)
    assert differentiated(query).abs().max() > 0
    torch._dynamo.reset()


def test_vmap_stays_in_a_graph() -> None:
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 3, 1, 2, 8, 8).unbind()
    mapped = torch.func.vmap(lambda q, k, v: attnswitch.attention(q, k, v))
    found = torch.compile(lambda *x: mapped(*x), backend="eager", fullgraph=True)(query, key, value)
    torch.testing.assert_close(found, mapped(query, key, value))
    torch._dynamo.reset()


FOUR = (0, 1, 2, 3)
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(squared(f), FOUR),
    "vmap": lambda f: mapped(f, (0, 0, 0, 0)),
    "vmap of some": lambda f: mapped(f, (1, None, 0, None)),
    "vmap of grad": lambda f: mapped(torch.func.grad(squared(f), FOUR), (0, None, 0, None)),
    "grad of vmap": lambda f: torch.func.grad(squared(mapped(f, (0, None, 0, 0))), FOUR),
    "vmap of vmap": lambda f: mapped(mapped(f, (0, 0, None, None)), (0, 0, None, None)),
    "jacrev": lambda f: torch.func.jacrev(f, FOUR),
    "jacfwd": lambda f: torch.func.jacfwd(f, FOUR),
    "hessian": lambda f: torch.func.hessian(squared(f), FOUR),
    "jvp": lambda f: lambda *x: torch.func.jvp(f, x, tuple(y.flip(0) for y in x)),
}


def dropped(seed: int | None) -> Callable[..., Any]:
    return lambda q, k, v: attnswitch.attention(q, k, v, dropout_p=0.5, seed=seed)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, None)], ids=str)
def test_vmap_draws_the_dropout_of_each_call(axes: tuple[int | None, ...]) -> None:
    q, k, v = tensors(length=5)
    given = [
        x if axis is None else torch.stack((x, x.flip(0), x * 2), axis) for x, axis in zip((q, k, v), axes, strict=True)
    ]

    def both(*operands: torch.Tensor) -> Any:
        return dropped(7)(*operands), torch.func.grad(squared(dropped(7)), (0, 1, 2))(*operands)

    found = torch.func.vmap(both, axes)(*given)
    calls = [
        both(*(x if axis is None else x.select(axis, n) for x, axis in zip(given, axes, strict=True))) for n in range(3)
    ]
    torch.testing.assert_close(found, torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *calls))


@pytest.mark.parametrize("grad", [False, True])
def test_vmap_without_a_seed_does_as_its_randomness_says(grad: bool) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in tensors(grad, length=5))
    with pytest.raises(InvalidProblem, match="randomness"):
        torch.func.vmap(dropped(None))(q, k, v)
    same = torch.func.vmap(dropped(None), randomness="same")(q, k, v)
    other = torch.func.vmap(dropped(None), randomness="different")(q, k, v)
    assert torch.equal(same[0], same[2])
    assert not torch.equal(other[0], other[2])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str) -> None:
    q, k, v = tensors(length=3, dtype=torch.float64)
    mask = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    match name:
        case "vmap":
            operands = [torch.stack([x, x.flip(0), -x]) for x in (q, k, v, mask)]
        case "vmap of some":
            operands = [torch.stack([q, q.flip(0)], 1), k, torch.stack([v, -v]), mask[0, 0]]
        case "vmap of grad":
            operands = [torch.stack([q, q.flip(0)]), k, torch.stack([v, -v]), mask[0]]
        case "grad of vmap":
            operands = [torch.stack([q, q.flip(0)]), k, torch.stack([v, -v]), torch.stack([mask[:1], -mask[:1]])]
        case "vmap of vmap":
            operands = [torch.stack([torch.stack([x, -x])] * 2) for x in (q, k)] + [v, mask]
        case "hessian" | "jacrev" | "jacfwd":
            operands = [x[:1, :1, :2, :2] for x in (q, k, v, mask)]
        case _:
            operands = [q, k, v, mask]
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(ours)(*operands), transform(formula)(*operands))


def test_second_derivatives_are_those_of_math_or_refused() -> None:
    q, k, v = (x[:1, :1, :3, :2] for x in tensors(dtype=torch.float64))

    def twice(function: Callable[..., Any]) -> Any:
        return torch.func.grad(lambda q: torch.func.grad(squared(function))(q, k, v).square().sum())(q)

    torch.testing.assert_close(twice(through_math), twice(formula))
    with pytest.raises(Unsupported, match=r"derivative of a derivative .*sdpa-math"):
        twice(ours)


def test_forward_mode_is_that_of_math() -> None:
    q, k, v = tensors(dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, k)
        found = torch.autograd.forward_ad.unpack_dual(attnswitch.attention(dual, k, v)).tangent
        with pytest.raises(Unsupported, match="forward mode through backend='tiled'"):
            attnswitch.attention(dual, k, v, backend="tiled")
        for said, reason in (({"softcap": 2.0}, "softcap=2.0"), ({"sinks": [0.0] * q.shape[1]}, "which sinks are")):
            with pytest.raises(Unsupported, match=f"forward mode .* of sdpa-math, which does not take .*{reason}"):
                attnswitch.attention(dual, k, v, **said)
    torch.testing.assert_close(found, torch.func.jvp(lambda q: formula(q, k, v), (q,), (k,))[1])


# -- what looks at a program as it runs --------------------------------------------------------------------------------


def test_a_policy_of_checkpoints_keeps_what_attention_returned() -> None:
    operands, seen = tensors(grad=True), []

    def keep(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen.append((str(op), ctx.is_recompute))
        ours = op is torch.ops.attnswitch.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    found = checkpoint(
        lambda *x: attnswitch.attention(*(2 * y for y in x)).sin(),
        *operands,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep),
    )
    grads = torch.autograd.grad(found.sum(), operands)
    expected = torch.autograd.grad(torch_attention(*(2 * y for y in operands)).sin().sum(), operands)
    torch.testing.assert_close(grads, expected)
    assert ("attnswitch.attention_forward.default", False) in seen


def test_flops_are_counted() -> None:
    q, k, v = tensors(grad=True, heads=2)
    with FlopCounterMode(display=False) as counter:
        attnswitch.attention(q, k, v).sum().backward()
    scores = 2 * 4 * 12 * 12
    assert counter.get_total_flops() == 2 * scores * (16 + 16) + 2 * scores * (3 * 16 + 2 * 16)


def test_flops_are_counted_by_a_counter_that_is_older_than_the_operators() -> None:
    script = (
        "import torch, attnswitch\nfrom torch.utils.flop_counter import FlopCounterMode\n"
        "x = torch.zeros(2, 4, 64, 32)\n"
        "with FlopCounterMode(display=False) as counter:\n    attnswitch.attention(x, x, x)\n"
        "print(counter.get_total_flops())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 4 * 2 * 4 * 64 * 64 * 32


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return attnswitch.attention(x, x, x, is_causal=True)


def test_a_saved_export_is_loaded_by_another_process(tmp_path: Path) -> None:
    x = torch.randn(2, 2, 6, 8)
    torch.export.save(torch.export.export(Layer(), (x,)), tmp_path / "layer.pt2")
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import attnswitch.operators, torch\nlayer = torch.export.load('layer.pt2').module()\n"
        "torch.save(layer(torch.load('x.pt')), 'out.pt')"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), Layer()(x))
