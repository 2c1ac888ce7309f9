"""attention_paged as an operator of torch's: what compiles, exports, traces and counts a program sees it."""

# mypy: disable-error-code="arg-type, call-arg, misc, no-untyped-call"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import attnswitch
import attnswitch.call.operators
from attnswitch import InvalidProblem, Unsupported, attention_paged

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
OPS = torch.ops.attnswitch
TABLE, LENGTHS = [[3, 1, 5], [3, 2, -1], [4, -1, -1]], [9, 5, 0]
#: Packed queries: 2, 0 and 3 of each sequence; a row lies past the last.
STARTS = [0, 2, 2, 5]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "all keys": {"is_causal": False, "scale": 0.5},
    "window": {"window": (3, None), "softcap": 2.0},
    "sinks and slopes": {"sinks": [0.5, float("-inf"), -1.0, 30.0], "alibi_slopes": [0.5, 0.0, -0.25, 2.0]},
    "splits": {"num_splits": 2, "backend": "tiled"},
    "packed": {"cu_seqlens_q": torch.tensor(STARTS), "return_lse": True},
    "longest": {"cu_seqlens_q": STARTS, "max_seqlen_q": 4},
    "tree": {"tree_mask": torch.tensor([[[1], [3]], [[1], [2]], [[0], [1]]], dtype=torch.uint8)},
    "8 bits": {"key_scale": torch.tensor([0.5, 2.0]), "value_scale": 0.25},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def operands(kind: str = "plain") -> tuple[torch.Tensor, ...]:
    """query (B, Lq, Hq, D) or (T, Hq, D), and caches (P, page, Hkv, D) and Dv, whose last page is NaN."""
    query = torch.randn(6, 4, 16) if "cu_seqlens_q" in KINDS[kind] else torch.randn(3, 2, 4, 16)
    caches = [torch.randn(7, 4, 2, dim) for dim in (16, 8)]
    for cache in caches:
        cache[-1] = float("nan")
    if kind == "8 bits":
        caches = [(16 * cache).nan_to_num().to(torch.int8) for cache in caches]
    return query, *caches


def places() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(TABLE, dtype=torch.int32), torch.tensor(LENGTHS)


