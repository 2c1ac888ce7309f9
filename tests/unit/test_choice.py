"""The choice by what was measured and found wrong on this machine, under each policy."""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import attnswitch
from attnswitch import Device, InvalidProblem, Plan, Policy, Problem, Unsupported
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.planning import policy
from attnswitch.problem import CONTIGUOUS
from attnswitch.verify import Case
from attnswitch.verify.session.plan import Plan as Verification
from attnswitch.verify.session.plan import targets
from attnswitch.verify.session.whole import run
from attnswitch.wisdom import store, view
from attnswitch.wisdom.record import Time, Untimed, Verdict
from attnswitch.wisdom.signature import Signature, sign

Register = Callable[[str, str], None]
CPU = Device.cpu()
TEXT = "b2.h4.s64.d32.fp32"


def signature(backend: str) -> Signature:
    signed = sign(backend, CPU)
    assert isinstance(signed, Signature)
    return signed


def time(backend: str, ms: float, text: str = TEXT) -> Time:
    return Time(Problem.parse(text), backend, "", ms, ms, ms, 30, 2, signature(backend), "2026-11-20T10:00:00")


def fault(backend: str, text: str = TEXT) -> Verdict:
    seen = "2026-11-20T10:00:00"
    return Verdict(Problem.parse(text), backend, False, "some-case.json", "reference: out", signature(backend), seen)


def untimed(backend: str, text: str) -> Untimed:
    return Untimed(Problem.parse(text), backend, "it took 90 times as long", signature(backend), "2026-11-20T10:00:00")


def reasons(plan: Plan, backend: str) -> str:
    (candidate,) = (c for c in plan.candidates if c.backend == backend)
    return "\n".join(plan.why_not(candidate))


def tensors(length: int = 64, heads: int = 4) -> Any:
    return (torch.randn(2, heads, length, 32) for _ in range(3))


# -- the choice --------------------------------------------------------------------------------------------------------


def test_the_fastest_measured_is_chosen_and_explained() -> None:
    view.remember([time("sdpa-flash", 3.0), time("tiled", 1.0)])
    plan = attnswitch.explain("b2.h4.s70.d32.fp32")
    assert plan.backend == "tiled"
    assert plan.why == "measured here on 2026-11-20, on b2.h4.s64.d32.fp32: tiled 1 ms, sdpa-flash 3 ms"
    assert reasons(plan, "sdpa-flash") == "it takes the problem, but took 3 ms against 1"
    assert reasons(plan, "sdpa-math") == "it takes the problem, but was not measured here"
    assert attnswitch.plan("b2.h4.s8192.d32.fp32").backend == "sdpa-flash"  # another class, far away


def test_the_nearest_that_was_measured_serves_where_nothing_of_the_class_was() -> None:
    view.remember([time("sdpa-flash", 3.0), time("tiled", 1.0)])
    near = attnswitch.explain("b2.h6.s64.d32.fp32")
    assert near.backend == "tiled"
    assert near.why == (
        "nothing like it was measured; on the nearest here, b2.h4.s64.d32.fp32, each took as many times as long as the"
        " fastest: tiled 1, sdpa-flash 3"
    )
    assert reasons(near, "sdpa-flash") == (
        "it takes the problem, but took 3 times as long as tiled on the nearest that were measured"
    )
    assert reasons(near, "sdpa-math") == "it takes the problem, but was not measured here"
    assert near.open  # measuring could change it yet
    with pytest.raises(Unsupported, match="the policy is wisdom-only"):
        attnswitch.plan("b2.h6.s64.d32.fp32", policy="wisdom-only")
    for other in (
        "b2.h6.s64.d32.fp32.grad",
        "b2.h6.s64.d32.bf16",
        "b2.h6.s64.d32.fp32.mask=bool:bk",
        "b2.h6.s64.d32.fp32.lengths",
        "b2.h6.s1x64.d32.fp32",
    ):
        assert attnswitch.plan(other).backend == "sdpa-flash", other


