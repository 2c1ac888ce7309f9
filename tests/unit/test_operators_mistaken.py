"""What a graph would take for something else is refused, and an error leaves later calls as they were."""

# mypy: disable-error-code="arg-type, misc, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import convert_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attnswitch
from attnswitch.errors import InvalidProblem, Unsupported

X = torch.arange(80, dtype=torch.float32).sin().reshape(1, 2, 5, 8)
ROWS = X[0].transpose(0, 1)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (attnswitch.attention, (X, X, X)),
    "varlen": (attnswitch.attention_varlen, (ROWS, ROWS, ROWS, torch.tensor([0, 2, 5]))),
    "backward": (attnswitch.attention_backward, (X, X, X, X)),
    "sdpa": (attnswitch.scaled_dot_product_attention, (X, X, X)),
}
NUMBER = torch.tensor(0.5)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *(("is_causal", 1), ("enable_gqa", 0), ("return_lse", 1), ("deterministic", 1)),
        *(("is_causal", 0.5), ("is_causal", None), ("return_lse", None), ("deterministic", None)),
        *(("scale", True), ("softcap", True), ("dropout_p", False), ("seed", True)),
        *(("seed", -1), ("seed", 2**64), ("window", (True, 1))),
        *(("scale", "x"), ("softcap", None), ("dropout_p", "x"), ("seed", 1.5), ("seed", "x"), ("is_causal", "yes")),
        *(("window", 3), ("window", (1,)), ("window", ("a", 1)), ("backend", 3), ("causal_alignment", "up")),
        *(("causal_alignment", 3), ("enable_gqa", "x")),
    ],
)
@pytest.mark.parametrize("name", ["attention", "varlen"])
def test_what_is_refused_without_a_graph_is_refused_in_one(name: str, keyword: str, value: Any) -> None:
    function, given = CALLS[name]
    for one in (function, torch.compile(function, backend="eager")):
        with pytest.raises(InvalidProblem, match=re.escape(f"{keyword}={value!r}: expected ")):
            one(*given, **{"dropout_p": 0.5, keyword: value})


@pytest.mark.parametrize(
    ("keyword", "value"), [("layout", "BHDL"), ("layout", 3), ("key_lengths", "x"), ("key_lengths", [1, "a"])]
)
def test_so_is_what_sequences_one_after_another_do_not_have(keyword: str, value: Any) -> None:
    for one in (attnswitch.attention, torch.compile(attnswitch.attention, backend="eager")):
        with pytest.raises(InvalidProblem, match=re.escape(f"{keyword}={value!r}: expected ")):
            one(X, X, X, **{keyword: value})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"layout": "BHDL"}, "layout='BHDL': expected one of BHLD, BLHD"),
        ({"window": (np.int64(3), None)}, "window is a tensor, whose number is not known in a graph"),
    ],
)
def test_a_graph_that_must_be_whole_says_why_it_is_not(said: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(attnswitch.attention, fullgraph=True, backend="eager")(X, X, X, **said)


@pytest.mark.parametrize("keyword", ["scale", "softcap", "dropout_p"])
def test_numpys_float64_is_a_number_in_a_graph(keyword: str) -> None:
    """As ``1 / np.sqrt(dim)`` is one."""
    compiled = torch.compile(attnswitch.attention, fullgraph=True, backend="eager")
    for value in (0.5, 0.25):
        query, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
        found = compiled(query, X, X, seed=3, **{keyword: np.float64(value)})
        torch.testing.assert_close(found, attnswitch.attention(expected, X, X, seed=3, **{keyword: value}))
        found.sum().backward()
        attnswitch.attention(expected, X, X, seed=3, **{keyword: value}).sum().backward()
        torch.testing.assert_close(query.grad, expected.grad)


@pytest.mark.parametrize(("keyword", "value"), [("scale", NUMBER), ("scale", np.float32(0.5)), ("softcap", NUMBER)])
def test_a_number_in_a_tensor_is_read_beside_graphs(keyword: str, value: Any) -> None:
    expected = attnswitch.attention(X, X, X, **{keyword: 0.5})
    with pytest.raises(Exception, match=f"{keyword} is a tensor, whose number is not known in a graph"):
        torch.compile(attnswitch.attention, fullgraph=True, backend="eager")(X, X, X, **{keyword: value})
    compiled = torch.compile(attnswitch.attention, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X, X, X, **{keyword: value}), expected)


@pytest.mark.parametrize("value", [NUMBER, np.float32(0.5)])
def test_a_number_in_a_tensor_is_read_under_transforms(value: Any) -> None:
    expected = attnswitch.attention(X, X, X, scale=0.5)

    def call(x: Any) -> Any:
        return attnswitch.attention(x, X, X, scale=value)

    torch.testing.assert_close(torch.vmap(call)(X[None])[0], expected)
    torch.testing.assert_close(make_fx(call)(X)(X), expected)


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_errors_are_right_and_compile_nothing_within(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile leaves a function that raised out of its graphs, and looks into what it calls, level by level."""
    function, given = CALLS[name]
    compiled, files = torch.compile(function, backend="eager"), set[str]()
    compile_frame = convert_frame._compile

    def noted(code: Any, *rest: Any, **said: Any) -> Any:
        files.add(code.co_filename)
        return compile_frame(code, *rest, **said)

    for _ in range(12):
        with pytest.raises(InvalidProblem, match="is_causal=1"):
            compiled(*given, is_causal=1)
    monkeypatch.setattr(convert_frame, "_compile", noted)
    torch.compile(lambda x: x + 1, backend="eager")(X)
    assert files == {__file__}
    found, expected = (one(*given, is_causal=True, scale=0.75) for one in (compiled, function))
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert not [file for file in files if "/planning/" in file or "/machine/" in file or "/backends/" in file]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_arrays_of_numpy_come_back_as_such(fullgraph: bool) -> None:
    array = X.numpy()
    compiled = torch.compile(attnswitch.attention, fullgraph=fullgraph, backend="eager")
    for said in ({}, {"return_lse": True, "is_causal": True}):
        found, expected = (one(array, array, array, **said) for one in (compiled, attnswitch.attention))
        assert {type(x) for x in (found if said else [found])} == {np.ndarray}
        torch.testing.assert_close(found, expected)


def test_lengths_may_lie_on_the_cpu_in_a_graph_too() -> None:
    lengths = torch.tensor([3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 2, 5, 8, device="cuda")
        out = attnswitch.attention(x, x, x, key_lengths=lengths)
        assert (out.device.type, out.shape) == ("cuda", x.shape)


@pytest.mark.parametrize("lse", [False, True])
def test_many_gradients_at_once_are_refused_by_kernels_that_read_one(lse: bool) -> None:
    q = X.clone().requires_grad_()
    results = attnswitch.attention(q, X, X, return_lse=True, backend="tiled")
    many = torch.ones(3, *results[lse].shape)
    with pytest.raises(Unsupported, match=r"is_grads_batched: .*torch\.func\.vmap"):
        torch.autograd.grad(results[lse], q, many, is_grads_batched=True)


def test_gradients_with_one_replaced_keep_that_of_sinks() -> None:
    found: Any = attnswitch.attention_backward(X, X, X, X, sinks=torch.zeros(2), sinks_grad=True)
    replaced = found._replace(query=None)
    assert replaced.query is None
    assert replaced.key is found.key
    assert replaced.sinks is found.sinks
    assert found._replace(sinks=X).sinks is X
