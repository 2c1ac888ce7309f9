"""NaN and inf among the operands: where they are looked for, by what, and that no call gets past the look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnswitch
from attnswitch import Problem, Unsupported
from attnswitch.call import attend, finite
from attnswitch.call.launch import Launch
from attnswitch.machine import divergences
from attnswitch.machine.backend import Inputs, Shows
from attnswitch.machine.device import Device
from attnswitch.planning import planner

pytestmark = pytest.mark.usefixtures("nothing_before")


def tensors(length: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return [torch.randn(1, 2, length, 16, dtype=dtype) for _ in range(3)]


def test_nan_is_seen_in_every_call() -> None:
    q, k, v = tensors()
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:, 3] = False
    clean = attnswitch.attention(q, k, v, attn_mask=mask)
    poisoned = k.clone()
    poisoned[:, :, 3] = torch.nan
    for _ in range(2):
        assert torch.equal(attnswitch.attention(q, k, v, attn_mask=mask), clean)
        torch.testing.assert_close(attnswitch.attention(q, poisoned, v, attn_mask=mask), clean)
    with finite.checking("never"):
        assert attnswitch.attention(q, poisoned, v, attn_mask=mask).isnan().any()
    torch.testing.assert_close(attnswitch.attention(q, poisoned, v, attn_mask=mask), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("keys", [1, 3, 8, 33, 100, 512])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_the_lse_of_the_cpu_kernel_shows_every_row_that_is_nan(queries: int, keys: int, dtype: torch.dtype) -> None:
    """Its output is 0 in some of them, and a number in others."""
    problem = Problem(1, 2, 2, queries, keys, 16, 16, str(dtype).removeprefix("torch."))
    _, kernel = planner.kernel("sdpa-flash", problem, Device.of("cpu", 0))
    assert kernel.shows is Shows.LSE
    shown = finite.shows(problem)
    generator = np.random.default_rng(queries + keys)
    hidden = 0
    for draw in range(60):
        query, key = (torch.randn(1, 2, length, 16, dtype=dtype) for length in (queries, keys))
        which = (query, key)[draw % 2]
        first, last = sorted(generator.integers(0, which.shape[2] + 1, 2))
        where = slice(None) if draw % 3 else int(generator.integers(16))
        poison = (torch.nan, torch.inf, -torch.inf)[draw // 2 % 3]
        which[0, :: int(generator.integers(1, 3)), first : last + 1, where] = poison
        operands = Inputs(query, key, torch.randn(1, 2, keys, 16, dtype=dtype))
        out, lse = kernel.prepared(operands)(*operands[:3])
        exact = torch.softmax(query.double() @ key.double().mT / 4, -1).isnan().any(-1)
        assert lse is not None
        told = (lse == 0) | ~lse.isfinite()
        assert bool((told | ~exact).all())
        assert shown(lse) is bool(told.any())
        hidden += int((exact & ~out.isnan().any(-1)).sum())
    assert hidden or keys > 1  # or there would be no need to look


@pytest.mark.parametrize("keys", [8, 520])
def test_nan_is_seen_whether_lse_shows_it_or_not(keys: int) -> None:
    """520 keys are more than a tile."""
    query, key, value = torch.randn(1, 2, 4, 16), *torch.randn(2, 1, 2, keys, 16).unbind()
    attnswitch.attention(query, key, value, backend="sdpa-flash")
    attnswitch.attention(query, key, value, backend="sdpa-flash")
    key[:, :, -8:] = torch.nan
    with pytest.raises(Unsupported, match="NaN or inf"):
        attnswitch.attention(query, key, value, backend="sdpa-flash")
    assert attnswitch.attention(query, key, value).isnan().all()


def test_an_lse_of_zero_is_looked_into(built: list[object]) -> None:
    """One key, and a score of 0."""
    query, key, value = (torch.zeros(1, 1, 1, 16), *torch.randn(2, 1, 1, 1, 16).unbind())
    attnswitch.attention(query, key, value, backend="sdpa-flash")
    built.clear()
    with attnswitch.record() as recorded:
        assert torch.equal(attnswitch.attention(query, key, value, backend="sdpa-flash"), value)
    assert not built
    assert list(recorded.problems.values()) == [1]


def test_a_call_with_nan_is_recorded_once() -> None:
    query, key, value = torch.randn(3, 1, 1, 4, 16).unbind()
    attnswitch.attention(query, key, value)
    query[..., 0] = torch.nan
    with attnswitch.record() as recorded:
        assert attnswitch.attention(query, key, value).isnan().all()
    assert [problem.nonfinite for problem in recorded.problems] == [True]
    assert list(recorded.problems.values()) == [1]


LOOKED_AT = {"few": (2, 8), "grouped": (4, 8), "many": (2, 80)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_under_dropout_is_answered(causal: bool, training: bool) -> None:
    """As a program that diverges wants it; who keeps NaN where it belongs has a seed drawn."""
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    query[0, 1, 2] = torch.nan
    query.requires_grad_(training)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(attnswitch.attention(query, key, value, is_causal=causal, dropout_p=0.5))
        found.append(attnswitch.attention(query, key, value, is_causal=causal, dropout_p=0.5))
    assert torch.equal(*(x.nan_to_num() for x in (found[0], found[2])))
    assert not torch.equal(*(x.nan_to_num() for x in found[:2]))
    lost = torch.zeros(2, 4, 6, 8, dtype=torch.bool)
    lost[0, 1, 2] = True
    assert torch.equal(found[0].isnan(), lost)
    if training:
        (grad,) = torch.autograd.grad(found[0].nan_to_num().sum(), query)
        assert torch.equal(grad.isnan(), lost)
    with pytest.raises(Unsupported, match="leaks NaN"):
        attnswitch.attention(query, key, value, dropout_p=0.5, backend="sdpa-math")


@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_results_lie_as_the_query_does_also_with_nan(poison: float) -> None:
    """A program that joins heads without a copy goes on when it diverges."""
    rows = torch.randn(2, 6, 4, 8)
    rows[0, 2, 1, 3] += poison
    rows.requires_grad_()
    x = rows.transpose(1, 2)
    out = attnswitch.attention(x, x, x)
    joined = out.transpose(1, 2).view(2, 6, 32)
    (grad,) = torch.autograd.grad(joined.sum(), rows)
    assert bool(grad.isnan().any()) == bool(joined.isnan().any()) == (poison != 0.0)


@pytest.mark.parametrize(("heads", "length"), LOOKED_AT.values(), ids=LOOKED_AT)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grads", ["", "q"])
@pytest.mark.parametrize("role", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_every_operand_is_looked_at(
    heads: int, length: int, causal: bool, grads: str, role: str, poison: float
) -> None:
    operands = dict(zip(("query", "key", "value"), tensors(length), strict=True))
    operands["query"] = torch.randn(1, heads, length, 16)
    problem = Problem(1, heads, 2, length, length, 16, 16, "float32", causal=causal, grads=grads)
    look = finite.look_of(problem, "cpu")
    arrays = tuple(operand.numpy() for operand in operands.values())
    assert look(*operands.values())
    assert finite.finite(problem, "cpu", arrays)
    operands[role].view(-1)[77] = poison
    matters = causal or role != "value"
    operands["query"].requires_grad_(grads != "")
    assert look(*operands.values()) is not matters
    assert finite.finite(problem, "cpu", arrays) is not matters
    assert finite.finite(problem, "cpu", tuple(operands.values())) is not matters
    assert not finite.look_of(problem, "cuda")(*operands.values())
    assert not finite.finite(problem, "cuda", tuple(operands.values()))


@pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 8, 33, 600])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_all_see_is_summed_whatever_it_is(backend: str, dtype: torch.dtype, length: int, poison: float) -> None:
    """Why value is not looked at where nothing is hidden: NaN and inf come out, and go back, as arithmetic says."""
    operands = tensors(length, dtype=dtype)
    operands[2][0, 1, length // 2, 5] = poison
    exact = [tensor.double().requires_grad_() for tensor in operands]
    expected = by_formula(*exact)
    for tensor in operands:
        tensor.requires_grad_()
    for _ in range(3):  # the later ones like one before
        out = attnswitch.attention(*operands, backend=backend)
        for one, other in zip((out, *torch.autograd.grad(out.sum(), operands)), expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0.1, atol=0.1, equal_nan=True)


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The formula, and its gradients."""
    out = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value
    return [out, *torch.autograd.grad(out.sum(), (query, key, value))]


