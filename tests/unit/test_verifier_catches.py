"""The test of the tests: every backend that is wrong on purpose is caught within the default number of examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import saboteurs

from attnswitch.verify import EXAMPLES, Plan, Space, Target, run


@pytest.mark.parametrize("fault", saboteurs.FAULTS)
def test_a_wrong_backend_is_caught(fault: str, register: Callable[[str, str], None]) -> None:
    register("saboteur", f"saboteurs:{fault}")
    report = run(Plan((Target("cpu", ("saboteur",), Space()),), EXAMPLES, seed=0, max_failures=1, shrink_tries=20))
    assert report.exit_code == 1
    assert report.failures[0].outcome.backend == "saboteur"
    assert report.cases < EXAMPLES


@pytest.mark.slow
def test_a_right_backend_is_not(register: Callable[[str, str], None]) -> None:
    register("saboteur", "saboteurs:Saboteur")
    report = run(Plan((Target("cpu", ("saboteur",), Space()),), 240, seed=0))
    assert report.failures == []
    assert report.verified > 150
