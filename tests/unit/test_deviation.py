"""What dropout may do to a right result, and what is wrong for all that: ``deviation`` and ``noise`` of the bench."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

import attnswitch
from attnswitch.bench import deviation, noise, workload
from attnswitch.bench.noise import Noise
from attnswitch.bench.workload import Workload
from attnswitch.problem import Problem

#: Few rows and keys, many, groups, a decode step; each kind of visibility; what stands before the softmax.
PROBLEMS = (
    "b2.h2.s28.d16.fp64.causal-br.lengths.dropout=0.1.grad",
    "b2.h4/2.s17x6.d8.fp64.causal.softcap=2.dropout=0.1.grad",
    "b2.h2/1.s5x2.d8.fp64.causal.lengths.dropout=0.1.grad",
    "b2.h2/1.s2x40.d8.fp64.mask=fp64:hqk.dropout=0.3.grad",
    "b1.h2.s40.d32.fp64.causal.window=3,0.dropout=0.5.grad",
    "b2.h2.s1x64.d32.fp64.lengths.dropout=0.1",
    "b2.h2.s70.d16.fp64.causal.dropout=0.02",
)
SEEDS, MASKS = 25, 300


def results(work: Workload, seed: int, **changes: object) -> tuple[torch.Tensor, ...]:
    """What a backend that is right returns, with the mask of ``seed``; or with a call that is ``changes`` off."""
    out = attnswitch.attention(
        work.query, work.key, work.value, backend="tiled", **work.keywords() | {"seed": seed} | changes
    )
    return torch.autograd.grad(out, work.leaves, work.grad_out) if work.problem.grads else (out,)


def heads(ones: Iterable[list[Noise]], others: Iterable[list[Noise]]) -> Iterator[tuple[Noise, Noise]]:
    """Pairs of the same head, of each result."""
    for one, other in zip(ones, others, strict=True):
        yield from zip(one, other, strict=True)


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_right_result_is_right_whatever_is_dropped(text: str) -> None:
    work = workload.of(Problem.parse(text), "cpu")
    reference = deviation.make(work)
    assert [why for seed in range(SEEDS) if (why := reference.wrong(results(work, seed)))] == []


@pytest.mark.parametrize("text", PROBLEMS)
def test_the_mean_square_is_that_of_what_dropout_adds(text: str) -> None:
    """Over many masks, worked out with autograd alone."""
    work = workload.of(Problem.parse(text), "cpu")
    (b, h), part = next(iter(deviation.make(work).parts.items()))
    query, key, value, grad_out = deviation._operands(work, b, h, torch.float64)
    leaves = tuple(x.requires_grad_() for x in (query, key, value))
    rate, squares = work.problem.dropout, []
    generator = torch.Generator().manual_seed(3)
    for _ in range(MASKS):
        weights, _ = deviation._weights(work, b, h, slice(0, query.shape[1]), query, key)
        kept = torch.rand(weights.shape, generator=generator) >= rate
        out = (weights * kept / (1.0 - rate)) @ value
        found = (out,) if grad_out is None else torch.autograd.grad(out, leaves, grad_out)
        pairs = zip(found, part.answers, strict=True)
        squares.append([(result.detach() - answer).flatten(1).square().sum(1) for result, answer in pairs])
    for noises, of_result in zip(part.noises, zip(*squares, strict=True), strict=True):
        of_heads = torch.stack(of_result)
        for usual, square in zip(noises, of_heads.T.reshape(len(noises), -1), strict=True):
            error = float(square.std()) / math.sqrt(MASKS)
            assert abs(float(square.mean()) - usual.usual**2) <= 6 * error + 1e-18


Break = Callable[[Workload, Callable[..., tuple[torch.Tensor, ...]]], tuple[torch.Tensor, ...]]
#: What is plainly wrong, and on which problem it shows.
LARGE = "b1.h1.s8192x32.d32.fp32.dropout=0.1"
SMALL = "b1.h2.s64.d16.fp32.causal.dropout=0.1"
WRONG: dict[str, tuple[str, Break]] = {
    "drops nothing": (SMALL, lambda work, call: call(dropout_p=0.0)),
    "drops nothing, of few keys": ("b1.h2.s28x6.d16.fp32.dropout=0.1", lambda work, call: call(dropout_p=0.0)),
    "drops nothing in a decode step": ("b1.h2.s1x256.d64.fp32.dropout=0.1", lambda work, call: call(dropout_p=0.0)),
    "drops nothing of fifty keys": ("b1.h2.s1x50.d128.bf16.dropout=0.1", lambda work, call: call(dropout_p=0.0)),
    "drops nothing in nine rows": (
        "b3.h1.s9.d128.fp32.causal.window=3,0.dropout=0.1",
        lambda work, call: call(dropout_p=0.0),
    ),
    "drops half": (SMALL, lambda work, call: call(dropout_p=0.5)),
    "drops twice as many": (LARGE, lambda work, call: call(dropout_p=0.2)),
    "drops half as many": (LARGE, lambda work, call: call(dropout_p=0.05)),
    "does not divide": (LARGE, lambda work, call: tuple(0.9 * result for result in call())),
    "divides twice": (LARGE, lambda work, call: tuple(result / 0.9 for result in call())),
    "sees hidden keys": (SMALL, lambda work, call: call(is_causal=False)),
    "sees keys past the length": ("b2.h2.s64.d16.fp32.lengths.dropout=0.1", lambda work, call: call(key_lengths=None)),
}


@pytest.mark.parametrize("grad", ["", ".grad"])
@pytest.mark.parametrize("name", WRONG)
def test_a_result_that_is_plainly_wrong_is_caught(name: str, grad: str) -> None:
    text, broken = WRONG[name]
    work = workload.of(Problem.parse(text + grad), "cpu")
    reference = deviation.make(work)
    assert reference.wrong(results(work, 0)) == ""
    assert reference.wrong(broken(work, lambda **changes: results(work, 0, **changes)))


def test_one_head_of_many_that_does_not_drop_is_caught() -> None:
    work = workload.of(Problem.parse(SMALL.replace("h2", "h4/1")), "cpu")
    out, kept = results(work, 0)[0], results(work, 0, dropout_p=0.0)[0]
    out[0, 2] = kept[0, 2]
    assert "a right result's is from" in deviation.make(work).wrong((out,))


def test_who_drops_everything_returns_nothing() -> None:
    work = workload.of(Problem.parse("b1.h2.s8.d8.fp32.dropout=1"), "cpu")
    reference = deviation.make(work)
    assert reference.wrong((torch.zeros_like(work.query),)) == ""
    assert reference.wrong(results(work, 0, dropout_p=0.5))


def test_rows_in_chunks_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload.of(Problem.parse("b1.h4/2.s90x70.d8.fp64.causal.dropout=0.1.grad"), "cpu")
    whole = deviation.make(work).parts[0, 0].noises
    monkeypatch.setattr(deviation, "_NOISE_CHUNK", 1000)
    for one, other in heads(whole, deviation.make(work).parts[0, 0].noises):
        assert (one.least, one.most, one.along, one.usual) == pytest.approx(
            (other.least, other.most, other.along, other.usual)
        )


def test_so_few_are_dropped_that_it_may_be_none() -> None:
    """A right result can be the answer then, to rounding."""
    work = workload.of(Problem.parse("b1.h2.s1x50.d128.bf16.dropout=0.02"), "cpu")
    assert deviation.make(work).wrong(results(work, 0, dropout_p=0.0)) == ""


def test_in_a_few_columns_what_is_dropped_may_balance() -> None:
    work = workload.of(Problem.parse("b1.h1.s1x50.d1.bf16.dropout=0.1"), "cpu")
    reference = deviation.make(work)
    assert [why for seed in range(100) if (why := reference.wrong(results(work, seed)))] == []


@pytest.mark.parametrize("centred", [False, True])
def test_how_alike_the_vectors_of_a_row_are(centred: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights, caps, keys, centres = (
        torch.rand(shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 5, 7), (2, 5, 7), (7, 3), (2, 5, 3))
    )
    vectors = caps[..., None] * keys - (centres[:, :, None] if centred else 0.0)
    products = torch.einsum("grjd,grkd->grjk", vectors, vectors)
    expected = torch.einsum("grj,grk,grjk->gr", weights, weights, products.square())
    torch.testing.assert_close(noise._alike(weights, keys, caps, centres if centred else None), expected)


def test_many_keys_are_bounded_by_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound gets narrower."""
    work = workload.of(Problem.parse("b1.h2.s40x70.d8.fp64.causal.dropout=0.1.grad"), "cpu")
    exact = deviation.make(work).parts[0, 0].noises
    monkeypatch.setattr(noise, "_KEYS", 1)
    bounded = deviation.make(work).parts[0, 0].noises
    for narrow, wide in heads(exact, bounded):
        assert wide.least <= narrow.least * 1.001
        assert wide.most >= narrow.most * 0.999
    assert bounded[-1][0].most == exact[-1][0].most  # of values, which goes by keys


@pytest.mark.parametrize("shape", [1e-3, 0.3, 1.0, 20.0, 1e4])
def test_the_tails_are_as_small_as_is_said(shape: float) -> None:
    low, high = noise._gamma(shape)
    assert low < 1.0 < high
    for edge in (low, high):
        if edge > 0.0:
            tail = math.exp(-shape * (edge - 1.0 - math.log(edge)))
            assert tail == pytest.approx(noise.FALSE_ALARM / 2, rel=1e-6)
