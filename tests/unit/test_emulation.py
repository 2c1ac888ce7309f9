"""Backends that run on a CPU under an emulation only: verified there when they are named, and said to be emulated."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from attnswitch import InvalidProblem
from attnswitch.planning import planner
from attnswitch.verify import (
    Case,
    Failure,
    Outcome,
    Plan,
    Report,
    Space,
    Target,
    check,
    emulation,
    load,
    run,
    targets,
    to_html,
    to_json,
    to_markdown,
    to_pytest,
)
from attnswitch.verify.drawing import lattice
from attnswitch.verify.session import apart, corpus
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import EMULATED, EXAMPLES

RIGHT, WRONG = "saboteurs:Emulated", "saboteurs:EmulatedWrong"
SABOTEURS = str(Path(__file__).parents[1] / "saboteurs")
VARIABLE = "SLOWGPU_EMULATE"
FAULT = Case(seq_k=65, library="numpy")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without the variable, and leaves none."""
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.delenv(VARIABLE)
    planner.forget()
    yield
    monkeypatch.undo()
    planner.forget()


# -- the target --------------------------------------------------------------------------------------------------------


def test_a_named_backend_is_emulated_on_the_cpu_and_not_on_a_gpu() -> None:
    cpu, gpu = targets(["cpu", "cuda:0"], ["tiled", RIGHT])
    assert cpu.emulation == {VARIABLE: "1"}
    assert gpu.emulation == {}
    assert gpu.space == targets(["cuda:0"], ["tiled"])[0].space
    assert cpu.backends == ("tiled", RIGHT)
    assert cpu.space.checks == targets(["cpu"], ["tiled"])[0].space.checks


def test_nothing_changes_for_the_others_and_for_all() -> None:
    (plain,) = targets(["cpu"], ["tiled", "auto"])
    (every,) = targets(["cpu"], ["tiled", RIGHT], emulate=False)
    assert (plain.emulation, every.emulation, every.space) == ({}, {}, plain.space)


def test_two_that_cannot_be_emulated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    targets(["cpu"], [WRONG])
    monkeypatch.setattr("saboteurs.EmulatedWrong.emulation", {VARIABLE: "2"})
    with pytest.raises(
        InvalidProblem, match="SLOWGPU_EMULATE would have to be '1' and '2' for saboteurs:Emulated, sab"
    ):
        targets(["cpu"], [RIGHT, WRONG])


def test_what_is_drawn_is_small_and_passes_tiles() -> None:
    (target,) = targets(["cpu"], [RIGHT])
    drawn = draw(target.space, 0, EMULATED)
    assert max(case.batch * case.heads_q for case in drawn) <= 4
    assert max(max(case.seq_q, case.seq_k) for case in drawn) <= 140
    for tile in (16, 32, 64):
        assert sum(case.seq_k > 2 * tile for case in drawn) >= 10, tile
        assert sum(min(case.seq_q, case.seq_k) > tile for case in drawn) >= 5, tile
    assert any(case.group > 1 and case.heads_kv > 1 for case in drawn)


def test_the_lattice_is_short() -> None:
    cases = list(lattice.short(Space()))
    assert {case.seq_k for case in cases} >= {1, 15, 16, 17, 31, 32, 33, 63, 64, 65}
    assert max(case.seq_k for case in cases) == 65
    assert len(cases) < 40
    whole = list(lattice.probes(Space(), False))
    assert whole[: len(cases)] == cases


# -- runs --------------------------------------------------------------------------------------------------------------


