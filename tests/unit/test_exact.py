"""A long case, known in part: the same values and bounds as the dense answer has there, and checked as it is."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from attnswitch import VerificationError
from attnswitch.machine.backend import Gradients, Precision
from attnswitch.verify import Case, MaskRecipe, check
from attnswitch.verify.checks import reference
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.truth import exact, oracle, rows
from attnswitch.verify.truth.exact import Exact

tiled = importlib.import_module("attnswitch.backends.tiled")
PLAIN = Case(batch=2, heads_kv=2, group=2, seq_q=70, seq_k=90, dim_qk=8, dim_v=6, lse=True, grads="qkv")
CASES = {
    "plain": PLAIN,
    "causal": PLAIN.replace(causal=True),
    "bottom-right": PLAIN.replace(causal=True, alignment="bottom_right"),
    "window": PLAIN.replace(window=(7, 3), alignment="bottom_right", lengths=(90, 11)),
    "window-top-left": PLAIN.replace(window=(None, 3), lengths=(0, 65)),
    "lengths": PLAIN.replace(lengths=(90, 64)),
    "bool-mask": PLAIN.replace(mask=MaskRecipe("bool", "bhqk", 4, "dead-rows")),
    "mask-of-keys": PLAIN.replace(mask=MaskRecipe("bool", "bk", 4, "random")),
    "mask-of-heads": PLAIN.replace(mask=MaskRecipe("float32", "bhqk", 4, "random"), grads="qkvm"),
    "mask-of-rows": PLAIN.replace(mask=MaskRecipe("float32", "hq", 3, "random"), grads="qkvm"),
    "float-mask": PLAIN.replace(mask=MaskRecipe("float16", "qk", 2, "random"), grads="qkvm", dtype="float16"),
    "dropout": PLAIN.replace(dropout=0.5, dropout_seed=2**40 + 7, causal=True),
    "softcap": PLAIN.replace(softcap=5.0, scale=-0.5),
    "one-row": PLAIN.replace(seq_q=1, batch=1, causal=True, alignment="bottom_right"),
    "poison": PLAIN.replace(poison=True, causal=True, lse=False),
    "no-group": PLAIN.replace(heads_kv=3, group=1, dtype="float64"),
}
EVERY = pytest.mark.parametrize("name", CASES)
PRECISIONS = (Precision(), Precision(weights="storage", statistics="lse"), Precision(score_inputs="tf32"))


def sampled(case: Case, data: dict[str, Any], head: int = 0) -> Exact:
    """The answer as a case too long for a dense one gets it; with a key head of up to ``head`` scores in whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "DENSE_WORK", 0)
        patch.setattr(exact, "HEAD_SCORES", head)
        found = Exact(case, data)
    assert found.rows is not None
    return found


def both(name: str, head: int = 0) -> tuple[Exact, Exact]:
    data = operands(CASES[name])
    return sampled(CASES[name], data, head), Exact(CASES[name], data)


#: Sampled rows alone, and with a key head.
HEADS = pytest.mark.parametrize("head", [0, 2**19], ids=["rows", "head"])


@HEADS
@EVERY
def test_what_is_known_in_part_is_that_of_the_dense_answer(name: str, head: int) -> None:
    some, every = both(name, head)
    assert every.rows is None
    case = CASES[name]
    of_keys = {"key", "value"} if head or case.seq_q == case.group == 1 else set()
    if case.mask is not None and head and case.mask.axes.startswith("bh") and case.mask.dtype != "bool":
        of_keys |= {"attn_mask"}
    assert some.values.keys() == {"out", "lse", "query"} | of_keys
    for result, value in some.values.items():
        mine = some.part(every.values[result], result)
        np.testing.assert_allclose(value, mine, rtol=1e-11, atol=1e-13, err_msg=result)
    assert some.poisoned.keys() == every.poisoned.keys() & some.values.keys()
    for result, where in some.poisoned.items():
        np.testing.assert_array_equal(where, some.part(every.poisoned[result], result), result)


@HEADS
@pytest.mark.parametrize("precision", PRECISIONS, ids=["ieee", "storage", "tf32"])
@EVERY
def test_so_are_their_bounds(name: str, precision: Precision, head: int) -> None:
    some, every = both(name, head)
    whole = every.limits(precision)
    assert some.limits(precision).keys() == some.values.keys() & whole.keys()
    for result, limit in some.limits(precision).items():
        mine = some.part(whole[result], result)
        np.testing.assert_allclose(limit, mine, rtol=1e-9, atol=0, err_msg=result)
    assert some.limits(precision) is some.limits(precision)


@EVERY
def test_row_errors_of_the_sample_are_for_all(name: str) -> None:
    some, every = both(name)
    for what, error in some.row_errors(Precision()).items():
        assert np.shape(error) == ()
        mine = some.part(every.row_errors(Precision())[what])
        assert error == pytest.approx(float(mine.max()), rel=1e-9), what


def test_the_sample_has_the_first_row_and_the_last_and_others() -> None:
    some = sampled(PLAIN, operands(PLAIN))
    assert some.rows is not None
    places = set(zip(*(axis.tolist() for axis in some.rows), strict=True))
    assert {(0, 0, 0), (0, 0, 69), (1, 3, 0), (1, 3, 69), (0, 0, 63), (0, 0, 64)} <= places
    assert len(places) == len(some.rows[0]) < 3 * 16


