"""A misspelt name gets a suggestion, wherever names are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch import InvalidProblem, Problem
from attnswitch.bench.overhead.rows import rows
from attnswitch.call import finite
from attnswitch.machine.device import Device
from attnswitch.names import meant, one_of
from attnswitch.planning import policy
from attnswitch.tune.problems import of_model

KNOWN = ("sdpa-math", "sdpa-flash", "triton", "cuda", "BHLD", "BLHD", "reference")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("sdpa-flsh", "sdpa-flash"),
        ("sdpa_math", "sdpa-math"),
        ("Triton", "triton"),
        ("blhd", "BLHD"),
        ("refrence", "reference"),
        ("CUDA", "cuda"),
    ],
)
def test_what_is_nearly_a_name(name: str, word: str) -> None:
    assert meant(name, KNOWN) == f"; did you mean '{word}'?"
    assert one_of(name, KNOWN, ", or None") == f"expected one of {', '.join(KNOWN)}, or None; did you mean '{word}'?"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "flash-attn",
        "xyz",
        None,
        7,
        "BHSD",  # as near to one layout as to the other
        "sdpa",
    ],
)
def test_no_name_is_better_than_a_wrong_one(name: object) -> None:
    assert meant(name, KNOWN) == ""
    assert meant(name, ()) == ""


QUERY = np.ones((1, 1, 4, 8), np.float32)
TEXT = "b1.h1.s4.d8.fp32"
LOOKED_UP: dict[str, tuple[Callable[[], Any], str]] = {
    "backend": (lambda: attnswitch.attention(QUERY, QUERY, QUERY, backend="sdpa-mth"), "sdpa-math"),
    "policy": (lambda: attnswitch.attention(QUERY, QUERY, QUERY, policy="mesure"), "measure"),
    "policy of using": (lambda: attnswitch.using("wisdom_only").__enter__(), "wisdom-only"),
    "layout": (lambda: attnswitch.attention(QUERY, QUERY, QUERY, layout="blhd"), "BLHD"),
    "layout of merge": (lambda: attnswitch.merge([QUERY], [QUERY[..., 0]], layout="bhld"), "BHLD"),
    "alignment": (
        lambda: attnswitch.attention(QUERY, QUERY, QUERY, causal_alignment="bottomright"),  # type: ignore[arg-type]
        "bottom_right",
    ),
    "keyword of attention": (
        lambda: attnswitch.attention(QUERY, QUERY, QUERY, causal=True),  # type: ignore[arg-type]
        "is_causal",
    ),
    "keyword of a plan's call": (
        lambda: attnswitch.plan(QUERY, QUERY, QUERY)(QUERY, QUERY, QUERY, attn_masks=None),  # type: ignore[arg-type]
        "attn_mask",
    ),
    "field of a Problem": (lambda: Problem(1, 1, 1, 4, 4, 8, 8, dtype="float32", is_causal=True), "causal"),
    "another field of a Problem": (lambda: Problem.parse(TEXT).replace(dropout_p=0.1), "dropout"),
    "keyword of plan": (lambda: attnswitch.plan(QUERY, QUERY, QUERY, attn_masks=None), "attn_mask"),
    "option of plan": (lambda: attnswitch.plan(QUERY, QUERY, QUERY, is_casual=True), "is_causal"),
    "keyword of attention_backward": (
        lambda: attnswitch.attention_backward(QUERY, QUERY, QUERY, QUERY, grads_lse=QUERY[..., 0]),
        "grad_lse",
    ),
    "flag of a problem": (lambda: Problem.parse(f"{TEXT}.casual"), "causal"),
    "dtype of a problem": (lambda: Problem.parse("b1.h1.s4.d8.bf61"), "bf16"),
    "option of a problem": (lambda: Problem.parse(f"{TEXT}.windw=3,0"), "window"),
    "dtype of a mask": (lambda: Problem.parse(f"{TEXT}.mask=boool"), "bool"),
    "memory of an operand": (lambda: Problem.parse(f"{TEXT}.k=expnded"), "expanded"),
    "dtype of a Problem": (lambda: Problem(1, 1, 1, 4, 4, 8, 8, dtype="flaot32"), "float32"),
    "device": (lambda: Device.named("h20O"), "h200"),
    "model": (lambda: of_model("lama-3-8b"), "llama-3-8b"),
    "section": (lambda: rows("cpu", ("trainin",)), "training"),
}


@pytest.mark.parametrize("what", LOOKED_UP)
def test_wherever_a_name_is_looked_up(what: str) -> None:
    look_up, word = LOOKED_UP[what]
    with pytest.raises(InvalidProblem, match=rf"; did you mean '{word}'\?$"):
        look_up()


def test_a_plan_was_told_what_its_call_may_not_be() -> None:
    plan = attnswitch.plan(QUERY, QUERY, QUERY)
    with pytest.raises(InvalidProblem, match=r"a plan's call has no keyword 'is_causal': .*attnswitch\.plan takes"):
        plan(QUERY, QUERY, QUERY, is_causal=True)  # type: ignore[arg-type]


def test_what_takes_any_keywords_is_none_itself() -> None:
    with pytest.raises(InvalidProblem, match=r"'option'; the keywords are those of attention$"):
        attnswitch.plan(QUERY, QUERY, QUERY, option=1)


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_POLICY", "estimat")
    with pytest.raises(InvalidProblem, match="did you mean 'estimate'"):
        policy.of_process.__wrapped__()
    monkeypatch.setenv("ATTNSWITCH_CHECK_FINITE", "allways")
    with pytest.raises(InvalidProblem, match="did you mean 'always'"):
        finite.of_process.__wrapped__()