def test_what_ties_on_another_problem_goes_by_the_declared_order() -> None:
    view.remember([time("sdpa-flash", 1.015), time("sdpa-math", 1.2), time("tiled", 1.0)])
    near = attnswitch.explain("b2.h6.s64.d32.fp32")
    assert near.backend == "sdpa-flash"
    assert near.why.endswith("sdpa-math 1.2; as fast, as far as that tells, sdpa-flash comes first in the order")
    assert reasons(near, "tiled") == (
        "it takes the problem, and took 0.985 times as long as sdpa-flash on the nearest that were measured: too little"
        " to go before it in the order"
    )
    assert attnswitch.plan(TEXT).backend == "tiled"  # where it was measured it counts


def test_three_of_the_nearest_are_asked_the_nearer_the_more() -> None:
    """The nearest alone would have tiled, and so would all four: by how many times as long, whatever each takes."""
    for heads, flash, tiled in ((8, 1.1, 1.0), (12, 2.0, 6.0), (6, 0.1, 0.2), (16, 90.0, 0.1)):
        text = f"b2.h{heads}.s64.d32.fp32"
        view.remember([time("sdpa-flash", flash, text), time("tiled", tiled, text)])
    near = attnswitch.explain("b2.h9.s64.d32.fp32")
    assert near.backend == "sdpa-flash"
    assert "here, b2.h8.s64.d32.fp32, b2.h12.s64.d32.fp32, b2.h6.s64.d32.fp32, each" in near.why
    weights = [1 / (0.25 + abs(math.log2(9 / heads)) / 2) ** 2 for heads in (8, 12, 6)]
    logs = [math.log(times) for times in (1 / 1.1, 3, 2)]
    mean = math.exp(sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights))
    assert reasons(near, "tiled").startswith(f"it takes the problem, but took {mean:.3g} times as long as sdpa-flash")


@pytest.mark.parametrize("slow", [8, 16])
def test_what_took_far_too_long_on_one_of_the_nearest_counts_too(slow: int) -> None:
    """Judged where it did well alone, it would be the fastest."""
    there, elsewhere = f"b2.h{slow}.s64.d32.fp32", f"b2.h{24 - slow}.s64.d32.fp32"
    view.remember([untimed("sdpa-flash", there), time("tiled", 1.0, there)])
    view.remember([time("sdpa-flash", 1.0, elsewhere), time("tiled", 1.2, elsewhere)])
    near = attnswitch.explain("b2.h11.s64.d32.fp32")
    assert near.backend == "tiled"
    assert "times as long as tiled on the nearest" in reasons(near, "sdpa-flash")


def test_a_class_where_nothing_could_be_timed_is_passed_over() -> None:
    view.remember([untimed(name, "b2.h8.s64.d32.fp32") for name in ("sdpa-flash", "tiled")])
    view.remember([time("sdpa-flash", 3.0, "b2.h16.s64.d32.fp32"), time("tiled", 1.0, "b2.h16.s64.d32.fp32")])
    assert attnswitch.explain("b2.h9.s64.d32.fp32").backend == "tiled"


def test_one_query_at_the_last_key_is_near_one_that_says_nothing_of_causal() -> None:
    """It sees every key either way, and no kernel needs a mask for it."""
    kept = "b2.h4.s1x512.d32.fp32"
    view.remember([time("sdpa-flash", 3.0, kept), time("tiled", 1.0, kept)])
    assert attnswitch.plan("b2.h4.s1x600.d32.fp32.causal-br").backend == "tiled"
    assert attnswitch.plan("b2.h4.s1x600.d32.fp32.causal-br.lengths").backend == "sdpa-flash"


def test_times_of_others_alone_say_nothing_against_the_first_in_the_order() -> None:
    """As after a new torch came: what it has must be measured again, and NumPy's kernels need not."""
    view.remember([time("tiled", 1.0), time("reference", 2.0)])
    for text in (TEXT, "b2.h6.s64.d32.fp32"):
        assert attnswitch.plan(text).backend == "sdpa-flash"
    plan = attnswitch.explain(TEXT)
    assert plan.why == (
        "first in the declared order that takes the problem; others alone were measured with the versions of now"
    )
    assert reasons(plan, "tiled") == "it takes the problem, but stands behind sdpa-flash in the declared order"
    assert attnswitch.plan(TEXT, policy="wisdom-only").backend == "tiled"
    view.remember([untimed("sdpa-flash", TEXT)])
    assert attnswitch.plan(TEXT).backend == "tiled"


