"""Operands and gradients of torch's fused kernels, made fit for them."""

from __future__ import annotations

import importlib

import pytest
import torch

import attnswitch

hooks = importlib.import_module("attnswitch.backends.sdpa.hooks")


def output(leaf: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = hooks.with_aligned_gradient(leaf * 2)
    return made


def aside(size: int) -> torch.Tensor:
    """Not at a multiple of 16."""
    return torch.arange(size + 1, dtype=torch.float32)[1:]


def test_an_upstream_gradient_is_aligned() -> None:
    leaf, seen = torch.randn(8, requires_grad=True), []
    out = output(leaf)
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    upstream = aside(8)
    assert upstream.data_ptr() % 16
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    assert seen[0].data_ptr() % 16 == 0
    assert torch.equal(seen[0], upstream)
    assert torch.equal(grad, 2 * upstream)


@pytest.mark.parametrize(
    ("shape", "steps", "as_it_is"),
    [
        ((2, 3, 5, 8), (120, 40, 8, 1), True),
        ((2, 3, 5, 4), (60, 20, 4, 1), True),
        ((2, 3, 5, 8), (120, 8, 24, 1), True),  # heads inside
        ((2, 3, 5, 8), (0, 0, 0, 0), False),  # of a sum
        ((2, 3, 5, 8), (120, 1, 3, 15), False),
        ((1, 3, 5, 8), (3, 40, 8, 1), False),  # the kernels look at strides of axes of length 1
    ],
)
def test_an_aligned_gradient_is_passed_on_as_it_is(
    shape: tuple[int, ...], steps: tuple[int, ...], as_it_is: bool
) -> None:
    leaf, seen = torch.randn(shape, requires_grad=True), []
    out = output(leaf)
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    upstream = torch.randn(1000).as_strided(shape, steps)
    torch.autograd.grad(out, leaf, upstream)
    assert (seen[0].data_ptr() == upstream.data_ptr()) is as_it_is
    assert torch.equal(seen[0], upstream)
    assert all(step % 4 == 0 for step in seen[0].stride()[:-1])
    assert seen[0].stride(-1) == 1


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_of_the_caller_come_after_and_go_alone(removed: bool) -> None:
    leaf, seen = torch.randn(8, requires_grad=True), []
    out = output(leaf)

    def tripled(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.data_ptr() % 16)
        return 3 * grad

    handle = out.register_hook(tripled)  # type: ignore[no-untyped-call]
    if removed:
        handle.remove()
    (grad,) = torch.autograd.grad(out, leaf, aside(8))
    assert seen == ([] if removed else [0])
    assert torch.equal(grad, (2 if removed else 6) * aside(8))


def test_outputs_have_hooks_of_their_own() -> None:
    leaf = torch.randn(8, requires_grad=True)
    first, second = output(leaf), output(leaf)
    first.register_hook(lambda grad: 3 * grad)  # type: ignore[no-untyped-call]
    (grad,) = torch.autograd.grad(second, leaf, torch.ones(8))
    assert torch.equal(grad, torch.full((8,), 2.0))


def test_it_holds_for_what_is_written_over_the_output() -> None:
    leaf = torch.randn(8, requires_grad=True)
    out = output(leaf).mul_(3)
    (grad,) = torch.autograd.grad(out, leaf, aside(8))
    assert torch.equal(grad, 6 * aside(8))


@pytest.mark.parametrize("grads", [False, True])
def test_an_output_shows_no_hooks_but_the_callers(grads: bool) -> None:
    assert output(torch.randn(8, requires_grad=grads))._backward_hooks is None


@pytest.mark.parametrize(
    ("shape", "steps"),
    [((3, 1, 3, 8), (1, 30, 10, 1)), ((1, 3, 3, 8), (30, 1, 10, 1)), ((3, 2, 3, 8), (2, 60, 10, 1))],
)
def test_an_axis_within_rows_leaves_no_output_unwritten(shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
    """As windows of a sequence overlap: torch's CPU kernel lays out its output alike, and writes part of it."""
    memory = torch.arange(400, dtype=torch.float32).sin()
    overlapping = memory.as_strided(shape, steps)
    for _ in range(3):
        found = attnswitch.attention(overlapping, overlapping, overlapping, backend="sdpa-flash")
        dense = overlapping.contiguous()
        torch.testing.assert_close(found, attnswitch.attention(dense, dense, dense, backend="reference"))