def small(*backends: str) -> tuple[Target, ...]:
    return targets(["cpu"], backends)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A run in workers over two that are emulated, one of them wrong, and an ordinary one."""
    folder = tmp_path_factory.mktemp("corpus")
    plan = Plan(
        small(RIGHT, WRONG, "tiled"), 40, 0, corpus=folder, isolate=True, workers=1, lattice=True, shrink_tries=10
    )
    return run(plan), folder


def test_a_wrong_one_is_caught_and_the_others_are_right(found: tuple[Report, Path]) -> None:
    report, _ = found
    verified = dict.fromkeys((RIGHT, WRONG, "tiled"), 0)
    for (_, backend, _), tally in report.tallies.items():
        verified[backend] += tally.verified
    assert min(verified.values()) > 10, verified
    assert report.exit_code == 1
    assert {item.outcome.backend for item in report.failures} == {WRONG}
    assert all(item.outcome.case.seq_k > 64 for item in report.failures)
    assert VARIABLE not in os.environ


def test_only_the_short_lattice_was_run(found: tuple[Report, Path]) -> None:
    report, _ = found
    assert report.cases == 40 + len(list(lattice.short(Space())))


def test_the_report_says_that_it_was_emulated(found: tuple[Report, Path]) -> None:
    report, folder = found
    said = "on the CPU, under SLOWGPU_EMULATE=1"
    assert report.emulated == {"cpu": {VARIABLE: "1"}}
    assert report.environment["emulated"] == said
    document = to_json(report)
    assert (document["emulated"], document["environment"]["emulated"]) == ({"cpu": {VARIABLE: "1"}}, said)
    assert "Emulated on cpu (SLOWGPU_EMULATE=1)" in to_html(report)
    assert "emulated on cpu (SLOWGPU\\_EMULATE=1)" in to_markdown(report)
    for text in (to_html(report), to_markdown(report)):  # an interpreter sees no races, and an emulator may
        assert "nothing about a compiler or speed, nor about races that the emulation does not report" in text
    for path in folder.glob("*.json"):
        assert json.loads(path.read_text())["environment"]["emulated"] == said


def test_a_run_that_is_not_emulated_does_not_say_so() -> None:
    report = run(Plan(targets(["cpu"], [RIGHT, "tiled"], emulate=False), 5, 0))
    assert (report.emulated, "emulated" in report.environment, to_json(report)["emulated"]) == ({}, False, {})
    assert VARIABLE not in to_html(report) + to_markdown(report)
    refused = {reason for (_, name, _), tally in report.tallies.items() if name == RIGHT for reason in tally.reasons}
    assert {reason for reason in refused if not reason.startswith("num_splits=")} == {"it runs on GPUs only"}


def test_saved_cases_are_replayed_under_emulation(found: tuple[Report, Path], tmp_path: Path) -> None:
    outcome = found[0].failures[0].outcome
    corpus.save(outcome, tmp_path)
    report = run(Plan(small(WRONG), 1, 0, corpus=tmp_path, isolate=True, workers=1))
    assert (report.replayed, report.exit_code) == (1, 1)
    assert report.failures[0].from_corpus


def test_a_number_of_its_own_goes_before_the_plans() -> None:
    plain, fewer = Target("cpu", ("tiled",), Space()), Target("cpu", ("tiled",), Space(), examples=3)
    plan = Plan((plain, fewer), 2000, 0)
    assert (plan.drawn(plain), plan.drawn(fewer)) == (2000, 3)
    assert run(Plan((fewer,), 2000, 0)).cases == 3


# -- in this process ---------------------------------------------------------------------------------------------------


def test_it_begins_in_this_process() -> None:
    assert check(FAULT, WRONG).verdict == "refused"
    report = run(Plan(small(WRONG), 60, 0, max_failures=1, shrink_tries=0))
    assert report.exit_code == 1
    assert os.environ[VARIABLE] == "1"
    assert check(FAULT, WRONG).verdict == "mismatch"  # what was planned before is forgotten


def test_it_is_too_late_once_the_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slowgpu", ModuleType("slowgpu"))
    with pytest.raises(InvalidProblem, match="SLOWGPU_EMULATE=1 is not set, and slowgpu, which reads it as it is impo"):
        run(Plan(small(RIGHT), 5, 0))
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "1")  # by the user, before Python started
    assert run(Plan(small(RIGHT), 5, 0)).exit_code == 0


def test_it_is_never_too_late_for_what_attnswitch_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_SLOWLY", "0")
    emulation.begin({"ATTNSWITCH_SLOWLY": "1"})
    assert os.environ["ATTNSWITCH_SLOWLY"] == "1"


def test_one_process_is_not_emulated_and_on_a_gpu_at_once() -> None:
    both = (*small(RIGHT), Target("cuda:0", (RIGHT,), Space()))
    with pytest.raises(
        InvalidProblem, match=r"one process cannot emulate saboteurs:Emulated on the CPU and run on cuda"
    ):
        run(Plan(both, 5, 0))


# -- one case ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_case_is_checked_apart() -> None:
    assert apart.check(FAULT, RIGHT).verdict == "verified"
    assert apart.check(FAULT, WRONG).verdict == "mismatch"
    assert VARIABLE not in os.environ
    capped = Case(seq_k=5, softcap=0.5)  # which it does not do, and refuses
    assert apart.check(capped, "sdpa-math", unguarded=True).verdict == "mismatch"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def cli(folder: Path, *arguments: str) -> Ran:
    """The command in a process of its own, in a folder with the saboteurs."""
    (folder / "saboteurs.py").write_text((Path(SABOTEURS) / "saboteurs.py").read_text())
    environment = {**os.environ, "ATTNSWITCH_CORPUS": str(folder / "corpus"), "COLUMNS": "200"}
    command = [str(Path(sys.executable).with_name("attnswitch")), *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.slow
def test_the_commands_from_a_finding_to_its_test(tmp_path: Path) -> None:
    """Found by verify, run again by replay, and by the test that it writes."""
    quick = ("--quick", "--examples", "40", "--max-failures", "1", "--device", "cpu", "--workers", "1")
    ran = cli(tmp_path, "verify", "--backend", WRONG, *quick, "--emit-pytest", "tests")
    assert ran.code == 1, ran
    assert ran.out.startswith("emulated on cpu (SLOWGPU_EMULATE=1): small cases;")
    (path,) = (tmp_path / "corpus").glob("*.json")
    assert load(path).backend == WRONG
    again = cli(tmp_path, "replay", str(path), "--backend", WRONG)
    assert (again.code, again.out.split()[0], "on cpu, emulated" in again.out) == (1, "FAILED", True)
    here = cli(tmp_path, "replay", "--no-isolate", "--json", str(path), "--backend", WRONG)
    (document,) = json.loads(here.out)
    assert (here.code, document["result"], document["emulated"]) == (1, "FAILED", {VARIABLE: "1"})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    test = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SABOTEURS}, capture_output=True, text=True
    )
    assert (test.returncode, "1 failed" in test.stdout) == (1, True), test.stdout
    assert "reference: out" in test.stdout


def test_a_test_of_what_is_not_emulated_stays_as_it_is() -> None:
    failure = Failure("reference", "it was wrong")
    emulated = to_pytest(FAULT, RIGHT, "cpu", failure, {})
    assert "emulated, in a process of its own under SLOWGPU_EMULATE=1" in (ast.get_docstring(ast.parse(emulated)) or "")
    assert "from attnswitch.verify.session.apart import check" in emulated
    for backend, device in ((RIGHT, "cuda:0"), ("tiled", "cpu"), ("nobody", "cpu")):
        assert "from attnswitch.verify.judge import check" in to_pytest(FAULT, backend, device, failure, {})


@pytest.mark.parametrize(
    ("arguments", "examples", "emulated"),
    [
        (("--backend", RIGHT), EMULATED, {VARIABLE: "1"}),
        (("--backend", RIGHT, "--backend", "tiled"), EMULATED, {VARIABLE: "1"}),
        (("--backend", RIGHT, "--examples", "7"), 7, {VARIABLE: "1"}),
        (("--backend", RIGHT, "--time", "9s"), None, {VARIABLE: "1"}),
        (("--backend", "tiled"), EXAMPLES, {}),
        ((), EXAMPLES, {}),
    ],
)
def test_options_make_the_plan(
    arguments: tuple[str, ...], examples: int | None, emulated: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, "--device", "cpu", *arguments)
    (target,) = plan.targets
    assert (plan.drawn(target), target.emulation) == (examples, emulated)


@pytest.mark.parametrize(
    ("arguments", "targets"),
    [
        ((), {"cuda:0": {}}),
        (("--backend", "tiled"), {"cpu": {}, "cuda:0": {}}),
        (("--device", "cpu"), {"cpu": {VARIABLE: "1"}}),
    ],
)
def test_beside_a_gpu_the_cpu_is_emulated_if_it_is_named(
    arguments: tuple[str, ...], targets: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("attnswitch.cli.verify")
    monkeypatch.setattr(module, "_devices", lambda names: names or ["cpu", "cuda:0"])
    plan = planned(monkeypatch, "--backend", RIGHT, *arguments)
    assert {target.device: target.emulation for target in plan.targets} == targets


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Plan:
    """The plan of ``attnswitch verify``, which is not run."""
    plans: list[Plan] = []

    def ran(plan: Plan, _: Any) -> Report:
        plans.append(plan)
        return Report(plan.seed)

    module = importlib.import_module("attnswitch.cli.verify")
    monkeypatch.setattr(module, "run", ran)
    monkeypatch.setattr(module.attnswitch, "backends", lambda: {"tiled": None, RIGHT: None})
    monkeypatch.setattr(sys, "argv", ["attnswitch", "verify", "--no-corpus", *arguments])
    with pytest.raises(SystemExit):
        importlib.import_module("attnswitch.cli.app").main()
    (plan,) = plans
    return plan


def test_an_outcome_of_nothing_emulated_has_no_fact() -> None:
    assert emulation.fact({}) == {}
    outcome = Outcome(FAULT, "tiled", "cpu", "mismatch", failure=Failure("reference", ""))
    assert emulation.variables((outcome.backend, "auto"), "cpu") == {}