def test_where_others_alone_were_measured_the_nearest_are_asked() -> None:
    near = "b2.h8.s64.d32.fp32"
    view.remember(
        [time("tiled", 1.0), *(time(name, ms, near) for name, ms in (("sdpa-flash", 3.0), ("sdpa-math", 1.0)))]
    )
    plan = attnswitch.explain(TEXT)
    assert plan.backend == "sdpa-math"
    assert reasons(plan, "tiled") == (
        "it takes the problem, and took 1 ms, but what comes before it in the order was not measured beside it"
    )


def test_times_of_unlike_problems_are_compared_by_their_work() -> None:
    """Both are of one class: the second has four times the work of the first."""
    view.remember([time("sdpa-flash", 1.0, "b2.h4.s46.d32.fp32"), time("tiled", 3.0, "b2.h4.s90.d32.fp32")])
    plan = attnswitch.explain("b2.h4.s70.d32.fp32")
    assert plan.backend == "tiled"
    assert reasons(plan, "sdpa-flash") == "it takes the problem, but took 1 ms on b2.h4.s46.d32.fp32 against 3"


def test_wisdom_of_what_refuses_is_not_used() -> None:
    """A time may come from a neighbour in the class that the backend takes."""
    view.remember([time("sdpa-flash", 0.1), time("sdpa-math", 1.0)])
    plan = attnswitch.plan("b2.h4.s64.d32.fp32.nonfinite")
    assert plan.backend != "sdpa-flash"


def test_a_backend_that_was_wrong_here_is_left_out_with_the_case() -> None:
    view.remember([fault("sdpa-flash"), time("sdpa-flash", 0.1)])
    plan = attnswitch.plan("b4.h4.s512.d64.fp32.causal")
    assert plan.backend == "sdpa-math"
    assert reasons(plan, "sdpa-flash") == (
        "it was wrong on this machine on 2026-11-20: reference: out (case some-case.json, b2.h4.s64.d32.fp32); it is"
        " left out until another version gets that case right, or until `attnswitch wisdom forget --backend sdpa-flash`"
    )
    assert attnswitch.plan("b1.h1.s8.d8.fp32").backend == "sdpa-flash"  # smaller than where it was seen
    assert attnswitch.plan(TEXT, backend="sdpa-flash").backend == "sdpa-flash"  # who names it gets it


def test_nothing_that_may_be_chosen_raises_with_every_case() -> None:
    every = ("sdpa-flash", "sdpa-math", "tiled", "reference")
    view.remember([fault(backend) for backend in every])
    with pytest.raises(Unsupported, match="no backend may be chosen for this problem") as caught:
        attnswitch.attention(*tensors())
    assert str(caught.value).count("some-case.json") == len(every)


def test_an_explanation_is_printed_as_it_is() -> None:
    view.remember([replace(fault("tiled"), case="\x1b]0;title\x07", why="\x1b[31m")])
    text = str(attnswitch.plan(TEXT))
    assert r"\x1b]0;title\x07" in text
    assert not {*"\x1b\x07"} & {*text}


def test_damaged_wisdom_breaks_no_call(no_wisdom: Path) -> None:
    for content in (b"\xff\xfe\0", b'{"schema":1}\n', b"[]\n" * 3):
        (no_wisdom / store.NAME).write_bytes(content)
        view.reload()
        assert attnswitch.attention(*tensors()).shape == (2, 4, 64, 32)


def test_wisdom_of_great_sizes_breaks_no_call() -> None:
    """They share no class with the call, and are near to it as far as anybody knows."""
    for text in (
        "b9223372036854775807.h4.s64.d32.fp32",
        "b2.h4.s9223372036854775807.d32.fp32.window=9223372036854775807,0",
        "b2.h4.s64x9223372036854775806.d32.fp32.page=3.lengths",
        "b2.h9223372036854775807.s64.d9223372036854775807.fp32",
    ):
        view.remember([time("sdpa-flash", 1e9, text), time("tiled", 1e-6, text)])
        assert str(attnswitch.plan(text))
    view.reload()
    assert attnswitch.attention(*tensors()).shape == (2, 4, 64, 32)
    assert str(attnswitch.explain(*tensors()))


