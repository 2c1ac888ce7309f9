"""``Kernel.backward`` uses the output and lse that it is given: parts of the keys have gradients that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnswitch import Problem, Unsupported
from attnswitch.machine import divergences, registry
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

CPU = Device.of("cpu", 0)
BACKENDS = ("sdpa-flash", "sdpa-math", "tiled", "reference")
KEYS, CUT = 23, 9
MASKS = ("", ".mask=bool:bqk", ".mask=fp64:hqk", ".mask=fp64:bhqk")


def kernel_of(name: str, problem: Problem) -> Any:
    backend = registry.loaded(name)
    assert not backend.supports(problem, CPU)
    for reason in divergences.refused(backend, problem, CPU):  # of another torch: it may end the process
        pytest.skip(reason)
    return backend.compile(problem, CPU, next(iter(backend.configs(problem, CPU))))


def drawn(mask: str) -> tuple[list[Any], Any]:
    """Query, key, value, mask and upstream gradient; of the first rows some see nothing in one part, or at all."""
    rng = np.random.default_rng(len(mask))
    query, upstream = rng.standard_normal((2, 2, 4, 5, 8))
    key, value = rng.standard_normal((2, 2, 2, KEYS, 8))
    problem = Problem.parse(f"b2.h4/2.s5x{KEYS}.d8.fp64{mask}")
    hiding: Any = None
    if problem.mask_shape:
        hiding = rng.random(problem.mask_shape) < 0.7
        hiding[0, 0, 0, :CUT], hiding[0, 0, 1, CUT:], hiding[0, 0, 2] = False, False, False
        if "fp64" in mask:
            hiding = np.where(hiding, rng.standard_normal(hiding.shape), -np.inf)
    return [query, key, value, hiding], upstream


def part_of(operands: list[Any], keys: slice) -> list[Any]:
    query, key, value, mask = operands
    return [query, key[:, :, keys], value[:, :, keys], None if mask is None else mask[..., keys]]


def inputs(name: str, operands: list[Any]) -> Inputs:
    if registry.loaded(name).library == "numpy":
        return Inputs(*operands)
    query, key, value, mask = (None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for x in operands)
    return Inputs(query, key, value, mask)


def back(name: str, text: str, operands: list[Any], *given: Any) -> list[Any]:
    """Gradients as NumPy's."""
    kernel = kernel_of(name, Problem.parse(text))
    numpy = registry.loaded(name).library == "numpy"
    out, lse, upstream = (x if numpy else torch.from_numpy(np.ascontiguousarray(x)) for x in given)
    grads = kernel.backward(inputs(name, operands), out, lse, upstream, None)
    return [None if x is None else np.asarray(x) for x in grads]


def whole(operands: list[Any], mask: str) -> tuple[Any, Any]:
    """Output and lse of two parts, put together."""
    parts = []
    for keys in (slice(CUT), slice(CUT, None)):
        size = len(range(KEYS)[keys])
        kernel = kernel_of("reference", Problem.parse(f"b2.h4/2.s5x{size}.d8.fp64.lse{mask}"))
        parts.append(kernel.forward(Inputs(*part_of(operands, keys))))
    (one, first), (other, second) = parts
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp(first, second)
        shares = [np.nan_to_num(np.exp(x - lse))[..., None] for x in (first, second)]
    return one * shares[0] + other * shares[1], lse


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_parts_add_up(name: str, mask: str) -> None:
    operands, upstream = drawn(mask)
    out, lse = whole(operands, mask)
    letters = "qkvm" if "fp64" in mask and name != "sdpa-flash" else "qkv"
    kernel = kernel_of("reference", Problem.parse(f"b2.h4/2.s5x{KEYS}.d8.fp64{mask}.grad={letters}"))
    wanted = kernel.backward(Inputs(*operands), None, None, upstream, None)
    parts = []
    for keys in (slice(CUT), slice(CUT, None)):
        text = f"b2.h4/2.s5x{len(range(KEYS)[keys])}.d8.fp64{mask}.grad={letters}"
        parts.append(back(name, text, part_of(operands, keys), out, lse, upstream))
    (dq, dk, dv, dm), (eq, ek, ev, em) = parts
    mask_gradient = None if dm is None else np.concatenate((dm, em), -1)
    got = dq + eq, np.concatenate((dk, ek), 2), np.concatenate((dv, ev), 2), mask_gradient
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mask", ["", ".causal", ".mask=bool:bqk", ".mask=fp64:hqk", ".window=3,1", ".causal-br"])
def test_the_whole_is_a_part_like_others(name: str, mask: str) -> None:
    operands, upstream = drawn(mask if "mask" in mask else "")
    text = f"b2.h4/2.s5x{KEYS}.d8.fp64{mask}"
    out, lse = kernel_of("reference", Problem.parse(f"{text}.lse")).forward(Inputs(*operands))
    wanted = back("reference", f"{text}.grad", operands, out, lse, upstream)
    for one, other in zip(back(name, f"{text}.grad", operands, out, lse, upstream), wanted, strict=True):
        assert one is other is None or np.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_lse_without_digits_for_the_sum_is_renewed(name: str) -> None:
    """-1e9 throughout: in float32 lse is -1e9, as if each key had all the weight."""
    query, key, value, upstream = np.random.default_rng(1).standard_normal((4, 1, 2, 6, 8), dtype=np.float32)
    operands = [query, key, value, np.full((1, 2, 6, 6), -1e9, np.float32)]
    text = "b1.h2.s6.d8.fp32.mask=fp32:hqk"
    with np.errstate(all="ignore"):
        # What is added leaves no digits of the scores either: the weights are equal.
        out = np.broadcast_to(value.mean(2, keepdims=True), value.shape)
        lse = np.full((1, 2, 6), -1e9, np.float32)
    *_, dv, _ = back(name, f"{text}.grad", operands, out, lse, upstream)
    assert dv.sum() == pytest.approx(upstream.sum(), abs=1e-3)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-math"])
def test_a_gradient_of_lse_is_refused(name: str) -> None:
    operands, upstream = drawn("")
    kernel = kernel_of(name, Problem.parse(f"b2.h4/2.s5x{KEYS}.d8.fp64.grad"))
    lse = torch.zeros(2, 4, 5)
    with pytest.raises(Unsupported, match="grad_lse"):
        kernel.backward(inputs(name, operands), torch.from_numpy(upstream), lse, torch.from_numpy(upstream), lse)
