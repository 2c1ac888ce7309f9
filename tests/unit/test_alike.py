"""Calls of other forms that are like one before: nothing is asked again, and what differs is told apart.

Nobody reads tensors on a GPU, and of those here that is said: see ``unread``.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnswitch
from attnswitch import InvalidProblem, arrays, attention_paged
from attnswitch.call import alike, finite, forms, headwise, paged, recording, torch_modes, varlen
from attnswitch.machine import registry
from attnswitch.machine.backend import Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.wisdom import view

PAGE, PAGES = 16, 12


class _Kernel(Kernel):
    """One of NumPy's, given tensors of torch."""

    def __init__(self, inner: Kernel) -> None:
        self._inner = inner

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        results = self._inner.forward(inputs.map(_to_numpy))
        out, lse = (arrays.passage(result, "numpy", "torch") for result in results)
        return out, lse

    def backward(self, inputs: Inputs, *results: Any) -> Gradients:
        there = (None if result is None else _to_numpy(result) for result in results)
        grads = self._inner.backward(inputs.map(_to_numpy), *there)
        return Gradients(*(None if grad is None else arrays.passage(grad, "numpy", "torch") for grad in grads))


def _to_numpy(array: Any) -> Any:
    return arrays.passage(array.detach(), "torch", "numpy")


class Own(type(registry.loaded("tiled"))):  # type: ignore[misc]
    """Of torch, and of every form."""

    name = f"{__name__}:Own"
    library = "torch"
    libraries = ("torch",)

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return _Kernel(super().compile(problem, device, config))


BACKEND = Own.name