def test_a_store_that_cannot_be_reached_breaks_no_call(
    no_wisdom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path / "file" / "below"))
    view.reload()
    assert attnswitch.attention(*tensors(), policy="measure").shape == (2, 4, 64, 32)
    assert attnswitch.plan(TEXT).chosen.time is not None  # type: ignore[union-attr]


def test_a_clock_that_was_put_back_hides_no_later_time() -> None:
    def known() -> float:
        found = view.current().time("tiled", Problem.parse(TEXT), Device.parse("cpu"))
        assert isinstance(found, Time)
        return found.ms

    view.remember([replace(time("tiled", 1.0), date="2999-01-01T00:00:00")])
    assert known() == 1.0
    view.remember([replace(time("tiled", 3.0), date=view.now())])
    assert known() == 3.0
    view.reload()  # as another process reads it
    assert known() == 3.0
    view.remember([time("tiled", 1.0)])  # of an earlier date, as an import may have it
    assert known() == 3.0


def test_a_config_is_compiled_as_it_was_measured(register: Register) -> None:
    register("tunable", f"{__name__}:Tunable")
    view.remember([time("tunable", 0.1)])
    known = time("tunable", 0.1)
    for config, built in (("Width(columns=4)", 4), ("", 1), ("Width(columns=99)", 1)):
        view.remember([replace(known, config=config, date=view.now())])
        Tunable.built.clear()
        plan = attnswitch.plan(TEXT)
        assert plan.backend == "tunable"
        plan(*tensors())
        assert Tunable.built == [built]


# -- policies ----------------------------------------------------------------------------------------------------------


def test_what_has_no_output_needs_no_wisdom() -> None:
    query, key, value = tensors()
    assert attnswitch.attention(query[:, :, :0], key, value, policy="wisdom-only").shape == (2, 4, 0, 32)
    assert attnswitch.plan("b0.h4.s64.d32.fp32", policy="wisdom-only").backend == "sdpa-flash"


def test_wisdom_only_refuses_what_was_not_measured() -> None:
    with pytest.raises(Unsupported, match="the policy is wisdom-only; attnswitch tune --problem measures it"):
        attnswitch.attention(*tensors(), policy="wisdom-only")
    view.remember([time("tiled", 1.0)])
    assert attnswitch.plan(TEXT, policy="wisdom-only").backend == "tiled"
    assert attnswitch.plan("b2.h4.s512.d32.fp32", backend="tiled", policy="wisdom-only").backend == "tiled"


def test_measuring_at_first_sight_is_remembered() -> None:
    out = attnswitch.attention(*tensors(), policy=Policy.MEASURE)
    assert out.shape == (2, 4, 64, 32)
    found = store.here().read().records
    assert {record.backend for record in found} == {"sdpa-flash", "sdpa-math", "tiled", "reference"}
    assert {str(record.problem) for record in found} == {TEXT}
    fastest = min((record for record in found if isinstance(record, Time)), key=lambda record: record.ms)
    plan = attnswitch.plan(TEXT)  # by the default policy
    assert plan.backend == fastest.backend
    attnswitch.attention(*tensors(70), policy=Policy.MEASURE)  # of the same class
    assert len(store.here().read().records) == len(found)


ROWS = torch.randn(13, 4, 32)
PAGES = torch.randn(3, 8, 4, 32)
DENSE = torch.randn(3, 2, 4, 64, 32)
FORMS: dict[str, Callable[..., Any]] = {
    "b2.h4.s9.d32.fp32.varlen": functools.partial(attnswitch.attention_varlen, ROWS, ROWS, ROWS, [0, 4, 13]),
    "b2.h4.s1x24.d32.fp32.causal-br.lengths.page=8": functools.partial(
        attnswitch.attention_paged, ROWS[:2, None], PAGES, PAGES, [[0, 1, 2], [2, 0, 1]], [9, 24]
    ),
    "b2.h4.s64.d32.fp32.sinks": functools.partial(attnswitch.attention, *DENSE, sinks=[0.0] * 4),
    "b2.h4.s64.d32.fp32.alibi": functools.partial(attnswitch.attention, *DENSE, alibi_slopes=[0.5] * 4),
}


