"""Runs in worker processes: what ends or stops one is found, made smaller and reported, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import judging
import pytest

from attnswitch import VerificationError
from attnswitch.machine import builds
from attnswitch.machine.device import Device
from attnswitch.verify import Case, Plan, Report, Space, Target, load, run
from attnswitch.verify.session import apart, pool, whole
from attnswitch.verify.session.process import Process

SABOTEURS = str(Path(__file__).parents[1] / "saboteurs")
SMALL = Space(libraries=("numpy",), dtypes=("float32",), work=2**14, longest=140)


def isolated(fault: str, examples: int = 100, **plan: object) -> Report:
    """A run of one saboteur in a worker process."""
    target = Target("cpu", (f"saboteurs:{fault}",), SMALL)
    settings = {"isolate": True, "workers": 1, "timeout": 20.0, **plan}
    return run(Plan((target,), examples, 0, **settings))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_gives_the_same_in_workers_as_here() -> None:
    target = Target("cpu", ("tiled", "saboteurs:HeadsInterleaved"), SMALL)
    here, one, two = (
        run(Plan((target,), 150, 3, shrink_tries=80, isolate=workers > 0, workers=workers or None))
        for workers in (0, 1, 2)
    )
    assert (one.cases, one.verified) == (here.cases, here.verified)
    assert two.cases == here.cases == 150
    assert [found.outcome.case for found in one.failures] == [found.outcome.case for found in here.failures]
    assert {found.outcome.kind for found in two.failures} == {found.outcome.kind for found in here.failures}
    assert two.workers == 2
    assert one.environment["torch"] == here.environment["torch"]


def test_one_of_several_that_ends_the_process_takes_no_other_with_it() -> None:
    case = Case(seq_q=4, seq_k=4, window=(0, 0))
    names = ("tiled", "saboteurs:Segfaults", "saboteurs:ScaledOutput", "reference")
    with apart.pool("cpu", "tiled", 60.0) as workers:
        outcomes = workers.examine(case, names, "cpu")
        (again,) = workers.examine(case, ("tiled",), "cpu")
    assert [outcome.backend for outcome in outcomes] == list(names)
    assert [outcome.verdict for outcome in outcomes] == ["verified", "mismatch", "mismatch", "verified"]
    assert [outcome.failure and outcome.failure.check for outcome in outcomes] == [None, "crash", "reference", None]
    assert again.verdict == "verified"


def test_a_pool_that_is_closed_lets_go_of_the_thread_that_is_at_a_case() -> None:
    raised: list[Exception] = []

    def examine() -> None:
        try:
            workers.examine(Case(seq_q=2, seq_k=2), ("saboteurs:Hangs",), "cpu")
        except VerificationError as error:
            raised.append(error)

    with apart.pool("cpu", "tiled", 600.0) as workers:
        thread = threading.Thread(target=examine, daemon=True)
        thread.start()
        time.sleep(1)
    thread.join(20)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == ["the verifier was ended"]


@pytest.mark.slow
def test_a_segfault_is_found_shrunk_and_saved(tmp_path: Path) -> None:
    report = isolated("Segfaults", examples=20, corpus=tmp_path)
    (found,) = report.failures
    assert found.outcome.failure is not None
    assert (found.outcome.failure.check, found.outcome.failure.message) == (
        "crash",
        "the process died of SIGSEGV",
    )
    assert found.outcome.case == Case(dim_qk=1, dim_v=1, window=(0, 0))
    assert report.cases == 20  # every case was tried, in one process after another
    assert report.verified > 10
    assert found.path is not None
    assert load(found.path).case == found.outcome.case


@pytest.mark.nightly
def test_a_hang_is_found_shrunk_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_TRY_TIMEOUT", 2.0)
    report = isolated("Hangs", examples=80, timeout=3.0)
    (found,) = report.failures
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "hang"
    assert found.outcome.case.seq_k in (1, 2)
    assert found.outcome.case.mask is None
    assert report.cases == 80


@pytest.mark.slow
def test_one_key_of_8193_is_named() -> None:
    target = Target("cpu", ("saboteurs:OneKeyOf8193",), SMALL)
    report = run(Plan((target,), 0, 0, lattice=True, shrink_tries=20))
    (found,) = report.failures
    assert found.outcome.failure is not None
    assert (found.outcome.failure.check, found.outcome.case.seq_k) == ("one-hot", 8193)
    assert "the query selects key 5000" in found.outcome.failure.message


@pytest.mark.parametrize("fault", ["ReadsPastTile", "Races"])
def test_what_reads_astray_or_races_is_found(fault: str) -> None:
    report = isolated(fault, examples=400, max_failures=1, shrink_tries=60)
    assert report.exit_code == 1
    assert report.cases < 400


def test_a_backend_that_is_not_there_says_why() -> None:
    target = Target("cpu", ("saboteurs:NoSuchBackend",), SMALL)
    report = run(Plan((target,), 5, 0, isolate=True, workers=1))
    assert report.exit_code == 3
    assert any("NoSuchBackend" in why for tally in report.tallies.values() for why in tally.absences)


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VerificationError, match="could not start"):
        isolated("Saboteur", examples=5)


def test_a_run_that_is_stopped_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def counted(*arguments: Any) -> Process:
        started.append(len(started))
        return Process(*arguments)

    monkeypatch.setattr(pool, "Process", counted)
    report = isolated("ScaledOutput", max_failures=1, shrink_tries=5)
    assert report.stopped == "1 distinct failures"
    assert report.environment["torch"]  # the worker's, though it is gone
    assert len(started) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("fault", ["Forks", "ForksTwice"])
def test_what_a_kernel_left_running_ends_with_its_worker(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"FORKED={os.getpid()}-{fault}"
    monkeypatch.setenv(*mark.split("="))
    target = Target("cpu", (f"hostile:{fault}",), SMALL)
    assert run(Plan((target,), 3, 0, isolate=True, workers=1, timeout=20.0)).cases == 3
    assert judging.outlived(mark) == []


@pytest.mark.slow
def test_time_ends_it_and_no_process_is_left() -> None:
    before = time.monotonic()
    report = isolated("Saboteur", examples=10**6, seconds=15.0)
    assert report.stopped == "time limit of 15 s"
    assert time.monotonic() - before < 40.0
    assert report.verified > 0
    assert not _children()


@pytest.mark.parametrize("fault", ["HangsDeaf", "Aborts", "Exits", "Interrupts"])
def test_time_ends_it_whatever_a_backend_does(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a failure that ends its process is made smaller, each try of which takes a process of its own."""
    began: list[float] = []
    seen = whole._Run._take

    def take(*arguments: Any) -> None:
        began.append(time.monotonic())
        seen(*arguments)

    monkeypatch.setattr(whole._Run, "_take", take)
    report = isolated(fault, examples=10**6, seconds=3.0, timeout=1.0 if fault == "Aborts" else 60.0)
    assert time.monotonic() - began[0] < 3.0 + 10.0  # on a busy machine
    assert report.stopped == "time limit of 3 s"
    assert not _children()


