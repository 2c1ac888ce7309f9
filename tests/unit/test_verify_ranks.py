"""``attnswitch verify --ranks``: the true layer passes, each mutant is caught, and a rank that is lost is a finding."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from launched import launched, started
from torch import distributed as dist
from typer.testing import CliRunner

from attnswitch import Problem
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.ranks.conductor import Conductor
from attnswitch.verify.ranks.faults import FAULTS
from attnswitch.verify.ranks.mail import key_of, put, take
from attnswitch.verify.ranks.supervisor import Supervisor
from attnswitch.verify.ranks.task import Answer, Task

app = importlib.import_module("attnswitch.cli.app").app
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
_VERIFY = ("-m", "attnswitch", "verify", "--device", "cpu", "--ranks")


def result(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_true_layer_is_right(ranks: int, tmp_path: Path) -> None:
    """And what was found before is replayed."""
    output = tmp_path / "found.json"
    code, said = launched(ranks, *_VERIFY, "ring,all-to-all", "--examples", "60", "--json", str(output))
    assert code == 0, said[-3000:]
    found = result(output)
    assert found["environment"]["ranks"] == f"{ranks} over gloo"
    assert found["replayed"] == len(list(Path("fixtures/corpus/ranks").glob("*.json"))) > 0
    for method in ("ring", "all-to-all"):
        rows = [row for row in found["results"] if row["backend"] == method]
        assert sum(row["verified"] for row in rows) > 40
        assert sum(row["with_gradients"] for row in rows) > 10
        assert not any(row["mismatched"] for row in rows)


@pytest.mark.slow
def test_every_mutant_is_caught(tmp_path: Path) -> None:
    output = tmp_path / "mutants.json"
    code, said = launched(2, *_VERIFY, "ring,all-to-all", "--mutants", "--examples", "200", "--json", str(output))
    assert code == 0, said[-3000:]
    found = result(output)
    assert found["survivors"] == []
    assert {row["name"] for row in found["mutants"]} == set(FAULTS)
    assert len(FAULTS) >= 10


def worker(rank: int, under: int) -> int:
    """The process that computes as ``rank``, of those that ``under`` started."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if (
                b"attnswitch.verify.ranks.worker" in words
                and words[-6] == str(rank).encode()
                and is_under(entry, under)
            ):
                return int(entry.name)
        time.sleep(0.2)
    raise AssertionError(f"rank {rank} has no worker")


def is_under(entry: Path, ancestor: int) -> bool:
    number = int(entry.name)
    while number > 1:
        if number == ancestor:
            return True
        try:
            number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "check"), [(signal.SIGKILL, "crash"), pytest.param(signal.SIGSTOP, "hang", marks=pytest.mark.nightly)]
)
def test_a_rank_that_is_lost_is_a_finding_and_the_run_goes_on(sent: signal.Signals, check: str, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    arguments = ("ring", "--time", "35s", "--timeout", "8", "--no-corpus", "--json", str(output))
    process = started(2, *_VERIFY, *arguments)
    try:
        lost = worker(1, process.pid)
        time.sleep(8)  # it imports torch, and tries some cases
        os.kill(lost, sent)
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    found = result(output)
    assert process.returncode == 1, said[-3000:]
    (failure,) = found["failures"]
    assert failure["failure"]["check"] == check
    assert "rank 1" in failure["failure"]["message"]
    assert sum(row["verified"] for row in found["results"]) > failure["cases_before"] > 0


class Silent:
    """A worker that says nothing."""

    def __init__(self) -> None:
        self.events, self._other = Pipe(duplex=False)
        self.ended = False

    def end(self) -> None:
        self.ended = True


def test_a_rank_without_an_answer_is_named_after_the_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that is lost, or may have waited for the other."""
    store, silent = dist.HashStore(), Silent()  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.import_module("attnswitch.verify.ranks.supervisor"), "Child", lambda *_, **__: silent)
    task = Task(Case.of(Problem.parse("b1.h2.s8.d8.fp32")), "ring")
    for name, content in ((key_of("task", 0), task), (key_of("over", 0), None), (key_of("task", 1), None)):
        put(store, name, content)
    Supervisor(store, 0, 2, "cpu", 60.0).serve()
    answer = take(store, key_of("answer", 0, 0))
    assert silent.ended
    answers = (answer, Answer(failed="rank 1: killed"))
    failure = Conductor(store, 2, "cpu")._verdict(task, "ring", "cpu", answers).failure
    assert failure is not None
    assert failure.check == "crash"
    assert failure.message.startswith("rank 1: killed; rank 0: no answer")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("ring",), "torchrun"),
        (("rings",), "did you mean 'ring'"),
        (("ring", "--backend", "tiled"), "--backend"),
        (("ring", "--device", "cpu", "--device", "cuda"), "name one"),
    ],
)
def test_what_makes_no_sense_is_told(said: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    outcome = CliRunner().invoke(app, ["verify", "--ranks", *said])
    assert outcome.exit_code != 0
    assert words in str(outcome.exception)