def test_what_only_overflows_a_sum_is_finite_where_nothing_is_hidden() -> None:
    operands = [torch.full((1, 2, 8, 16), 3e38) for _ in range(3)]
    assert finite.look_of(Problem(1, 2, 2, 8, 8, 16, 16, "float32"), "cpu")(*operands)
    assert not finite.look_of(Problem(1, 2, 2, 8, 8, 16, 16, "float32", causal=True), "cpu")(*operands)


@pytest.mark.parametrize(
    ("dtype", "scale", "most"), [("float32", None, 4.6e18), ("float64", None, 3.35e153), ("bfloat16", 1e8, 4.6e14)]
)
def test_numbers_may_be_as_large_as_makes_no_product_overflow(dtype: str, scale: float | None, most: float) -> None:
    problem = Problem(1, 1, 1, 2, 2, 16, 16, dtype, causal=True, scale=scale)
    for size, expected in ((0.99 * most, True), (1.01 * most, False)):
        operands = [torch.full((1, 1, 2, 16), -size, dtype=getattr(torch, dtype)) for _ in range(3)]
        assert finite.look_of(problem, "cpu")(*operands) is expected
        assert finite.finite(problem, "cpu", tuple(operands)) is expected


@pytest.mark.parametrize("lies", ["whole", "turned", "expanded", "stepped"])
def test_the_range_of_what_lies_in_any_order_is_seen(lies: str) -> None:
    change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole": lambda x: x,
        "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": lambda x: x[:, :1].expand(-1, 2, -1, -1),
        "stepped": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    }
    problem = Problem(2, 2, 2, 5, 5, 16, 16, "float32", causal=True)
    for value, expected in ((1e17, True), (-1e19, False), (torch.nan, False)):
        operand = torch.randn(2, 2, 5, 16)
        operand[1, 0, 4, 3] = value
        operands = [change[lies](operand), *torch.randn(2, 2, 2, 5, 16)]
        assert finite.look_of(problem, "cpu")(*operands) is expected