@pytest.fixture(autouse=True)
def unread(nothing_before: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU are not looked at, as those on a GPU are not."""
    monkeypatch.setattr(alike, "knows_again", lambda query: query.is_cpu)
    with finite.checking("never"):
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one for each call that goes the way of any."""
    seen: list[object] = []

    def counting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            seen.append(given)
            return ask(*given)

        return counted

    for module in (paged, varlen, headwise):
        monkeypatch.setattr(module, "_ask", counting(module._ask))
    return seen


def decoding(batch: int = 2, rows: int = 1, width: int = 3, kind: torch.dtype = torch.float32, **said: Any) -> Any:
    """A call of newest tokens, with other numbers each time."""
    given = {
        "query": torch.randn(batch, rows, 4, 8).to(kind),
        "key_cache": torch.randn(PAGES, PAGE, 2, 8).to(kind),
        "value_cache": torch.randn(PAGES, PAGE, 2, 8).to(kind),
        "block_table": torch.randint(PAGES, (batch, width), dtype=torch.int32),
        "cache_lengths": torch.randint(1, PAGE * width, (batch,), dtype=torch.int32),
        "backend": BACKEND,
    }
    return given | said


def packed(**said: Any) -> Any:
    """Queries of three sequences, one after another, and two rows past them."""
    given = decoding(batch=3, cu_seqlens_q=torch.tensor([0, 3, 3, 5], dtype=torch.int32), max_seqlen_q=3)
    return given | {"query": torch.randn(7, 4, 8)} | said


def generally(call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The same by the way of any call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "knows_again", lambda _: False)
        return call(**given)


def agree(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, right in zip(one, other, strict=True):
            agree(mine, right)
        return
    assert torch.equal(one, other)
    assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.requires_grad,
    )


def check_quick(make: Callable[[], Any], asked: list[object], call: Callable[..., Any] = attention_paged) -> None:
    """Calls as ``make`` has them are asked of twice, and never again; all come to what any call does."""
    for turn in range(5):
        given = make()
        asked.clear()
        found = call(**given)
        assert len(asked) == (turn < 2), turn
        agree(found, generally(call, given))


def beside(batch: int, rows: tuple[int, ...]) -> dict[str, Any]:
    return {
        "tree_mask": torch.randint(256, (*rows, 1), dtype=torch.uint8),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(batch, 4),
    }


FORMS: dict[str, Callable[[], Any]] = {
    "decoding": decoding,
    "lse": lambda: decoding(return_lse=True),
    "several queries": lambda: decoding(rows=5, return_lse=True),
    "bfloat16": lambda: decoding(kind=torch.bfloat16),
    "window": lambda: decoding(window=(9, 0), softcap=2.0, scale=0.3),
    "splits": lambda: decoding(num_splits=2),
    "packed": packed,
    "packed, lse": lambda: packed(return_lse=True),
    "all": lambda: decoding(rows=3, return_lse=True, **beside(2, (2, 3))),
    "packed, all": lambda: packed(return_lse=True, **beside(3, (7,))),
    "slopes for all": lambda: decoding(alibi_slopes=torch.rand(4)),
    "sinks to convert": lambda: decoding(sinks=torch.randn(4, dtype=torch.bfloat16), return_lse=True),
    "slopes to convert": lambda: decoding(alibi_slopes=torch.rand(8, dtype=torch.float64)[::2]),
    "integers to convert": lambda: decoding(block_table=torch.randint(PAGES, (2, 4), dtype=torch.int16)[:, :3]),
    "a table in a wider one": lambda: decoding(block_table=torch.randint(PAGES, (2, 8), dtype=torch.int64)[:, :3]),
    "a tree in a wider one": lambda: decoding(
        rows=3, tree_mask=torch.randint(256, (2, 3, 8), dtype=torch.uint8)[..., :2]
    ),
    "a part of the key": lambda: (lambda given: given | {"value_cache": given["key_cache"][..., :4]})(decoding()),
    "turned": lambda: decoding(query=torch.randn(2, 4, 5, 8).transpose(1, 2), return_lse=True),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_pages_are_asked_of_no_more_and_come_to_the_same(make: Callable[[], Any], asked: list[object]) -> None:
    check_quick(make, asked)


def rows(**said: Any) -> Any:
    """Three sequences one after another, of which the second has no queries, and rows past them."""
    given = {
        "query": torch.randn(8, 4, 8),
        "key": torch.randn(11, 2, 8),
        "value": torch.randn(11, 2, 6),
        "cu_seqlens_q": torch.tensor([0, 3, 3, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 5, 10], dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
        "backend": BACKEND,
    }
    return given | said


def alike_rows(**said: Any) -> Any:
    """Keys that begin as queries do."""
    given = rows(query=torch.randn(11, 4, 8), cu_seqlens_k=None, max_seqlen_k=None, max_seqlen_q=5)
    return given | {"cu_seqlens_q": torch.tensor([0, 4, 5, 10])} | said


VARLEN: dict[str, Callable[[], Any]] = {
    "plain": rows,
    "lse": lambda: rows(return_lse=True, is_causal=True),
    "sinks and slopes": lambda: rows(sinks=torch.randn(4), alibi_slopes=torch.rand(3, 4), return_lse=True),
    "left out": alike_rows,
    "the same": lambda: (lambda given: given | {"cu_seqlens_k": given["cu_seqlens_q"], "max_seqlen_k": 5})(
        alike_rows()
    ),
    "a longest that is left out": lambda: alike_rows(is_causal=True),
    "integers to convert": lambda: rows(cu_seqlens_k=torch.tensor([0, 4, 5, 10], dtype=torch.int16)),
}


@pytest.mark.parametrize("make", VARLEN.values(), ids=VARLEN)
def test_sequences_are_asked_of_no_more_and_come_to_the_same(make: Callable[[], Any], asked: list[object]) -> None:
    check_quick(make, asked, attnswitch.attention_varlen)


def headed(layout: str = "BHLD", **said: Any) -> Any:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    if layout == "BLHD":
        query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    given = {"query": query, "key": key, "value": value, "sinks": torch.randn(4), "backend": BACKEND, "layout": layout}
    return given | said


HEADED: dict[str, Callable[[], Any]] = {
    "sinks": headed,
    "slopes": lambda: headed(sinks=None, alibi_slopes=torch.rand(4), return_lse=True),
    "turned": lambda: headed("BLHD", return_lse=True),
    "mask": lambda: headed(attn_mask=torch.randn(5, 9), is_causal=True),
    "lengths": lambda: headed(key_lengths=torch.randint(1, 9, (2,)), alibi_slopes=torch.rand(2, 4)),
}


@pytest.mark.parametrize("make", HEADED.values(), ids=HEADED)
def test_calls_with_sinks_are_asked_of_no_more(make: Callable[[], Any], asked: list[object]) -> None:
    check_quick(make, asked, attnswitch.attention)


# -- with gradients ----------------------------------------------------------------------------------------------------


def trained(given: dict[str, Any], *roles: str) -> dict[str, Any]:
    """The same, of which torch wants gradients."""
    for role in roles or ("query", "key", "value"):
        given[role].requires_grad_()
    return given


def sliced(**said: Any) -> Any:
    """Query, key and value are columns of one matrix, as one projection gives them."""
    query, key, value = torch.randn(11, 3, 4, 8).unbind(1)
    return alike_rows(query=query, key=key[:, :2], value=value[:, 2:]) | said


TRAINED: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "sequences": (attnswitch.attention_varlen, lambda: trained(rows(is_causal=True))),
    "sequences, lse": (attnswitch.attention_varlen, lambda: trained(alike_rows(return_lse=True))),
    "the value alone": (attnswitch.attention_varlen, lambda: trained(rows(), "value")),
    "of one projection": (attnswitch.attention_varlen, lambda: trained(sliced())),
    "sequences, slopes": (attnswitch.attention_varlen, lambda: trained(rows(alibi_slopes=torch.rand(3, 4)))),
    "sequences, sinks": (
        attnswitch.attention_varlen,
        lambda: trained(rows(sinks=torch.randn(4)), "query", "key", "value", "sinks"),
    ),
    "sinks alone": (attnswitch.attention_varlen, lambda: trained(rows(sinks=torch.randn(4)), "sinks")),
    "sinks that are given": (attnswitch.attention, lambda: trained(headed())),
    "sinks to convert": (
        attnswitch.attention,
        lambda: trained(headed(sinks=torch.randn(4, dtype=torch.float64)), "query", "sinks"),
    ),
    "turned": (
        attnswitch.attention,
        lambda: trained(headed("BLHD", return_lse=True), "query", "key", "value", "sinks"),
    ),
    "slopes": (attnswitch.attention, lambda: trained(headed(sinks=None, alibi_slopes=torch.rand(4)))),
    "lengths": (attnswitch.attention, lambda: trained(headed(key_lengths=torch.randint(1, 9, (2,))))),
    "a mask": (
        attnswitch.attention,
        lambda: trained(headed(attn_mask=torch.randn(5, 9)), "query", "key", "value", "attn_mask"),
    ),
}


def step(call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Results, and gradients of all that want one."""
    draw = torch.Generator().manual_seed(7)
    results = call(**given)
    wanted = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    several = results if isinstance(results, tuple) else (results,)
    into = [torch.randn(result.shape, generator=draw) for result in several]
    grads = torch.autograd.grad(several, wanted, into, retain_graph=True)
    return several, grads, torch.autograd.grad(several, wanted, into)


def operands_of(given: dict[str, Any]) -> list[torch.Tensor]:
    """Those whose gradients a kernel computes, which those of sinks are none of."""
    return [x for role, x in given.items() if isinstance(x, torch.Tensor) and role != "sinks"]


def steps_agree(one: Any, other: Any) -> None:
    """Bits, and shapes; results as they lie."""
    agree(one[0], other[0])
    for mine, right in zip((*one[1], *one[2]), (*other[1], *other[2]), strict=True):
        assert mine.shape == right.shape
        assert mine.dtype == right.dtype
        assert torch.equal(mine, right)


@pytest.mark.parametrize("name", TRAINED)
def test_steps_of_a_training_are_asked_of_no_more(name: str, asked: list[object]) -> None:
    """Forward and backward, and the backward once more. Layers of one step are alike: the second one is known again."""
    call, make = TRAINED[name]
    for turn in range(5):
        given = make()
        asked.clear()
        found = step(call, given)
        assert len(asked) == (turn < (1 if any(x.requires_grad for x in operands_of(given)) else 2)), turn
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alike, "knows_again", lambda _: False)
            steps_agree(found, step(call, given))


@pytest.mark.parametrize("name", TRAINED)
def test_a_forward_that_is_made_again_saves_the_same(name: str) -> None:
    """By a checkpoint, when its first one went the way of any call; what was known may be forgotten in between."""
    call, make = TRAINED[name]
    for turn in range(4):
        given = make()
        wanted = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = []
        for saved in (False, True):
            out = checkpoint(lambda: call(**given), use_reentrant=False) if saved else call(**given)  # noqa: B023
            if turn == 3:
                alike.forget()
            out = out[0] if isinstance(out, tuple) else out
            grads.append(torch.autograd.grad(out, wanted, out.detach() + 1))
            if turn == 1:
                alike.forget()
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("known", [False, True])
def test_gradients_of_sequences_are_copied_nowhere(known: bool) -> None:
    """On either way: torch's backward of an element makes zeros of the whole and copies into them."""
    call, given = attnswitch.attention_varlen, trained(alike_rows(return_lse=True))
    if not known:
        given["max_seqlen_q"] = None
    wanted = [given[role] for role in ("query", "key", "value")]
    for _ in range(2):
        results = call(**given)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.autograd.grad(results, wanted, [x.detach() for x in results])
    names = {event.key for event in seen.key_averages()}
    assert any("_AttentionBackward" in name for name in names)
    assert not {"aten::select_backward", "aten::copy_", "aten::clone", "aten::contiguous"} & names


def test_what_hooks_keep_may_lie_otherwise(asked: list[object]) -> None:
    """Offsets, sinks and slopes too."""
    for turn in range(3):
        given = trained(rows(sinks=torch.randn(4), alibi_slopes=torch.rand(3, 4), return_lse=True))
        found = step(attnswitch.attention_varlen, given)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, apart_again):
            again = step(attnswitch.attention_varlen, given)
        steps_agree(again, found)
        assert len(asked) == 1, turn


def apart_again(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in other memory, columns before rows, with gaps between."""
    turned = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    return turned.repeat_interleave(2, 0)[::2]


def test_who_asks_for_no_gradient_is_known_apart(asked: list[object]) -> None:
    """As an evaluation between two steps."""
    makes = [lambda: trained(rows()), rows, lambda: trained(rows(), "key")]
    for _ in range(2):
        for make in makes:
            attnswitch.attention_varlen(**make())
        with torch.no_grad():
            attnswitch.attention_varlen(**trained(rows()))
    attnswitch.attention_varlen(**makes[0]())  # whose sizes were new when it was met first
    asked.clear()
    for make in makes:
        found = attnswitch.attention_varlen(**make())
        assert found.requires_grad is any(x.requires_grad for x in list(make().values())[:3])
    with torch.no_grad():
        assert not attnswitch.attention_varlen(**trained(rows())).requires_grad
    assert not asked


def test_a_step_that_is_known_again_says_what_any_does(asked: list[object]) -> None:
    """Of what was written to before its backward, of second derivatives, and of tensors that hooks keep elsewhere."""
    for _ in range(3):
        attnswitch.attention_varlen(**trained(rows()))
    asked.clear()
    given = trained(rows())
    out = attnswitch.attention_varlen(**given)
    with torch.no_grad():
        given["cu_seqlens_q"].copy_(given["cu_seqlens_q"].clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    given = trained(rows())
    (first,) = torch.autograd.grad(attnswitch.attention_varlen(**given).sum(), given["query"], create_graph=True)
    with pytest.raises(attnswitch.Unsupported, match="double backward"):
        first.sum().backward()
    kept = rows()
    expected = step(attnswitch.attention_varlen, trained(dict(kept)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone().numpy(), torch.from_numpy):
        steps_agree(step(attnswitch.attention_varlen, trained(dict(kept))), expected)
    assert not asked


# -- where it gives way ------------------------------------------------------------------------------------------------


def aside(given: dict[str, Any], role: str, by: int) -> Any:
    """The same numbers, so many elements further on."""
    tensor = given[role]
    room = tensor.new_empty(tensor.numel() + by)[by:].view(tensor.shape)
    return given | {role: room.copy_(tensor)}


def apart(given: dict[str, Any], role: str) -> Any:
    """The same numbers with gaps between."""
    tensor = given[role]
    return given | {role: tensor.repeat_interleave(2, -1)[..., ::2]}


def tree(wide: int = 1) -> Any:
    return torch.randint(256, (2, 1, wide), dtype=torch.uint8)


UNLIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another batch": lambda _: decoding(batch=3),
    "more queries": lambda _: decoding(rows=2),
    "another column": lambda _: decoding(width=4),
    "more pages": lambda given: (
        given | {"value_cache": torch.randn(13, 16, 2, 8), "key_cache": torch.randn(13, 16, 2, 8)}
    ),
    "wider values": lambda given: given | {"value_cache": torch.randn(PAGES, PAGE, 2, 4)},
    "another type": lambda _: decoding(kind=torch.float64),
    "other integers": lambda given: given | {"block_table": given["block_table"].long()},
    "other lengths": lambda given: given | {"cache_lengths": given["cache_lengths"].long()},
    "a list of lengths": lambda given: given | {"cache_lengths": given["cache_lengths"].tolist()},
    "a list of pages": lambda given: given | {"block_table": given["block_table"].tolist()},
    "an array of NumPy": lambda given: given | {"cache_lengths": given["cache_lengths"].numpy()},
    "lengths apart": lambda given: apart(given, "cache_lengths"),
    "queries apart": lambda given: apart(given, "query"),
    "queries off": lambda given: aside(given, "query", 1),
    "keys off": lambda given: aside(given, "key_cache", 2),
    "lengths off": lambda given: aside(given, "cache_lengths", 1),
    "a table off": lambda given: aside(given, "block_table", 3),
    "sinks": lambda given: given | {"sinks": torch.randn(4)},
    "slopes": lambda given: given | {"alibi_slopes": torch.randn(4)},
    "a tree": lambda given: given | {"tree_mask": tree()},
    "splits": lambda given: given | {"num_splits": 2},
    "splits of no number": lambda given: given | {"num_splits": True},
    "a longest without offsets": lambda given: given | {"max_seqlen_q": 1},
    "an lse": lambda given: given | {"return_lse": True},
    "a scale": lambda given: given | {"scale": 0.3},
    "a window": lambda given: given | {"window": (3, 0)},
    "not causal": lambda given: given | {"is_causal": False},
    "deterministic": lambda given: given | {"deterministic": True},
    "another backend": lambda given: given | {"backend": "tiled"},
    "a backend of no name": lambda given: given | {"backend": ["tiled"]},
    "a policy": lambda given: given | {"policy": "estimate"},
    "no policy": lambda given: given | {"policy": "fastest"},
    "a scale of 16 bits": lambda given: given | {"key_scale": torch.ones(2)},
    "a scale that is a number": lambda given: given | {"value_scale": 1.0},
    "no table": lambda given: given | {"block_table": None},
    "no query": lambda given: given | {"query": None},
    "a sparse query": lambda given: given | {"query": given["query"].to_sparse()},
    "keys without memory": lambda given: given | {"key_cache": given["key_cache"].to("meta")},
    "no sequences": lambda _: decoding(batch=0),
    "no queries": lambda _: decoding(rows=0),
    "a gradient": lambda given: given | {"query": given["query"].requires_grad_()},
    "values that are the keys": lambda given: given | {"value_cache": given["key_cache"]},
    "wrong heads": lambda given: given | {"value_cache": torch.randn(PAGES, PAGE, 1, 8)},
}


@pytest.mark.parametrize(
    "change",
    ["values that are the keys", "queries off", "lengths off", "a list of lengths", "a scale of 16 bits", "no queries"],
)
def test_of_what_is_never_known_no_guards_are_made(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as a fifth of a call."""
    made: list[object] = []
    monkeypatch.setattr(torch_modes, "guards", made.append)
    for _ in range(4):
        outcome(lambda: attention_paged(**UNLIKE[change](decoding())))
    assert not made
    for _ in range(2):
        attention_paged(**decoding())
    assert made


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def alike_outcome(one: Any, other: Any) -> None:
    if isinstance(other, tuple) and isinstance(other[0], type):
        assert one == other
    else:
        agree(one, other)


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE)
def test_what_differs_goes_the_way_of_any_call(change: Callable[[dict[str, Any]], Any], asked: list[object]) -> None:
    """And what was known is known afterwards."""
    for _ in range(3):
        attention_paged(**decoding())
    for turn in range(3):
        given = change(decoding())
        asked.clear()
        found = outcome(lambda: attention_paged(**given))  # noqa: B023
        assert asked or turn or isinstance(found, tuple)
        alike_outcome(found, outcome(lambda: generally(attention_paged, given)))  # noqa: B023
    asked.clear()
    attention_paged(**decoding())
    assert not asked


ROWS_UNLIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a longest": lambda given: given | {"max_seqlen_k": 6},
    "a longest that is too small": lambda given: given | {"max_seqlen_q": 2},
    "a longest to be found": lambda given: given | {"max_seqlen_q": None},
    "a longest that is none": lambda given: given | {"max_seqlen_q": True},
    "a longest that is a tensor": lambda given: given | {"max_seqlen_q": torch.tensor(4)},
    "a list": lambda given: given | {"cu_seqlens_k": given["cu_seqlens_k"].tolist()},
    "keys left out": lambda given: given | {"cu_seqlens_k": None},
    "keys that begin as queries": lambda given: given | {"cu_seqlens_k": given["cu_seqlens_q"]},
    "a seed": lambda given: given | {"seed": 3},
    "dropout": lambda given: given | {"dropout_p": 0.5, "seed": 3},
    "dropout with gradients": lambda given: given | {"dropout_p": 0.5, "value": given["value"].requires_grad_()},
    "a gradient of slopes": lambda given: given | {"alibi_slopes": torch.rand(4, requires_grad=True)},
}


@pytest.mark.parametrize("change", ROWS_UNLIKE.values(), ids=ROWS_UNLIKE)
def test_sequences_that_differ_go_the_way_of_any(change: Callable[[dict[str, Any]], Any], asked: list[object]) -> None:
    for _ in range(3):
        attnswitch.attention_varlen(**rows())
    for _ in range(3):
        given = change(rows())
        asked.clear()
        found = outcome(lambda: attnswitch.attention_varlen(**given))  # noqa: B023
        known = given.get("max_seqlen_k") == 6 or given["cu_seqlens_k"] is given["cu_seqlens_q"]
        assert asked or known
        alike_outcome(found, outcome(lambda: generally(attnswitch.attention_varlen, given)))  # noqa: B023


def test_sizes_that_take_turns_are_known(asked: list[object]) -> None:
    """Layers of two caches, the steps of a prompt and of decoding, and types of one size."""
    calls = [
        decoding,
        packed,
        lambda: decoding(batch=3),
        lambda: decoding(kind=torch.float64),
        lambda: decoding(kind=torch.bfloat16),
        lambda: decoding(sinks=torch.randn(4)),
        lambda: decoding(width=4),
    ]
    for _ in range(2):
        for make in calls:
            attention_paged(**make())
    attention_paged(**decoding())  # whose sizes were new when it was met first
    asked.clear()
    for _ in range(3):
        for make in calls:
            given = make()
            agree(attention_paged(**given), generally(attention_paged, given))
    assert len(asked) == 3 * len(calls)  # those of ``generally``


def test_a_table_that_grows_is_met_anew_and_known_again(asked: list[object]) -> None:
    counts = []
    for width in (3, 3, 3, 4, 4, 4, 3, 4):
        asked.clear()
        attention_paged(**decoding(width=width))
        counts.append(len(asked))
    assert counts == [1, 1, 0, 1, 1, 0, 0, 0]


def test_lengths_and_pages_are_each_call_s_own() -> None:
    """The same tensors with other numbers, as a server has them at every token."""
    given = decoding()
    for _ in range(5):
        given["cache_lengths"] += 1
        given["block_table"].copy_(given["block_table"].roll(1))
        given["cache_lengths"].clamp_(max=48)
        agree(attention_paged(**given), generally(attention_paged, given))


# -- what the context says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_modes_of_torch_are_known_apart(mode: Callable[[], Any], asked: list[object]) -> None:
    for _ in range(3):
        attention_paged(**decoding())
    for turn in range(4):
        with mode():
            given = decoding()
            asked.clear()
            found = attention_paged(**given)
            assert len(asked) == (turn < 2)
            agree(found, generally(attention_paged, given))
    asked.clear()
    attention_paged(**decoding())
    assert not asked


def test_gradients_are_refused_where_they_are_asked_for() -> None:
    given = decoding()
    given["query"].requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            attention_paged(**given)
        with pytest.raises(InvalidProblem, match="requires a gradient"):
            attention_paged(**given)


def test_what_looks_at_calls_is_asked_first() -> None:
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        attention_paged(**decoding())
    given = decoding()
    with Mode():
        found = attention_paged(**given)
    assert torch.ops.attnswitch.attention_paged.default in seen
    agree(found, generally(attention_paged, given))
    with pytest.raises(attnswitch.AttnswitchError, match=r"torch\.func|vmap|transform"):
        torch.vmap(lambda query: attention_paged(**(given | {"query": query})))(given["query"][None])


def test_a_policy_of_the_context_counts(asked: list[object]) -> None:
    for _ in range(3):
        attention_paged(**decoding())
    for turn in range(4):
        asked.clear()
        with attnswitch.using(attnswitch.Policy.MEASURE):
            attention_paged(**decoding())
        assert len(asked) == (turn < 2)


def test_a_look_at_numbers_is_taken_where_it_is_asked_for(asked: list[object]) -> None:
    for _ in range(3):
        attention_paged(**decoding())
    with finite.checking("always"):
        for _ in range(3):
            asked.clear()
            attention_paged(**decoding())
            assert asked


def test_wisdom_that_changes_ends_it(asked: list[object]) -> None:
    for _ in range(3):
        attention_paged(**decoding())
    asked.clear()
    view.changed()
    attention_paged(**decoding())
    assert len(asked) == 1


def test_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with attnswitch.record() as recorded:
        for _ in range(5):
            attention_paged(**decoding())
    assert list(recorded.problems.values()) == [5]
    whole = recording.Recording()
    monkeypatch.setattr(recording, "whole_process", lambda: whole)
    alike.forget()
    for _ in range(5):
        attention_paged(**decoding())
    with recording.paused():
        attention_paged(**decoding())
    assert list(whole.problems.values()) == [5]


def test_no_tensor_is_kept(asked: list[object]) -> None:
    for _ in range(3):
        given = decoding(sinks=torch.randn(4, dtype=torch.bfloat16))
        kept = [weakref.ref(x) for x in given.values() if isinstance(x, torch.Tensor)]
        attention_paged(**given)
        asked.clear()  # which has them
        del given
        assert not any(ref() is not None for ref in kept)


def test_tensors_of_the_processor_are_looked_at(monkeypatch: pytest.MonkeyPatch, asked: list[object]) -> None:
    monkeypatch.undo()
    for _ in range(3):
        attention_paged(**decoding())
    with pytest.raises(InvalidProblem, match="cache_lengths holds 99"):
        attention_paged(**decoding(cache_lengths=torch.tensor([99, 1])))
    assert not alike._ways


def test_those_that_are_met_seldom_are_forgotten(monkeypatch: pytest.MonkeyPatch, asked: list[object]) -> None:
    monkeypatch.setattr(alike, "_MOST", 2)
    for width in (1, 2, 3):
        attention_paged(**decoding(width=width))
    assert len(alike._ways) == 1
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    monkeypatch.setattr(alike, "_LIES", 2)
    for _ in range(2):
        for kind in kinds:
            attention_paged(**decoding(kind=kind))
    assert [len(ways) for ways in alike._ways.values()] == [2]


def test_a_call_that_could_not_be_measured_is_not_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def later(*given: object) -> bool:  # as while a graph is captured
        asked.append(given)
        return False

    monkeypatch.setattr(forms, "at_sight", later)
    for _ in range(4):
        attention_paged(**decoding(), policy="measure")
    assert len(asked) == 4