@pytest.mark.parametrize("text", FORMS)
def test_calls_of_any_form_are_measured_at_first_sight(text: str) -> None:
    expected = FORMS[text]()
    with attnswitch.using("measure"):
        torch.testing.assert_close(FORMS[text](), expected)
    found = store.here().read().records
    assert {str(record.problem) for record in found} == {text}
    assert any(isinstance(record, Time) for record in found)
    with pytest.raises(Unsupported, match="wisdom-only"):
        attnswitch.attention_varlen(ROWS, ROWS, ROWS, [0, 4, 6, 13], window=(1, 1), policy="wisdom-only")
    torch.testing.assert_close(FORMS[text](policy="wisdom-only"), expected)
    FORMS[text](policy="measure")  # of the same class
    assert store.here().read().records == found


def test_what_cannot_be_measured_now_is_at_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def later(plan: Plan, where: str) -> bool:  # as while a CUDA graph is captured
        asked.append(plan)
        return False

    monkeypatch.setattr("attnswitch.tune.sight.measure", later)
    calls: list[Callable[..., Any]] = [*FORMS.values(), functools.partial(attnswitch.attention, *DENSE)]
    for call in calls:
        asked.clear()
        for _ in range(2):
            torch.testing.assert_close(call(policy="measure"), call())
        assert len(asked) == 2


def test_measuring_leaves_no_trace_in_the_application() -> None:
    operands = [tensor.requires_grad_() for tensor in tensors(33)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnswitch.attention(*operands, dropout_p=0.5, seed=3, policy="measure")
    assert torch.equal(torch.rand(3), expected)
    assert not out.requires_grad
    assert all(tensor.grad is None for tensor in operands)
    (first,) = {str(r.problem) for r in store.here().read().records}
    assert first == "b2.h4.s33.d32.fp32.dropout=0.5.seeded"


def test_gradients_are_measured_with_the_forward() -> None:
    operands = [tensor.requires_grad_() for tensor in tensors(40)]
    attnswitch.attention(*operands, is_causal=True, policy="measure").sum().backward()
    found = store.here().read().records
    assert {str(record.problem) for record in found} == {"b2.h4.s40.d32.fp32.causal.grad"}
    assert len(found) == 4
    assert any(isinstance(record, Time) for record in found)


def test_a_wrong_kernel_is_not_measured_but_left_out(register: Register) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    assert attnswitch.plan(TEXT).backend == "saboteur"
    plan = attnswitch.plan(TEXT, policy="measure")
    assert plan.backend != "saboteur"
    assert "it was wrong on this machine" in reasons(plan, "saboteur")
    verdicts = [record for record in store.here().read().records if isinstance(record, Verdict)]
    assert [(verdict.backend, verdict.right) for verdict in verdicts] == [("saboteur", False)]


def test_threads_that_see_a_problem_at_once_measure_it_once() -> None:
    def call() -> None:
        attnswitch.attention(*tensors(48), policy="measure")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.here().read().records) == 4


@pytest.mark.parametrize("name", ["wisdom-only", Policy.WISDOM_ONLY])
def test_a_context_holds_within_and_for_its_thread(name: Any) -> None:
    inside: list[Policy] = []
    with attnswitch.using(name):
        assert policy.effective(None) is Policy.WISDOM_ONLY
        thread = threading.Thread(target=lambda: inside.append(policy.effective(None)))
        thread.start()
        thread.join()
        with attnswitch.using("estimate"):
            assert policy.effective(None) is Policy.ESTIMATE
        assert policy.effective("measure") is Policy.MEASURE
        with pytest.raises(Unsupported):
            attnswitch.plan(TEXT)
    assert inside == [Policy.ESTIMATE]
    assert attnswitch.plan(TEXT).backend == "sdpa-flash"


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_POLICY", "wisdom-only")
    policy.of_process.cache_clear()
    try:
        with pytest.raises(Unsupported, match="wisdom-only"):
            attnswitch.plan(TEXT)
        monkeypatch.setenv("ATTNSWITCH_POLICY", "fast")
        policy.of_process.cache_clear()
        with pytest.raises(InvalidProblem, match="ATTNSWITCH_POLICY='fast': expected one of estimate, measure"):
            attnswitch.plan(TEXT)
    finally:
        policy.of_process.cache_clear()