def arguments(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the operators are told of such a call, the tensors first."""
    said = {"is_causal": True} | KINDS[kind]
    sequences = ("cu_seqlens_q", "max_seqlen_q", "num_splits", "tree_mask")
    names = (*sequences, "key_scale", "value_scale", "sinks", "alibi_slopes")
    beside = [said.pop(name, None) for name in names]
    given = [torch.tensor(x) if isinstance(x, (list, float)) else x for x in beside]
    return (*operands(kind), *places(), *given), said


@every_kind
def test_opcheck(kind: str) -> None:
    given, said = arguments(kind)
    torch.library.opcheck(OPS.attention_paged_forward.default, given, {**said, "return_lse": True})
    said.pop("return_lse", None)
    torch.library.opcheck(OPS.attention_paged.default, given, said)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_kind
def test_a_whole_graph_gives_what_a_call_gives(kind: str, backend: str) -> None:
    def function(query: torch.Tensor, *rest: torch.Tensor) -> Any:
        return attention_paged(query * 2, *rest, **KINDS[kind])

    call = *operands(kind), *places()
    found = torch.compile(function, fullgraph=True, backend=backend)(*call)
    torch.testing.assert_close(found, function(*call), rtol=0, atol=0)


@pytest.mark.slow
def test_inductor_compiles_a_decoding_step() -> None:
    """The newest token's key and value are written into their page, in place, before attention reads them."""

    def step(query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, table: Any, lengths: Any) -> Any:
        last, every = lengths.long() - 1, torch.arange(lengths.shape[0])
        at = table[every, last // 4].long(), last % 4
        key_cache[at], value_cache[at] = key, value
        return attention_paged(query.sin(), key_cache, value_cache, table, lengths).cos()

    _, *caches = operands()
    table, lengths = torch.tensor([[3, 1, 5], [0, 2, 2], [4, 4, 4]]), torch.tensor([9, 5, 1])
    new = torch.randn(3, 1, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    ours, theirs = ([cache.clone() for cache in caches] for _ in range(2))
    found = torch.compile(step, fullgraph=True)(*new, *ours, table, lengths)
    torch.testing.assert_close(found, step(*new, *theirs, table, lengths))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_batches_tables_and_lengths_are_compiled_once() -> None:
    counter = CompileCounter()

    def function(query: Any, key: Any, value: Any, table: Any, lengths: Any) -> Any:
        return attention_paged(query, key, value, table, lengths)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch, width in ((5, 9), (6, 10), (8, 11)):
        _, *caches = operands()
        table, lengths = torch.randint(0, 6, (batch, width)), torch.randint(0, 4 * width, (batch,))
        call = torch.randn(batch, 3, 4, 16), *caches, table, lengths
        torch.testing.assert_close(compiled(*call), function(*call))
    assert counter.frame_count == 1


def test_tables_and_lengths_in_lists() -> None:
    call = operands()
    compiled = torch.compile(attention_paged, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*call, TABLE, LENGTHS), attention_paged(*call, TABLE, LENGTHS))
    none = call[0][:0], *call[1:]
    torch.testing.assert_close(compiled(*none, [], []), attention_paged(*none, [], []))
    with pytest.raises(InvalidProblem, match=r"block_table\[0, 1\] is 7: expected one of the 7 pages"):
        compiled(*call, [[3, 7, 5], *TABLE[1:]], LENGTHS)


def test_a_plan_fixes_the_backend_and_the_splits_of_a_graph() -> None:
    call, (table, lengths) = operands(), places()
    said: dict[str, Any] = {"block_table": table, "cache_lengths": lengths}
    plan = attnswitch.plan(*call, **said, num_splits=2, return_lse=True, backend="tiled")
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    found = torch.compile(lambda *x: plan(*x, **said), fullgraph=True, backend=noted)(*call)
    torch.testing.assert_close(found, plan(*call, **said), rtol=0, atol=0)
    (node,) = (node for node in graphs[0].graph.nodes if node.target is OPS.attention_paged_forward)
    assert node.kwargs["backend"] == "tiled"
    assert node.args[7] == 2


class Attention(torch.nn.Module):
    """One call."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where: torch.Tensor) -> Any:
        return attention_paged(q, k, v, *where)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    call = *operands(), *places()
    exported = torch.export.export(Attention(), call, strict=strict)
    torch.testing.assert_close(exported.module()(*call), Attention()(*call))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(mode: str) -> None:
    call = *operands(), *places()
    graph = make_fx(lambda *x: attention_paged(*x), tracing_mode=mode)(*call)
    assert "attnswitch.attention_paged.default" in [str(node.target) for node in graph.graph.nodes]
    torch.testing.assert_close(graph(*call), attention_paged(*call))


def test_fake_and_meta_tensors_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        query, cache = torch.empty(3, 2, 4, 8, dtype=torch.bfloat16), torch.empty(7, 16, 2, 8, dtype=torch.bfloat16)
        out, lse = attention_paged(query, cache, cache[..., :3], TABLE, LENGTHS, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 2, 4, 3), torch.bfloat16, (3, 4, 2), torch.float32)
    query, *caches = (x.to("meta") for x in operands("packed"))
    out, lse = attention_paged(query, *caches, TABLE, LENGTHS, cu_seqlens_q=STARTS, return_lse=True)
    assert (out.shape, lse.shape) == ((6, 4, 8), (4, 6))
    assert out.is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_cache": torch.empty(6, 4, 2, 8)}, "the pages, their rows and the heads of both caches must agree"),
        ({"key_cache": torch.empty(7, 4, 2, 15)}, "the head dimension of query and key_cache must agree"),
        ({"query": torch.empty(3, 4, 16)}, "another number of axes"),
        ({"num_splits": 0}, "num_splits=0: expected into how many parts"),
        ({"num_splits": True}, "num_splits=True: expected into how many parts"),
        ({"key_scale": True}, "key_scale=True: expected"),
        ({"sinks": "all"}, "sinks='all': expected"),
        ({"block_table": None}, "block_table=None: expected integers"),
        ({"cache_lengths": "9"}, "cache_lengths='9': expected"),
        ({"max_seqlen_q": 2}, "max_seqlen_q without cu_seqlens_q"),
        ({"block_table": [[0.5, 1.0, 2.0]] * 3}, "block_table has dtype float32: expected integers"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense_is_told(changes: dict[str, Any], message: str) -> None:
    names = ("query", "key_cache", "value_cache", "block_table", "cache_lengths")
    asked = dict(zip(names, (*operands(), *places()), strict=True)) | changes
    with pytest.raises(Exception, match=message):
        torch.compile(lambda: attention_paged(**asked), backend="aot_eager")()


def test_there_are_no_gradients() -> None:
    call: list[Any] = [*operands(), *places()]
    query, *rest = call
    query.requires_grad_()
    for compiled in (lambda x: x, torch.compile(backend="aot_eager")):
        with torch.no_grad():
            found = compiled(attention_paged)(query, *rest)
        torch.testing.assert_close(found, attention_paged(query.detach(), *rest))
        with pytest.raises(InvalidProblem, match=r"requires a gradient, which a cache has none of.*no_grad"):
            compiled(attention_paged)(query, *rest)
    out = OPS.attention_paged(query, *rest, *[None] * 8)
    with pytest.raises(InvalidProblem, match="which a cache has none of"):
        out.sum().backward()


def test_transforms_are_refused() -> None:
    given: list[Any] = [*operands(), *places()]
    query, *rest = given

    def mapped(query: Any) -> Any:
        return torch.vmap(lambda x: attention_paged(x, *rest))(query)

    for call in (mapped, torch.compile(mapped, backend="eager")):
        with pytest.raises(Unsupported, match=r"attention_paged within torch.func"):
            call(query[None])


def test_flops_are_counted_by_lengths() -> None:
    dims, heads = 16 + 8, 4
    for kind, pairs in (("plain", 2 * (9 + 5)), ("packed", 2 * 9)):
        with FlopCounterMode(display=False) as counter:
            attention_paged(*operands(kind), *places(), **KINDS[kind])
        assert counter.get_total_flops() == 2 * heads * dims * pairs
        with FlopCounterMode(display=False) as counter:  # without numbers: every page of the table full
            attention_paged(*(x.to("meta") for x in (*operands(kind), *places())), **_on_meta(KINDS[kind]))
        assert counter.get_total_flops() == 2 * heads * dims * 12 * 6


def _on_meta(said: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in said.items()}
