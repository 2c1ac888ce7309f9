"""Functions in files, verified: right ones are right in every manner of a call, and wrong ones are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nights
import pytest

from attnswitch import Problem
from attnswitch.verify import Case, Outcome, Plan, Report, check, run, targets
from attnswitch.verify.court import Court, sitting
from attnswitch.verify.report.pytest_file import file_name

FILE = str(Path(__file__).parent / "functions_of_users.py")


def judged(function: str, problem: str, **changes: Any) -> Outcome:
    return check(Case.of(Problem.parse(problem)).replace(**changes), f"{FILE}:{function}")


def verified(function: str, examples: int = 60, **plan: Any) -> Report:
    (target,) = targets(("cpu",), (f"{FILE}:{function}",), longest=70)
    return run(Plan((target,), examples, 0, **plan))


@pytest.mark.parametrize(
    ("function", "problem"),
    nights.some(
        [
            ("like_torch", "b2.h4/2.s5x9.d16.fp32.causal.grad"),
            ("like_torch@torch", "b2.h2.s5x9.d16.bf16.mask=bool:bhqk.scale=0.3"),
            ("like_torch", "b2.h2.s5x9.d16.fp64.mask=fp64:qk.grad=qkvm"),
            ("like_flash", "b2.h4/2.s5x9.d16.fp16.causal-br.window=3,*.softcap=5.lse"),
            ("like_flash", "b2.h4/2.s5x9.d16.fp32.causal-br.alibi.grad"),
            ("like_varlen", "b3.h4/2.s5x9.d16.fp32.causal-br.varlen.grad"),
            ("like_varlen", "b3.h4/2.s5x9.d16.fp32.varlen.lse"),
            ("like_paged", "b3.h4/2.s2x32.d16.fp32.causal-br.lengths.page=16"),
            ("like_tree", "b3.h4/2.s9x32.d16.fp32.causal-br.lengths.page=16.tree"),
            ("like_bhsd@bhsd", "b2.h2.s9.d16.fp32.causal.mask=fp32:hqk.sinks"),
            ("like_bhsd@bhsd+gqa", "b2.h4/2.s9.d16.fp32.scale=-0.25.grad"),
            ("like_bhsd@bhsd+empty", "b2.h2.s5x0.d16.fp32"),
            ("like_bshd@bshd", "b2.h2.s5x9.d16.bf16.softcap=2.grad"),
            ("asserting@bhsd+asserts", "b2.h2.s9.d16.fp32.causal.grad"),
            ("like_xformers@bshd", "b2.h2.s5x9.d16.fp32.scale=0.3.mask=fp32:qk"),
            ("in_two_sides", "b2.h2.s9.d16.fp32.window=3,1"),
            ("in_two_sides", "b2.h2.s9.d16.fp32.window=*,2.grad"),
            ("in_two_sides", "b2.h2.s9.d16.fp32.causal"),
            ("of_a_probability", "b2.h2.s9.d16.fp32.causal"),
            ("like_attnswitch", "b2.h4/2.s5x9.d16.fp32.causal-br.window=3,*.lse.grad"),
            ("in_numpy@bhsd", "b2.h2.s9.d16.fp16.causal"),
            ("Forward.apply@bhsd", "b2.h2.s9.d16.fp32.causal"),
            ("detached", "b2.h2.s9.d16.fp32.causal"),
        ]
    ),
)
def test_a_right_function_is_right_as_it_is_called(function: str, problem: str) -> None:
    outcome = judged(function, problem)
    assert (outcome.verdict, outcome.reasons, outcome.failure) == ("verified", (), None)


@pytest.mark.parametrize("function", ["like_torch", "like_attnswitch", "Forward.apply@bhsd"])
@pytest.mark.parametrize("problem", ["b1.h1.s3x5.d8.fp32.grad", "b1.h2.s3x5.d8.fp32.lse.grad"])
def test_what_torch_casts_is_no_fault_of_a_function(function: str, problem: str) -> None:
    """A backward of matrix products, in a region of autocast, which is not of the function's making."""
    outcome = judged(function, problem, library="torch", check="autocast")
    assert outcome.failure is None
    assert (outcome.verdict == "verified") == ("autocast" in outcome.checks), outcome.reasons


#: Called in other ways: drawn at night.
OTHERS = ("like_flash", "like_varlen", "like_bhsd@bhsd+gqa", "like_bshd@bshd", "like_attnswitch", "in_numpy@bhsd")


@pytest.mark.parametrize(
    "function",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("like_torch", "like_paged")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS),
    ],
)
def test_a_right_function_is_right_in_drawn_cases(function: str) -> None:
    report = verified(function)
    assert [(found.outcome.case, found.outcome.failure) for found in report.failures] == []
    assert report.verified > 30