HIDDEN: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.tensor([3])},
    "bool": {"attn_mask": torch.tensor([True, True, True, False])},
    "float": {"attn_mask": torch.tensor([0, 0, 0, -torch.inf])},
    "window": {"window": (None, 0)},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("options", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_numbers_that_overflow_do_not_leak_from_where_they_are_hidden(
    options: dict[str, Any], dtype: torch.dtype, library: str
) -> None:
    """A score that overflows is inf, less the inf of a mask NaN; in the backward it is 0 times inf."""
    query, key, value, upstream = (torch.randn(1, 1, 3 if n in (0, 3) else 4, 8, dtype=dtype) for n in range(4))
    huge = key.clone(), value.clone()
    for operand in huge:
        operand[:, :, 3] = torch.finfo(dtype).max
    found, clean = list[Any](), list[Any]()
    for results, (k, v) in ((clean, (key, value)), (found, huge)):
        operands: list[Any] = [query, k, v, upstream]
        if library == "numpy":
            operands = [in_numpy(operand) for operand in operands]
        for _ in range(2):
            results.append(attnswitch.attention(*operands[:3], **in_library(options, operands[0])))
        results += attnswitch.attention_backward(operands[3], *operands[:3], **in_library(options, operands[0]))[:3]
    for one, other in zip(found, clean, strict=True):
        tolerance = 0.1 if dtype is torch.bfloat16 else 1e-5
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=tolerance, atol=tolerance)


def in_numpy(tensor: torch.Tensor) -> Any:
    narrow = tensor.dtype is torch.bfloat16
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if narrow else tensor.numpy()


def in_library(options: dict[str, Any], like: Any) -> dict[str, Any]:
    if isinstance(like, torch.Tensor):
        return options
    return {name: option.numpy() if isinstance(option, torch.Tensor) else option for name, option in options.items()}


def numbers(array: Any) -> Any:
    return np.asarray(array.double() if isinstance(array, torch.Tensor) else array, dtype=np.float64)


def test_a_query_that_sees_nothing_may_be_huge() -> None:
    query, key, value, upstream = (torch.randn(1, 1, 4, 8) for _ in range(4))
    sees = torch.ones(4, 4, dtype=torch.bool)
    sees[3] = False
    query[:, :, 3] = torch.finfo(torch.float32).max
    found = attnswitch.attention_backward(upstream, query, key, value, attn_mask=sees)
    for gradient in found[:3]:
        assert torch.as_tensor(gradient).isfinite().all()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("length", [6, 60])
def test_an_lse_without_memory_is_not_read(length: int) -> None:
    """Of a mode that computes nothing: reading address 0 ends the process."""
    query, key, value = (torch.randn(2, 4, length, 8) for _ in range(3))
    for _ in range(2):
        attnswitch.attention(query, key, value)
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(RuntimeError):
        attnswitch.attention(query, key, value)


def launches() -> list[Launch]:
    """Those that calls came to since they were forgotten."""
    return [launch for asked in attend._requests.values() for launch in asked.launches.values()]


def test_nothing_is_looked_for_that_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    poisoned = q.clone().fill_(torch.nan)
    monkeypatch.setattr(divergences, "refused", lambda backend, *_: ("no",) * (backend.name != "sdpa-math"))
    planner.forget()
    for backend in ("sdpa-math", None):
        attend.forget()
        for _ in range(2):
            attnswitch.attention(q, k, v, backend=backend)
        (found,) = launches()
        assert found.look is None
        assert not found.problem.nonfinite
        assert attnswitch.attention(poisoned, k, v, backend=backend).isnan().all()
    monkeypatch.undo()
    planner.forget()
    attend.forget()
    for _ in range(2):
        attnswitch.attention(q, k, v)
    (found,) = launches()
    assert found.look is not None


def test_who_takes_nan_beside_dropout_is_named_to_those_who_named_another() -> None:
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    key[0, 0, 3] = float("nan")
    with pytest.raises(attnswitch.Unsupported, match=r"leave backend out, or use one of these with a seed: .*tiled"):
        attnswitch.attention(query, key, value, dropout_p=0.3, backend="sdpa-math")
