"""Backends that stand back: chosen where they were timed here, tried where they are asked for, or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch import Device, Plan, Policy, Problem, Unsupported
from attnswitch.bench.measure import Budget
from attnswitch.machine import registry
from attnswitch.machine.backend import Standing
from attnswitch.planning import planner
from attnswitch.planning.candidate import Candidate
from attnswitch.tune import session, trial
from attnswitch.tune.trial import Effort
from attnswitch.verify import examine
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.signature import Signature, sign

Register = Callable[[str, str], None]
TEXT = "b2.h4.s64.d32.fp32"
CPU = Device.cpu()


def time(backend: str, ms: float) -> Time:
    signed = sign(backend, CPU)
    assert isinstance(signed, Signature)
    return Time(Problem.parse(TEXT), backend, "", ms, ms, ms, 30, 2, signed, "2026-11-20T10:00:00")


def candidate(plan: Plan, backend: str) -> Candidate:
    return next(c for c in plan.candidates if c.backend == backend)


@pytest.fixture(params=[Standing.TIMED, Standing.ASKED, Standing.NAMED])
def standing(request: pytest.FixtureRequest, register: Register, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """``shy`` is ``tiled`` with a standing, first in the table."""
    found: Standing = request.param
    register("shy", "attnswitch.backends.tiled:TiledBackend")
    monkeypatch.setattr(type(registry.loaded("shy")), "standing", lambda self, device: found)
    return found


def test_it_is_chosen_once_it_was_timed(standing: Standing) -> None:
    plan = attnswitch.explain(TEXT)
    assert plan.backend == "sdpa-flash"
    assert candidate(plan, "shy").fits
    assert candidate(plan, "shy").open is (standing is Standing.TIMED)
    assert not candidate(plan, "shy").trusted
    assert attnswitch.explain(TEXT, backend="shy").backend == "shy"
    view.remember([time("sdpa-flash", 3.0), time("shy", 1.0)])
    plan = attnswitch.explain(TEXT)
    assert plan.backend == ("sdpa-flash" if standing is Standing.NAMED else "shy")
    assert attnswitch.explain("b2.h4.s8192.d32.fp32").backend == "sdpa-flash"  # a class that was not timed
    assert attnswitch.explain(TEXT, policy=Policy.WISDOM_ONLY).backend == plan.backend


def test_the_plan_tells_what_it_waits_for(standing: Standing) -> None:
    plan = attnswitch.explain(TEXT)
    (why,) = plan.why_not(candidate(plan, "shy"))
    assert (
        why
        == {
            Standing.TIMED: "it takes the problem, but was not verified and timed here yet: `attnswitch tune --problem"
            f" {TEXT}`, or name it",
            Standing.ASKED: "it takes the problem, but was not verified and timed here yet: `attnswitch tune --problem"
            f" {TEXT} --backend shy`, or name it",
            Standing.NAMED: "it takes the problem, but is approximate, and runs only with backend='shy'",
        }[standing]
    )


def test_it_is_not_chosen_where_it_alone_takes_the_problem(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("shy",))
    view.changed()
    plan = attnswitch.explain(TEXT)
    assert (plan.backend, plan.why) == (None, "what takes it runs where it is named, or once it was timed here")
    with pytest.raises(Unsupported, match="no backend may be chosen for this problem"):
        attnswitch.plan(TEXT)


def test_no_backward_starts_from_what_is_given_where_none_can(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("shy", "attnswitch.backends.tiled:TiledBackend")
    monkeypatch.setattr(type(registry.loaded("shy")), "restarts", False)
    monkeypatch.setattr(registry, "names", lambda: ("shy",))
    view.changed()
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with pytest.raises(Unsupported, match="shy starts its backward from its own"):
        attnswitch.attention_backward(torch.ones(1, 2, 5, 8), query, key, value)


def test_tune_tries_it_where_it_may(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("sdpa-flash", "shy"))
    view.changed()
    problem = Problem.parse("b1.h2.s16.d8.fp32")
    for asked in ((), ("shy",)):
        effort = Effort(Budget(1.0, 2.0), search=0.0, asked=asked)
        found = trial.run(problem, "cpu", effort, examine)
        tried = {time.backend for time in found.times} | found.hopeless.keys() | found.failed.keys()
        assert ("shy" in tried) is (standing is Standing.TIMED or bool(asked))


def test_what_was_asked_for_is_not_known_before_it_was_tried(standing: Standing) -> None:
    problem = Problem.parse(TEXT)
    fitting = [name for name in registry.names() if candidate(attnswitch.explain(TEXT), name).fits]
    view.take([time(name, 1.0) for name in fitting if name != "shy"])
    assert session.known(problem, "cpu") is (standing is not Standing.TIMED)
    assert not session.known(problem, "cpu", ("shy",))
    view.take([time("shy", 1.0)])
    assert session.known(problem, "cpu", ("shy",))


def test_what_waits_says_so_and_is_not_loaded_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [row.name for row in registry.table() if row.waits]
    assert len(waiting) > 5
    for device in (CPU, Device.named("h100")):
        assert all(registry.loaded(name).standing(device) is not Standing.FREE for name in waiting)
    loaded: list[str] = []
    load = registry.load
    monkeypatch.setattr(registry, "load", lambda name: loaded.append(name) or load(name))  # type: ignore[func-returns-value]
    view.changed()
    attnswitch.attention(*(torch.randn(1, 2, 5, 8) for _ in range(3)))
    assert loaded
    assert not set(loaded) & set(waiting)


def test_gradients_without_autograd_are_of_one_that_starts_from_what_it_is_given(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("shy", "attnswitch.backends.tiled:TiledBackend")
    monkeypatch.setattr(type(registry.loaded("shy")), "restarts", False)
    problem = Problem.parse(TEXT)
    assert planner.choose(problem, CPU).backend == "shy"
    assert planner.choose(problem, CPU, restarts=True).backend == "sdpa-flash"
    assert planner.choose(problem, CPU, "shy", restarts=True).backend == "shy"
    made: list[Any] = []
    monkeypatch.setattr(type(registry.loaded("shy")), "compile", lambda *_: made.append(_))
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    attnswitch.attention_backward(torch.ones(1, 2, 5, 8), query, key, value)
    edges = torch.tensor([0, 5])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attnswitch.attention_varlen_backward(torch.ones(5, 2, 8), q, k, v, edges)
    attnswitch.attention_backward(torch.ones(1, 2, 5, 8), query, key, value, alibi_slopes=[0.5, 0.25])
    assert not made
