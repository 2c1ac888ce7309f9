"""Hopper's backward, asked to repeat its bits: blocks that run side by side add to dQ in turn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import mutated
import nights
import numpy as np
import pytest

from attnswitch import Problem
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
backward = importlib.import_module("attnswitch.backends.cuda.hopper.backward")
choice = importlib.import_module("attnswitch.backends.cuda.hopper.choice")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

#: How many blocks run side by side, and by which seed: as on a GPU with one SM, with few, with more than blocks.
WAYS = (emulator.Residents(1, 0), *(emulator.Residents(count, count) for count in (2, 4, 40)))


class Case(NamedTuple):
    """A problem of at least three tiles of keys a query, without ``deterministic``, and how its queries are split."""

    text: str
    parts: int = 1
    lengths: tuple[int, ...] | None = None


CASES = {
    "plain": Case("b1.h1.s70x520.d64.bf16.grad"),
    "causal": Case("b1.h1.s460.d64.bf16.causal.grad"),
    "bottom right": Case("b1.h1.s130x520.d64.bf16.causal-br.grad"),
    "window": Case("b1.h1.s460.d64.bf16.window=270,60.grad"),
    "lengths": Case("b3.h1.s70x520.d64.bf16.lengths.grad", lengths=(390, 0, 520)),
    "lengths, causal": Case("b2.h1.s200x520.d64.bf16.lengths.causal-br.grad", lengths=(140, 500)),
    "GQA": Case("b1.h4/2.s70x520.d64.bf16.grad"),
    "splits": Case("b1.h1.s460.d64.bf16.causal.grad", 3),
    "GQA, splits": Case("b1.h3/1.s200x520.d64.bf16.causal-br.grad", 5),
    "bool mask": Case("b1.h1.s200x520.d64.bf16.mask=bool:qk.grad"),
    "bool mask of each head, splits": Case("b1.h2/1.s200x520.d64.bf16.mask=bool:hqk.grad", 2),
    "keys that a mask hides from all": Case("b1.h1.s130x390.d64.bf16.mask=bool:k.grad"),
    "softcap": Case("b1.h1.s70x520.d64.bf16.softcap=3.0.grad"),
    "D 128": Case("b1.h1.s70x520.d128.bf16.grad"),
}


#: Another build, which takes g++ seconds; its bits are in the tests of its gradients.
SLOW = "D 128"


def mask_of(p: Problem) -> Any:
    """None, or one that hides whole tiles, others from each head; or one that hides tiles of keys from all queries."""
    if p.mask is None:
        return None
    shape = p.mask_shape
    assert shape is not None
    mask = np.random.default_rng(2).random(shape) < 0.7
    if shape[2] == 1:
        mask[..., 128:256] = False
        return mask
    for head in range(shape[1]):
        mask[:, head, 64 * (head + 1) : 64 * (head + 2), 128 * (head + 1) : 128 * (head + 2)] = False
    return mask


def grads(case: Case, monkeypatch: pytest.MonkeyPatch, deterministic: bool = True) -> tuple[Any, ...]:
    """Those of query, key and value, where another order of the same additions to that of the query is seen.

    Of the first two tiles of keys come large numbers that cancel each other, if they are added one after another.
    """
    monkeypatch.setattr(backward, "splits", lambda *_: case.parts)
    p = Problem.parse(case.text).replace(deterministic=deterministic)
    rng = np.random.default_rng(1)
    q = np.zeros((p.batch, p.heads_q, p.seq_q, p.dim_qk))
    k = rng.standard_normal((p.batch, p.heads_kv, p.seq_k, p.dim_qk))
    v = rng.standard_normal((p.batch, p.heads_kv, p.seq_k, p.dim_v))
    k[:, :, :128] *= 2.0**20
    k[:, :, 128:256], v[:, :, 128:256] = -k[:, :, :128], v[:, :, :128]
    grad, out = rng.standard_normal((2, p.batch, p.heads_q, p.seq_q, p.dim_v))
    lse = np.full(grad.shape[:3], 6.0, np.float32)
    q, k, v, grad, out = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v, grad, out))
    inputs = Inputs(q, k, v, mask_of(p), None if case.lengths is None else np.array(case.lengths))
    launch = backward.Backward(p, choice.gradients(p), Device.cpu())
    return tuple(launch(inputs, out, lse, grad, np.zeros_like(lse))[:3])


def ways(case: Case, monkeypatch: pytest.MonkeyPatch, deterministic: bool = True) -> list[set[bytes]]:
    """The bits of each gradient in all ``WAYS``."""
    found: list[set[bytes]] = [set(), set(), set()]
    for residents in WAYS:
        monkeypatch.setattr(emulator, "residents", residents)
        for bits, gradient in zip(found, grads(case, monkeypatch, deterministic), strict=True):
            assert np.isfinite(gradient.astype(np.float32)).all()
            bits.add(gradient.tobytes())
    return found


@pytest.mark.parametrize(
    "name", [*nights.some([name for name in CASES if name != SLOW], 3), pytest.param(SLOW, marks=pytest.mark.slow)]
)
def test_bits_are_the_same_however_blocks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(bits) for bits in ways(CASES[name], monkeypatch)] == [1, 1, 1]


@pytest.mark.parametrize("name", ["plain", "causal", "window", "GQA, splits", "bool mask"])
def test_without_turns_the_gradient_of_the_query_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what the test above asks for is not there by itself."""
    of_query, of_key, of_value = ways(CASES[name], monkeypatch, deterministic=False)
    assert len(of_query) > 1
    assert len(of_key) == len(of_value) == 1


# -- mutants -----------------------------------------------------------------------------------------------------------

#: Macros that take a part of the order away, and what the emulator says of it.
MUTANTS = {
    "nobody waits": ("#define await_number(at, number) ((void)0)", "left out of its turn"),
    "a turn is waited for that is this block's own": (
        "#define await_number(at, number) await_number(at, (number) + 1)",
        "a number that no block has left",
    ),
    "who waits adds at once": ("#define follow_additions() ((void)0)", "additions may overtake"),
    "handed on when additions are read": ("#define finish_additions() wait_additions()", "before additions are done"),
    "never handed on": ("#define leave_number(at, number) ((void)0)", "a number that no block has left"),
}
#: Nobody waits, and nobody tells.
UNORDERED = "#define await_number(at, number) ((void)0)\n#define leave_number(at, number) ((void)0)"


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the backward compiled with other instructions."""

    return lambda macros: mutated.compile_with("backward_ordered", macros, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_part_of_the_order_that_is_missing_is_an_error(
    name: str, mutate: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    macros, told = MUTANTS[name]
    mutate(macros)
    with pytest.raises(RuntimeError, match=told):
        ways(CASES["causal"], monkeypatch)


def test_without_any_order_bits_differ(mutate: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(UNORDERED)
    assert [len(bits) > 1 for bits in ways(CASES["causal"], monkeypatch)] == [True, False, False]
