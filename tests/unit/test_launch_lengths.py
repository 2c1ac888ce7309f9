"""Prepared calls with key lengths and seeds: each call's own, checked as ever, through one launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem
from attnswitch.call import attend
from attnswitch.machine.backend import Backend, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

#: Inputs of each forward and backward of ``Own``.
ran: list[tuple[str, Inputs]] = []


class _Kernel(Kernel):
    """Attention in torch, with a backward of its own; the seed is what the output is raised by."""

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        ran.append(("forward", inputs))
        with torch.no_grad():
            weights, scores = _weights(inputs)
            out = weights @ inputs.value
            return (out if inputs.seed is None else out + inputs.seed), scores.logsumexp(-1)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        ran.append(("backward", inputs))
        weights, _ = _weights(inputs)
        return Gradients(None, None, weights.mT @ grad_out, None)


def _weights(inputs: Inputs) -> tuple[Any, Any]:
    scores = inputs.query @ inputs.key.mT * inputs.query.shape[3] ** -0.5
    if inputs.key_lengths is not None:
        past = torch.arange(inputs.key.shape[2]) >= inputs.key_lengths[:, None, None, None]
        scores = scores.masked_fill(past, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0), scores


class Own(Backend):
    """Of torch, without autograd; its dropout mask is a function of a seed."""

    name = f"{__name__}:Own"
    library = "torch"
    libraries = ("torch",)
    wants_seed = True

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from ()

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return _Kernel()


OWN = Own.name


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ran.clear()
    attend.forget()
    yield
    attend.forget()


def operands(grad: bool = False) -> list[torch.Tensor]:
    query, key, value = (torch.randn(3, 2, 8, 4) for _ in range(3))
    return [query, key, value.requires_grad_(grad)]


def expected(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return _weights(Inputs(q, k, v, key_lengths=torch.as_tensor(lengths)))[0] @ v


@pytest.mark.parametrize("backend", [OWN, "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_each_call_has_its_own_lengths(backend: str, layout: str) -> None:
    q, k, v = operands()
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)] if layout == "BLHD" else [q, k, v]
    for kind in (torch.int32, torch.int64, torch.uint8):
        for turn in range(4):
            for lengths in (
                torch.tensor([8, turn, 1 + turn], dtype=kind),
                torch.tensor([8, 0, turn, 0, 1 + turn, 0], dtype=kind)[::2],
                [8, turn, 1 + turn],
            ):
                out = attnswitch.attention(*given, key_lengths=lengths, layout=layout, backend=backend)
                out = out.transpose(1, 2) if layout == "BLHD" else out
                torch.testing.assert_close(out, expected(q, k, v, lengths))


@pytest.mark.parametrize("backend", [OWN, "sdpa-flash"])
def test_lengths_are_checked_at_every_call(backend: str) -> None:
    q, k, v = operands()
    for _ in range(3):
        attnswitch.attention(q, k, v, key_lengths=torch.tensor([8, 4, 2]), backend=backend)
    for wrong, why in (
        (torch.tensor([8, 4, 9]), "key_lengths holds 9"),
        (torch.tensor([8, 4]), "key_lengths has shape"),
        (torch.tensor([8.0, 4.0, 2.0]), "key_lengths has dtype"),
        ([8, 4, -1], "key_lengths holds -1"),
        ([8, 4], "shape|expected 3"),
    ):
        with pytest.raises(InvalidProblem, match=why):
            attnswitch.attention(q, k, v, key_lengths=wrong, backend=backend)


def test_a_graph_keeps_the_lengths_of_its_call() -> None:
    q, k, v = operands(grad=True)
    first, second = torch.tensor([8, 4, 2]), torch.tensor([1, 2, 3])
    for _ in range(2):
        total = sum(attnswitch.attention(q, k, v, key_lengths=n, backend=OWN).sum() for n in (first, second))
        (grad,) = torch.autograd.grad(total, [v])
        wanted = sum(expected(q, k, v, n).sum() for n in (first, second))
        torch.testing.assert_close(grad, torch.autograd.grad(wanted, [v])[0])


def test_lengths_that_changed_before_backward_are_an_error() -> None:
    q, k, v = operands(grad=True)
    lengths = torch.tensor([8, 4, 2])
    for _ in range(2):
        out = attnswitch.attention(q, k, v, key_lengths=lengths, backend=OWN)
    lengths[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_a_seed_is_each_call_s_own(grad: bool) -> None:
    q, k, v = operands(grad)
    for seed in (3, 4, 5, 2**63 + 1):
        attnswitch.attention(q, k, v, dropout_p=0.5, seed=seed, backend=OWN)
    assert [inputs.seed for _, inputs in ran] == [3, 4, 5, 2**63 + 1]
    ran.clear()
    torch.manual_seed(0)
    outs = [attnswitch.attention(q, k, v, dropout_p=0.5, backend=OWN) for _ in range(3)]
    drawn = [inputs.seed for _, inputs in ran]
    assert len(set(drawn)) == 3
    torch.manual_seed(0)
    ran.clear()
    outs = [attnswitch.attention(q, k, v, dropout_p=0.5, backend=OWN) for _ in range(3)]
    assert [inputs.seed for _, inputs in ran] == drawn
    if grad:
        ran.clear()
        sum(out.sum() for out in reversed(outs)).backward()
        assert sorted(inputs.seed or 0 for _, inputs in ran) == sorted(n or 0 for n in drawn)


def test_a_seed_without_dropout_is_not_passed_on() -> None:
    q, k, v = operands()
    for lengths in (None, torch.tensor([8, 4, 2])):
        for seed in (3, 4):
            attnswitch.attention(q, k, v, seed=seed, key_lengths=lengths, backend=OWN)
    assert [inputs.seed for _, inputs in ran] == [None] * 4