@pytest.mark.parametrize("fault", ["Exits", "Interrupts"])
def test_what_would_end_the_process_is_a_finding(fault: str) -> None:
    report = isolated(fault, examples=60, shrink_tries=40)
    (found,) = report.failures
    assert found.outcome.failure is not None
    assert found.outcome.failure.check == "crash"
    name = {"Exits": "SystemExit", "Interrupts": "KeyboardInterrupt"}[fault]
    assert found.outcome.failure.message == f"{name}: its licence has run out (inputs)"
    assert report.cases == 60
    assert report.verified > 10


#: Hypothesis draws by itself, as it does while a search climbs, and writes down the constants of local sources.
DRAWS = """
import sys
sys.path.append("../modules")
import local
from hypothesis import given, settings, strategies
settings(max_examples=200, database=None)(given(strategies.integers())(lambda n: None))()
"""


def test_hypothesis_leaves_nothing_in_the_current_folder(
    tmp_path: Path, no_wisdom: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY", raising=False)
    given: list[dict[str, str]] = []

    def child(*_: str, variables: dict[str, str]) -> Any:
        given.append(variables)
        return SimpleNamespace(events=None, requests=SimpleNamespace(send=lambda terms: None))

    monkeypatch.setattr("attnswitch.verify.session.process.Child", child)
    Process("cpu")
    for folder in ("here", "modules"):
        (tmp_path / folder).mkdir()
    (tmp_path / "modules" / "local.py").write_text("CONSTANT = 65537\n")
    command = [sys.executable, "-c", DRAWS]
    subprocess.run(command, cwd=tmp_path / "here", env={**os.environ, **given[0]}, check=True)
    assert os.listdir(tmp_path / "here") == []
    assert (no_wisdom / "hypothesis" / "constants").is_dir()


def test_ctrl_c_ends_it_with_a_report(tmp_path: Path) -> None:
    script = f"""
import signal, sys
sys.path.insert(0, {SABOTEURS!r})
from attnswitch.verify import Case, Plan, Space, Target, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
space = Space(libraries=("numpy",), dtypes=("float32",), work=2**14, longest=140)
def progress(report, source, device, outcomes):
    if report.cases == 5: print("begun", flush=True)
report = run(Plan((Target("cpu", ("tiled",), space),), 10**6, 0, isolate=True, workers=2), progress)
print(report.stopped, report.verified > 0, report.exit_code)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    timer = threading.Timer(120, process.kill)
    timer.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    assert process.stdout.read().split() == ["interrupted", "True", "2"]
    process.wait()
    process.stdout.close()
    timer.cancel()


def _children() -> list[str]:
    listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "session.worker" in line]


@pytest.mark.parametrize(
    ("cores", "gpu", "gpus", "asked", "workers"),
    [
        (16, "h100", 1, None, 16),
        (64, "h100", 2, None, 16),
        (16, "h100", 2, None, 8),
        (16, "rtx3090", 1, None, 6),  # 24 GiB
        (16, "t4", 4, None, 4),
        (1, "h100", 1, None, 1),
        (16, "h100", 1, 15, 15),
        (16, None, 0, None, 8),
        (2, None, 0, None, 2),
    ],
)
def test_a_gpu_has_workers_for_its_cores_and_its_memory(
    cores: int, gpu: str | None, gpus: int, asked: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "cores", lambda: cores)
    monkeypatch.setattr(Device, "parse", staticmethod(lambda name: Device.named(gpu or "cpu")))
    devices = [f"cuda:{n}" for n in range(gpus)] or ["cpu"]
    plan = Plan(tuple(Target(name, ("tiled",), Space()) for name in devices), 1, 0, isolate=True, workers=asked)
    assert pool.Isolated(plan).size == workers * len(devices)