def test_what_is_no_policy() -> None:
    with pytest.raises(InvalidProblem, match="policy='fast': expected one of estimate, measure, learn, wisdom-only"):
        attnswitch.attention(*tensors(), policy="fast")
    with pytest.raises(InvalidProblem, match="policy=3"), attnswitch.using(3):  # type: ignore[arg-type]
        pass


def test_absent_hardware_is_planned_and_not_measured() -> None:
    plan = attnswitch.explain("b2.h16.s1024.d64.bf16.grad", device="h200", policy="measure")
    assert plan.backend == "cuda"
    assert store.here().read().records == []


# -- plans as callables ------------------------------------------------------------------------------------------------


def test_a_plan_is_the_attention_of_its_problem() -> None:
    query, key, value = tensors()
    plan = attnswitch.plan(query, key, value, is_causal=True, return_lse=True)
    out, lse = plan(query, key, value)
    again, same = attnswitch.attention(query, key, value, is_causal=True, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, same)
    with pytest.raises(InvalidProblem, match=r"the plan is for b2.h4.s64.*, and the call is b2.h4.s60"):
        plan(*tensors(60))


def test_a_plan_that_chose_nothing_is_no_attention() -> None:
    plan = attnswitch.explain(TEXT, backend="sdpa-cudnn")
    with pytest.raises(Unsupported):
        plan(*tensors())


# -- what verify finds -------------------------------------------------------------------------------------------------


def verification(backend: str, folder: Path, **changes: Any) -> Verification:
    return Verification(targets(["cpu"], [backend]), 60, 3, corpus=folder, max_failures=1, **changes)


def test_what_verify_finds_wrong_is_left_out(register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    run(verification("saboteur", tmp_path))
    assert store.here().read().records == []  # unless it is asked to remember
    report = run(verification("saboteur", tmp_path, remember=True))
    (found,) = report.failures
    verdicts = [record for record in store.here().read().records if isinstance(record, Verdict)]
    assert [(v.backend, v.right) for v in verdicts] == [("saboteur", False)]
    assert found.path is not None
    assert verdicts[0].case == found.path.name
    assert verdicts[0].problem == found.outcome.case.problem()
    assert attnswitch.plan(verdicts[0].problem).backend != "saboteur"
    assert "(case " in reasons(attnswitch.plan(verdicts[0].problem), "saboteur")


def test_verify_lifts_what_another_version_gets_right(tmp_path: Path) -> None:
    """The case is replayed, and what it is of now is right."""
    case = Case(batch=2, heads_kv=4, seq_q=5, seq_k=5, dim_qk=8, dim_v=8)
    saved = {"schema": 1, "case": case.to_json(), "backend": "tiled", "device": "cpu"}
    (tmp_path / "some-case.json").write_text(json.dumps(saved))
    old = fault("tiled", str(case.problem()))
    old = Verdict(old.problem, "tiled", False, old.case, old.why, Signature(old.signature.device, (), "old"), old.date)
    view.remember([old])
    assert "it was wrong" in reasons(attnswitch.plan(TEXT), "tiled")
    run(verification("tiled", tmp_path, remember=True))
    assert "it was wrong" not in reasons(attnswitch.plan(TEXT), "tiled")
    assert [record.right for record in store.here().read().records if isinstance(record, Verdict)] == [False, True]


class Width:
    """A config with something to choose."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __str__(self) -> str:
        return f"Width(columns={self.columns})"


class Tunable(Backend):
    """The tiled backend with configs."""

    name = "tunable"
    library = "numpy"
    autograd = False
    built: ClassVar[list[int]] = []

    def unavailable(self) -> str | None:
        return None

    def reasons(self, problem: Problem, device: Device) -> Any:
        return () if problem.query == CONTIGUOUS else ("it is only for this test",)

    def configs(self, problem: Problem, device: Device) -> Any:
        return map(Width, (1, 2, 4))

    def precision(self, problem: Problem, device: Device) -> Any:
        return registry.load("tiled").precision(problem, device)  # type: ignore[union-attr]

    def compile(self, problem: Problem, device: Device, config: Width) -> Any:
        self.built.append(config.columns)
        tiled: Any = registry.load("tiled")
        return tiled.compile(problem, device, next(iter(tiled.configs(problem, device))))
