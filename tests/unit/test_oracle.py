"""The references against each other, against finite differences, and against arithmetic with fifty digits."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from attnswitch import VerificationError
from attnswitch.problem.philox import keep_mask
from attnswitch.verify import Case, MaskRecipe, Space, cases
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.truth import oracle, rows
from attnswitch.verify.truth.oracle import Answer

#: Everything at once, small: grouped heads, unequal dimensions, a float mask, a softcap, a window, lengths and lse.
FULL = Case(
    batch=2,
    heads_kv=1,
    group=2,
    seq_q=3,
    seq_k=4,
    dim_qk=2,
    dim_v=3,
    dtype="float64",
    window=(1, 1),
    lengths=(4, 3),
    mask=MaskRecipe("float64", "hk", 4, "smooth"),
    scale=0.8,
    softcap=1.5,
    lse=True,
    grads="qkvm",
)
GRADIENT_CASES = {
    "full": FULL,
    "plain": Case(batch=2, seq_q=2, seq_k=3, dim_qk=2, dim_v=2, dtype="float64", grads="qkv"),
    "causal-bottom-right": FULL.replace(causal=True, alignment="bottom_right", window=None, lengths=None),
    "dead-row": FULL.replace(window=(0, 0), lengths=(4, 0)),
    "negative-scale": FULL.replace(scale=-0.5, softcap=0.0),
    "hidden-by-mask": FULL.replace(mask=MaskRecipe("float64", "bhqk", 4, "dead-rows"), window=None),
    "dropout": FULL.replace(dropout=0.5, dropout_seed=3),
    "grouped-causal": FULL.replace(heads_kv=2, causal=True, softcap=0.0, mask=None, grads="qkv"),
}


def kept(case: Case) -> Any:
    if not case.dropout:
        return None
    b, h, lq, lk = case.scores
    batches, heads, queries = np.ogrid[:b, :h, :lq]
    return keep_mask(case.dropout_seed or 0, case.dropout, batches, heads, queries, 0, lk)


def answered(case: Case, data: dict[str, Any]) -> Answer:
    return oracle.answer(case, data, kept(case))


# -- the two forms -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(cases(Space(work=2**13, longest=70)))
def test_the_two_forms_agree_on_every_row(case: Case) -> None:
    case = case.replace(poison=False)
    data = operands(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SAMPLE", 10**6)  # all rows, and so the gradients of all keys
        rows.cross_check(data, answered(case, data))


@pytest.mark.parametrize("name", ["out", "lse", "query", "key", "value"])
def test_any_perturbed_element_is_seen(name: str) -> None:
    case = FULL.replace(batch=1, heads_kv=1, lengths=(3,), causal=True, alignment="bottom_right", window=(1, 0))
    data = operands(case)
    answer = answered(case, data)
    rows.cross_check(data, answer)
    assert len(list(np.ndindex(case.scores[:3]))) <= rows.SAMPLE
    exact = answer.values[name]
    for index in np.ndindex(exact.shape):
        wrong = exact.copy()
        wrong[index] = 0.0 if np.isinf(exact[index]) else exact[index] + 1e-6
        with pytest.raises(VerificationError, match=f"the two float64 references disagree on {name} at"):
            rows.cross_check(data, replace(answer, values={**answer.values, name: wrong}))


def test_a_wrong_visibility_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data = operands(FULL)
    answer = answered(FULL, data)
    assert not answer.visible.all()
    right = rows.sees
    monkeypatch.setattr(rows, "sees", lambda case, *place: right(case, *place) or place[-1] == 0)
    with pytest.raises(VerificationError, match="no verdict can be given"):
        rows.cross_check(data, answer)


def test_many_rows_are_sampled_at_both_ends() -> None:
    case = Case(seq_q=100, seq_k=8, dtype="float64")
    data = operands(case)
    answer = answered(case, data)
    for row in (0, 99):
        wrong = answer.values["out"].copy()
        wrong[0, 0, row, 0] += 1e-6
        with pytest.raises(VerificationError, match=rf"disagree on out at \(0, 0, {row}\)"):
            rows.cross_check(data, replace(answer, values={**answer.values, "out": wrong}))


# -- gradients ---------------------------------------------------------------------------------------------------------


def objective(case: Case, data: dict[str, Any]) -> float:
    """What the gradients are of: the results against their upstream gradients."""
    answer = answered(case, data)
    lse = np.where(np.isfinite(answer.values["lse"]), answer.values["lse"], 0.0)
    return float((answer.values["out"] * data["grad_out"]).sum() + (lse * data["grad_lse"]).sum())


def slopes(case: Case, data: dict[str, Any], role: str, step: float) -> Any:
    """Central differences of ``objective`` by every element of one operand."""
    found = np.zeros(data[role].shape)
    for index in np.ndindex(found.shape):
        sides = []
        for sign in (1.0, -1.0):
            moved = {**data, role: data[role].copy()}
            moved[role][index] += sign * step
            sides.append(objective(case, moved))
        found[index] = (sides[0] - sides[1]) / (2.0 * step)
    return found


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_are_the_slopes_of_the_output(name: str) -> None:
    case = GRADIENT_CASES[name]
    data = operands(case)
    answer = answered(case, data)
    roles = {"q": "query", "k": "key", "v": "value", "m": "attn_mask"}
    for role in (roles[letter] for letter in case.grads):
        wanted = slopes(case, data, role, 1e-5)
        assert np.abs(wanted).max() > 1e-2  # a test of zeros would say nothing
        np.testing.assert_allclose(answer.values[role], wanted, rtol=1e-6, atol=2e-8, err_msg=role)


# -- fifty digits ------------------------------------------------------------------------------------------------------


def precisely(case: Case, data: dict[str, Any], mp: Any) -> tuple[dict[tuple[int, ...], Any], Any]:
    """Outputs and lse by place, (b, h, i, column) and (b, h, i), and the objective; by the formula in mpmath."""
    found: dict[tuple[int, ...], Any] = {}
    total = mp.mpf(0)
    for b, h, i in np.ndindex(case.scores[:3]):
        left, right = case.window or (None, None)
        seen = [j for j in range(case.seq_k) if i - (left or 0) <= j <= i + (right or 0) or case.window is None]
        weights = []
        for j in seen:
            dot = sum(
                mp.mpf(data["query"][b, h, i, d]) * data["key"][b, h // case.group, j, d] for d in range(case.dim_qk)
            )
            s = mp.mpf(case.softmax_scale) * dot
            s = case.softcap * mp.tanh(s / case.softcap) if case.softcap else s
            if case.mask is not None:
                s += np.broadcast_to(data["attn_mask"], case.scores)[b, h, i, j]
            weights.append(mp.exp(s))
        found[b, h, i] = mp.log(sum(weights))
        total += found[b, h, i] * data["grad_lse"][b, h, i]
        for column in range(case.dim_v):
            values = [data["value"][b, h // case.group, j, column] for j in seen]
            out = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
            found[b, h, i, column] = out
            total += out * data["grad_out"][b, h, i, column]
    return found, total


@pytest.mark.parametrize("name", ["full", "plain", "negative-scale"])
def test_fifty_digits_agree(name: str) -> None:
    mp: Any = importlib.import_module("mpmath")
    case = GRADIENT_CASES[name].replace(batch=1, lengths=None)
    data = {role: array.astype(object) for role, array in operands(case).items()}
    answer = answered(case, operands(case))
    with mp.workdps(50):
        exact, _ = precisely(case, data, mp)
        for place, value in exact.items():
            ours = answer.values["out" if len(place) == 4 else "lse"][place]
            assert abs(ours - value) < 4e-15 * (1 + abs(value)), place
        step = mp.mpf(10) ** -15
        for letter, role in zip("qkvm", ("query", "key", "value", "attn_mask"), strict=True):
            for index in np.ndindex(data[role].shape) if letter in case.grads else ():
                sides = []
                for sign in (1, -1):
                    moved = {**data, role: data[role].copy()}
                    moved[role][index] = mp.mpf(moved[role][index]) + sign * step
                    sides.append(precisely(case, moved, mp)[1])
                slope = (sides[0] - sides[1]) / (2 * step)
                assert abs(answer.values[role][index] - slope) < 4e-15 * (1 + abs(slope)), (role, index)