def test_part_and_place_say_the_same() -> None:
    some = sampled(PLAIN, operands(PLAIN))
    numbered = np.arange(2 * 4 * 70 * 6).reshape(2, 4, 70, 6)
    part = some.part(numbered)
    assert part.shape == some.values["out"].shape
    for index in ((0, 0), (5, 3), (part.shape[0] - 1, 5)):
        assert numbered[some.place(index)] == part[index]
    some = sampled(CASES["mask-of-heads"], operands(CASES["mask-of-heads"]), 2**19)
    shapes = {"key": (2, 2, 90, 8), "value": (2, 2, 90, 6), "attn_mask": (2, 4, 70, 90)}
    for name, shape in shapes.items():
        numbered = np.arange(np.prod(shape)).reshape(shape)
        part = some.part(numbered, name)
        assert part.shape == some.values[name].shape
        last = tuple(length - 1 for length in part.shape)
        assert numbered[some.place(last, name)] == part[last]
    dense = Exact(PLAIN, operands(PLAIN))
    assert dense.part(numbered) is numbered
    assert dense.place((1, 2, 3, 4)) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", ["plain", "bottom-right", "dropout", "mask-of-rows"])
@pytest.mark.parametrize("result", ["out", "lse", "query"])
def test_a_wrong_reference_is_noticed(name: str, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = CASES[name], oracle.answer

    def wrong(*arguments: Any, **named: Any) -> oracle.Answer:
        found = right(*arguments, **named)
        found.values[result][0, 0, -1] *= 1 + 1e-6
        return found

    monkeypatch.setattr(oracle, "answer", wrong)
    with pytest.raises(VerificationError, match=f"references disagree on {result}"):
        sampled(case, operands(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "DENSE_WORK", 0)
        assert Exact(case, operands(case), trusted=True).rows is not None  # it was asked not to look


def test_a_wrong_reference_of_a_key_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oracle.answer

    def wrong(case: Case, *arguments: Any, **named: Any) -> oracle.Answer:
        found = right(case, *arguments, **named)
        if case.seq_q == PLAIN.seq_q:
            found.values["out"][0, -1, -1] *= 1 + 1e-6
        return found

    monkeypatch.setattr(oracle, "answer", wrong)
    with pytest.raises(VerificationError, match="references disagree on out"):
        sampled(PLAIN, operands(PLAIN), 2**19)


def test_rows_answer_what_is_elsewhere_if_asked_for_another() -> None:
    """``check_row`` compares a row with the place that it is told."""
    data = operands(PLAIN)
    some = sampled(PLAIN, data)
    rows.check_row(PLAIN, data, some.answers[0], (0, 0, 0), (0, 0))
    with pytest.raises(VerificationError):
        rows.check_row(PLAIN, data, some.answers[0], (0, 0, 1), (0, 0))


@pytest.mark.parametrize("backend", ["tiled", "sdpa-flash"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"dropout"}))
def test_a_right_backend_passes_on_sampled_rows(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "DENSE_WORK", 0)
    outcome = check(CASES[name], backend)
    assert outcome.failure is None
    assert outcome.verdict == "verified" or backend != "tiled"


DRAWN = Case(batch=2, heads_kv=2, seq_q=70, seq_k=64, dim_qk=64, dim_v=64, dropout=0.3, grads="qkv")


@pytest.mark.parametrize("check_name", ["reference", "fresh-dropout"])
def test_sampled_rows_know_the_mask_that_a_backend_drew(check_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "DENSE_WORK", 0)
    outcome = check(DRAWN.replace(check=check_name), "sdpa-math")
    assert (outcome.verdict, outcome.failure) == ("verified", None)


@pytest.mark.parametrize(("share", "right"), [(0.7, True), (0.6, False), (0.8, False)])
def test_a_share_that_was_not_asked_for_is_seen_on_sampled_rows(
    share: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "DENSE_WORK", 0)
    keep = np.random.default_rng(0).random(DRAWN.scores) < share
    found = reference._plausible(Exact(DRAWN, operands(DRAWN), keep))
    assert (found is None) is right
    if found is not None:
        assert found.message.endswith("weights were kept with dropout_p=0.3")


@pytest.mark.parametrize("result", ["grad key", "grad value", "grad attn_mask"])
def test_a_wrong_gradient_of_keys_is_found(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the key head that is known, off by a hundredth, which no sum of gradients shows."""
    case = CASES["mask-of-heads"]
    name = result.removeprefix("grad ")
    place = sampled(case, operands(case), 2**19).place((0,) * (3 if name == "attn_mask" else 2), name)
    monkeypatch.setattr(exact, "DENSE_WORK", 0)
    assert check(case, "tiled").failure is None
    right = tiled.TiledKernel.backward

    def wrong(*arguments: Any) -> Gradients:
        found: Gradients = right(*arguments)
        getattr(found, name)[place] += 0.01
        return found

    monkeypatch.setattr(tiled.TiledKernel, "backward", wrong)
    failure = check(case, "tiled").failure
    assert failure is not None
    assert (failure.check, failure.result, failure.index) == ("reference", result, place)


def test_a_wrong_row_is_found_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "DENSE_WORK", 0)
    outcome = check(PLAIN.replace(causal=True, grads=""), "attnswitch.verify.mutants:causal-diagonal-hidden")
    assert outcome.failure is not None
    assert (outcome.failure.check, outcome.failure.result) == ("reference", "out")
    assert outcome.failure.index is not None
    assert len(outcome.failure.index) == 4