@pytest.mark.parametrize(
    ("function", "problem", "check", "message"),
    nights.some(
        [
            ("without_scale", "b1.h2.s5x9.d16.fp32", "reference", "elements are off"),
            ("softcap_ignored@bhsd", "b1.h2.s5x9.d16.fp32.softcap=0.5", "reference", "elements are off"),
            ("causal_from_the_wrong_corner", "b1.h2.s5x9.d16.fp32.causal", "reference", "elements are off"),
            ("sides_swapped", "b1.h2.s9.d16.fp32.window=3,1", "reference", "elements are off"),
            ("like_bshd@bhsd", "b1.h2.s5x9.d16.fp32", "crash", "AssertionError"),
            ("returns_a_pair", "b1.h2.s5.d16.fp32", "crash", "returned a tuple of 2 as its output: expected an array"),
            ("lse_forgotten@bhsd", "b1.h2.s5.d16.fp32.lse", "crash", "a Tensor where output and lse were asked for"),
            ("raises", "b1.h2.s5.d16.fp32", "crash", "ValueError: head dimension 16"),
            ("raises@bhsd+asserts", "b1.h2.s5.d16.fp32", "crash", "ValueError: head dimension 16"),
            (
                "asserting@bhsd",
                "b1.h2.s5.d8.fp32",
                "crash",
                "AssertionError: q.shape[-1] in {16, 32}; if what it asserts",
            ),
        ]
    ),
)
def test_a_wrong_function_is_found(function: str, problem: str, check: str, message: str) -> None:
    failure = judged(function, problem).failure
    assert failure is not None
    assert failure.check == check
    assert message in failure.message


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("causal_from_the_wrong_corner", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("without_scale", "softcap_ignored@bhsd")),
    ],
)
def test_a_wrong_function_is_found_by_drawing(function: str) -> None:
    report = verified(function, shrink_tries=5, max_failures=1)
    assert {found.outcome.failure.check for found in report.failures if found.outcome.failure} == {"reference"}


def test_a_shift_is_told_with_the_mask_that_makes_it() -> None:
    failure = judged("pads_its_mask", "b1.h1.s1x2.d8.fp32", check="shift").failure
    assert failure is not None
    assert "added to every score by a mask of (1, 1, 1, 1), changes it" in failure.message


@pytest.mark.slow
def test_one_fault_does_not_hide_another_of_the_same_check() -> None:
    report = verified("wrong_in_four_ways@bhsd", shrink_tries=5)
    told = sorted((found.outcome.kind[2:], found.outcome.case.seq_k) for found in report.failures)
    assert [kind for kind, _ in told] == [
        ("crash", "KeyError"),
        ("crash", "ValueError"),
        ("reference", "out"),
        ("reference", "out, not finite"),
    ]
    assert told[2][1] <= 16 < told[3][1]
    failures = [found.outcome.failure for found in report.failures if found.outcome.failure is not None]
    assert len({file_name("function", "cpu", failure) for failure in failures}) == 4


@pytest.mark.parametrize(
    ("function", "problem", "reason"),
    [
        ("without_scale", "b1.h2.s9.d16.fp32.scale=0.3", "scale=0.3: without_scale() takes no scale"),
        ("without_scale", "b1.h2.s9.d16.fp32.window=2,*", "without_scale() takes no window_size"),
        ("without_scale", "b1.h2.s9.d16.fp32.softcap=2", "softcap=2.0: without_scale() takes no softcap"),
        ("without_scale", "b1.h2.s9.d16.fp32.mask=bool:qk", "attn_mask (bool): without_scale() takes no attn_mask"),
        ("without_scale", "b1.h2.s9.d16.fp32.lengths", "key_lengths: without_scale() takes no key_lengths"),
        ("without_scale", "b1.h2.s9.d16.fp32.lse", "return_lse: without_scale() takes no return_lse"),
        ("without_scale", "b1.h2.s9.d16.fp32.dropout=0.5", "without_scale() takes no dropout_p"),
        ("without_scale", "b1.h2.s9.d16.fp32.deterministic", "without_scale() takes no deterministic"),
        ("without_scale", "b1.h2.s9.d16.fp32.sinks", "sinks: its kernels know of none"),
        ("without_scale", "b1.h4/2.s9.d16.fp32", "4 query heads, 2 key heads: without_scale() takes no enable_gqa"),
        ("without_scale", "b1.h2.s5x9.d16.fp32.causal-br", "like torch, and it counts positions top-left"),
        ("like_bhsd@bhsd", "b1.h2.s5x0.d16.fp32", "batch 1, 5 queries, 0 keys: that like_bhsd() takes none of one"),
        ("like_bhsd@bhsd", "b1.h2.s5x9.d16.fp32.causal", "where positions count from is not known"),
        ("like_bhsd@bhsd", "b1.h2.s9.d16.fp32.mask=bool:qk", "attn_mask (bool): like_bhsd() takes no attn_mask"),
        ("like_torch", "b1.h2.s9.d16.fp32.causal.mask=bool:qk", "like torch, whose is_causal stands for a mask"),
        ("like_torch", "b1.h2.s9.d16.bf16.mask=fp32:qk", "attn_mask is float32 and query bfloat16"),
        ("like_torch", "b1.h2.s9.d16.fp32.dropout=0.5", "like_torch() raises NotImplementedError: no dropout here"),
        ("like_xformers@bshd", "b1.h2.s9.d16.fp32.dropout=0.5", "NotImplementedError: no dropout of 0.5 here"),
        ("of_a_probability", "b1.h2.s9.d16.fp32.dropout=0.5", "of_a_probability() takes no dropout_p"),
        ("on_one_side", "b1.h2.s9.d16.fp32.window=2,*", "on_one_side() takes no window_size"),
        ("like_torch", "b1.h2.s9.d16.fp32.dropout=0.5.seeded", "draws from a generator of its own"),
        ("like_flash", "b1.h2.s9.d16.fp32.lse.grad", "the lse of flash-attn is not differentiable"),
        ("like_varlen", "b1.h2.s9.d16.fp32", "a dense batch: like_varlen() takes sequences one after another"),
        ("like_paged", "b1.h2.s9.d16.fp32", "no pages: like_paged() takes keys in pages"),
        ("like_paged", "b2.h2.s2x32.d16.fp32.causal-br.varlen.lengths.page=16", "like_paged() takes no cu_seqlens_q"),
        ("like_paged", "b2.h2.s2x32.d16.fp32.lengths.page=16.tree", "tree_mask: its kernels read no mask beside pages"),
        ("asserting@bhsd+asserts", "b1.h2.s9.d8.fp32", "asserting() asserts: q.shape[-1] in {16, 32}"),
        ("asserting@bhsd+asserts", "b1.h2.s9.d16.fp16", "asserting() asserts: torch.float16 is not float32"),
        ("in_numpy@bhsd", "b1.h2.s9.d16.bf16", "dtype bfloat16: numpy has none"),
        ("in_numpy@bhsd", "b1.h2.s9.d16.fp32.grad", "in_numpy() returns arrays of numpy, which have none"),
        (
            "Forward.apply@bhsd",
            "b1.h2.s9.d16.fp32.grad",
            "the torch.autograd.Function of Forward.apply() has no backward",
        ),
        ("detached", "b1.h2.s9.d16.fp32.grad", "detached() returns an output without a graph"),
    ],
)
def test_what_the_signature_does_not_say_is_refused(function: str, problem: str, reason: str) -> None:
    outcome = judged(function, problem)
    assert outcome.verdict == "refused"
    assert any(reason in told for told in outcome.reasons), outcome.reasons


