"""Calls of operators that are like the one before: past torch's dispatcher, and only where nothing looks at them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnswitch
import attnswitch.call.operators  # defines them
from attnswitch.call.finite import checking

sdpa: Any = torch.nn.functional.scaled_dot_product_attention
FORWARD, BACKWARD = torch.ops.attnswitch.attention_forward.default, torch.ops.attnswitch.attention_backward.default
SAID = {"is_causal": True, "grads": "qkv", "backend": "sdpa-flash"}


def operands(length: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(length)
    query, *others = (torch.randn(2, length, heads, 32, generator=draw).to(dtype) for heads in (4, 2, 2))
    return tuple(x.swapaxes(1, 2) for x in (query, *others))


def forward(*given: Any, mask: Any = None, **said: Any) -> Any:
    return FORWARD(*given, mask, None, None, **{**SAID, **said})


@pytest.fixture
def dispatched(entered: Any) -> Callable[[Callable[[], Any]], bool]:
    """Whether torch's dispatcher takes a call to the operator's kernel."""
    return lambda call: ("attnswitch.call.operators.run", "runs") in entered(call)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Calls that came often enough."""
    with torch.no_grad():
        for _ in range(4):
            out, lse, state = forward(*operands())
            BACKWARD(torch.ones_like(out), None, *operands(), None, None, None, out, lse, state, **SAID)
        yield


def test_calls_that_are_alike_are_made_at_once(dispatched: Any) -> None:
    assert not dispatched(lambda: forward(*operands()))
    out, lse, state = forward(*operands())
    upstream = torch.randn_like(out)
    given = upstream, None, *operands(), None, None, None, out, lse, state
    assert not dispatched(lambda: BACKWARD(*given, **SAID))


def test_they_return_what_torch_would() -> None:
    fresh = [torch.rand_like(x) for x in operands()]
    out, lse, state = forward(*fresh)
    upstream = torch.rand_like(out)
    found = BACKWARD(upstream, None, *fresh, None, None, None, out, lse, state, **SAID)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in fresh]
        expected = sdpa(*leaves, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(out, expected.detach())
    for one, other, operand in zip(found, grads, fresh, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == operand.stride()


@pytest.mark.parametrize(
    "given",
    [operands(17), tuple(x.contiguous() for x in operands()), operands(dtype=torch.float64)],
    ids=["length", "strides", "dtype"],
)
def test_others_are_torchs(given: Any, dispatched: Any) -> None:
    assert dispatched(lambda: forward(*given))
    torch.testing.assert_close(
        forward(*given)[0],
        sdpa(*given, is_causal=True, enable_gqa=True),
    )


def test_other_options_are_others(dispatched: Any) -> None:
    assert dispatched(lambda: forward(*operands(), scale=0.5))
    assert dispatched(lambda: forward(*operands(), window=[3, 0], backend=None))
    assert dispatched(lambda: forward(*operands(), mask=torch.ones(16, 16, dtype=torch.bool), is_causal=False))


def test_results_of_another_type_are_converted_every_time(dispatched: Any) -> None:
    out, lse, state = forward(*operands())
    given = torch.ones_like(out), None, *operands(), None, None, None, out, lse.double(), state
    expected = BACKWARD(*given[:9], lse, state, **SAID)
    for _ in range(4):
        assert dispatched(lambda: BACKWARD(*given, **SAID))
    for one, other in zip(BACKWARD(*given, **SAID), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_window_in_a_list_comes_again() -> None:
    def windowed() -> Any:
        return forward(*operands(), window=[3, 0], backend="tiled")

    for _ in range(4):
        out, *_ = windowed()
    assert torch.equal(windowed()[0], out)


def test_gradients_are_torchs(dispatched: Any) -> None:
    given = operands()
    with torch.enable_grad():
        leaves = tuple(x.requires_grad_() for x in given)
        assert dispatched(lambda: forward(*leaves))
        assert forward(*leaves)[0].requires_grad


def test_gradients_are_torchs_also_where_they_were_not_asked_for_before(dispatched: Any) -> None:
    leaves = tuple(x.requires_grad_() for x in operands(24))
    for _ in range(4):
        forward(*leaves)
    assert not dispatched(lambda: forward(*leaves))
    with torch.enable_grad():
        assert dispatched(lambda: forward(*leaves))
        assert "attnswitch" in type(forward(*leaves)[0].grad_fn).__name__


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_has_no_sizes_is_torchs(at: int) -> None:
    given = list(operands())
    given[at] = torch.nested.nested_tensor(list(given[at]))
    with pytest.raises(Exception, match=r"(?i)nested"):
        forward(*given)


@pytest.mark.parametrize(
    "looking",
    [
        lambda: torch.profiler.profile(acc_events=True),  # torch 2.11 warns otherwise
        lambda: attnswitch.record(),
        lambda: checking("always"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["profiler", "recording", "checking", "autocast"],
)
def test_what_looks_at_calls_sees_them(
    looking: Callable[[], contextlib.AbstractContextManager[Any]], dispatched: Any
) -> None:
    with looking():
        assert dispatched(lambda: forward(*operands()))
    assert not dispatched(lambda: forward(*operands()))


def test_modes_and_transforms_see_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        forward(*operands())
    assert counter.get_total_flops() > 0
    with FakeTensorMode() as mode:
        assert forward(*(mode.from_tensor(x) for x in operands()))[0].shape == (2, 4, 16, 32)


def test_operands_that_require_gradients_are_known_after_others_that_did_not(dispatched: Any) -> None:
    leaves = tuple(x.requires_grad_() for x in operands())
    for _ in range(4):
        forward(*leaves)
    assert not dispatched(lambda: forward(*leaves))


def test_recorded_problems_are_counted() -> None:
    with attnswitch.record() as recording:
        for _ in range(3):
            forward(*operands())
    assert sum(recording.problems.values()) == 3


def test_nan_is_looked_for() -> None:
    query, key, value = operands()
    with checking("always"):
        clean = [forward(query, key, value, backend=None)[0] for _ in range(4)][-1]
        key[0, 0, -1] = float("nan")
        out = forward(query, key, value, backend=None)[0]
    torch.testing.assert_close(out[0, :2, :-1], clean[0, :2, :-1])


def test_compiled_training_makes_its_calls_at_once(dispatched: Any) -> None:
    linear = torch.nn.Linear(32, 32)

    @torch.compile(fullgraph=True)
    def loss(query: Any, key: Any, value: Any) -> Any:
        return attnswitch.attention(linear(query), key, value, is_causal=True, backend="sdpa-flash").sum()

    with torch.enable_grad():
        leaves = tuple(x.requires_grad_() for x in operands())
        for _ in range(4):
            loss(*leaves).backward()
        value = loss(*leaves)
        assert not dispatched(lambda: loss(*leaves))
        assert not dispatched(value.backward)