def test_nan_at_hidden_positions_is_not_asked_of_who_promises_nothing() -> None:
    said: dict[str, Any] = {"causal": True, "seq_q": 9, "seq_k": 9, "poison": True, "library": "numpy"}
    outcome = check(Case(**said), f"{FILE}:like_torch")
    assert (outcome.verdict, "hidden positions weigh 0" in outcome.reasons[0]) == ("refused", True)


@pytest.mark.parametrize("grads", ["", "qkv"])
def test_parts_of_a_function_that_starts_over(grads: str) -> None:
    """In the court as out of it: outputs of parts are merged, and their gradients refused, each being its own."""
    case = Case.of(Problem.parse("b1.h2.s3x16.d8.fp32.lse")).replace(parts=2, grads=grads)
    name = f"{FILE}:like_attnswitch"
    with sitting(Court((name,))):
        outcome = check(case, name)
    for each in (outcome, check(case, name)):
        assert each.failure is None
        assert each.verdict == ("refused" if grads else "verified")
        assert not grads or "from an output and lse of its own" in each.reasons[0]


@pytest.mark.parametrize(
    "shared", ["", "entries", "heads", "rows", "columns", "eighths", "sixths", "planes", "diagonals"]
)
def test_a_dropout_mask_is_one_for_nothing(shared: str) -> None:
    case = Case.of(Problem.parse("b3.h2.s20x24.d24.fp32.dropout=0.3")).replace(check="fresh-dropout")
    outcome = check(case, f"{FILE}:dropping{'_one_for_' * bool(shared)}{shared}@bhsd")
    if not shared:
        assert (outcome.verdict, outcome.reasons, outcome.failure) == ("verified", (), None)
        return
    assert outcome.failure is not None
    assert outcome.failure.check == "fresh-dropout"
    apart = {"entries": "batch entries that are 1", "heads": "heads that are 1", "rows": "queries that are 1"}
    apart |= {"columns": "keys that are 1", "eighths": "keys that are 8", "sixths": "keys that are 6"}
    what = {name: f"{text} apart" for name, text in apart.items()}
    what |= {"planes": "batch entries and heads of one sum", "diagonals": "queries and keys of one sum"}
    assert outcome.failure.message == f"{what[shared]} drop the same weights"


def test_a_result_in_the_memory_of_an_input() -> None:
    case, name = Case.of(Problem.parse("b2.h2.s1.d8.fp32")), f"{FILE}:giving_its_values@bhsd"
    failure = check(case, name).failure
    assert failure is not None
    assert (failure.check, failure.result) == ("inputs", "out")
    assert failure.message == "it lies in the memory of value: whoever writes to it changes an input"
    with sitting(Court((name,))):
        failure = check(case, name).failure
    assert failure is not None
    assert "its result lies in the memory of its inputs" in failure.message
