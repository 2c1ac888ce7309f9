"""What an application really calls, noted for tuning: every call of it once, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import InvalidProblem
from attnswitch.call import recording
from attnswitch.tune import problems
from attnswitch.verify import Case, check
from attnswitch.wisdom import view


def call(length: int) -> None:
    query, key, value = torch.randn(3, 1, 2, length, 8)
    attnswitch.attention(query, key, value, is_causal=True)


def test_recorded_calls_are_counted_and_written_once(tmp_path: Path) -> None:
    path = tmp_path / "calls.txt"
    call(4)
    with attnswitch.record(path) as recorded:
        for length in (5, 6, 5):
            call(length)
        thread = threading.Thread(target=call, args=(7,))
        thread.start()
        thread.join()
    call(8)
    counts = {str(problem): count for problem, count in recorded.problems.items()}
    assert counts == {"b1.h2.s5.d8.fp32.causal": 2, "b1.h2.s6.d8.fp32.causal": 1}
    assert path.read_text().splitlines() == list(counts)
    assert problems.recorded(path) == list(recorded.problems)


def test_gradients_of_arrays_without_autograd_are_recorded() -> None:
    query = np.ones((1, 1, 3, 8), np.float32)
    with attnswitch.record() as recorded:
        attnswitch.attention_backward(query, query, query, query)
    assert [str(problem) for problem in recorded.problems] == ["b1.h1.s3.d8.fp32.grad"]


def test_calls_of_plans_are_recorded_however_they_are_made(nothing_before: None) -> None:
    arrays = [np.ones((1, 2, 4, 8), np.float32)] * 3
    tensors = [torch.ones(1, 2, 4, 8)] * 3
    ways: list[tuple[Any, dict[str, Any]]] = [(arrays, {}), (tensors, {}), (tensors, {"key_lengths": [3]})]
    for operands, named in ways:
        plan = attnswitch.plan(*operands, **named)
        with attnswitch.record() as recorded:
            for _ in range(3):
                plan(*operands, **named)
        assert recorded.problems == {plan.problem: 3}


def test_a_call_that_a_plan_is_not_for_is_not_recorded() -> None:
    plan = attnswitch.plan("b1.h2.s4.d8.fp32")
    with attnswitch.record() as recorded, pytest.raises(InvalidProblem):
        plan(*np.ones((3, 1, 2, 5, 8), np.float32))
    assert not recorded.problems


def test_what_is_tried_and_verified_is_no_call_of_the_application() -> None:
    with attnswitch.record() as recorded:
        with attnswitch.using("measure"):
            call(5)
        check(Case(), "sdpa-math")
        call(5)
    assert {str(problem): count for problem, count in recorded.problems.items()} == {"b1.h2.s5.d8.fp32.causal": 2}
    assert view.current().times


@pytest.mark.parametrize("path", ["absent/calls.txt", "."])
def test_a_recording_that_cannot_be_written_says_so_at_once(path: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)), attnswitch.record(tmp_path / path):
        pass


def test_a_recording_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path)
    with attnswitch.record("calls.txt") as recorded:
        call(4)
        monkeypatch.chdir("deeper")
        call(5)
    assert (tmp_path / "calls.txt").read_text().splitlines() == [str(problem) for problem in recorded.problems]
    assert not list((tmp_path / "deeper").iterdir())


def test_a_line_that_could_not_be_written_is_written_with_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    with attnswitch.record(folder / "calls.txt") as recorded:
        (folder / "calls.txt").unlink()
        folder.rmdir()
        with pytest.raises(OSError, match="mounted"):
            call(5)
        folder.mkdir()
        call(5)
        call(5)
    assert (folder / "calls.txt").read_text().splitlines() == ["b1.h2.s5.d8.fp32.causal"]
    assert list(recorded.problems.values()) == [2]


def test_a_process_records_by_its_environment(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import test_recording; test_recording.call(5)"
    path = str(tmp_path / "calls.txt")
    environment = {**os.environ, "ATTNSWITCH_RECORD": path, "ATTNSWITCH_POLICY": "measure"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert [str(problem) for problem in problems.recorded(tmp_path / "calls.txt")] == ["b1.h2.s5.d8.fp32.causal"]
    assert recording.whole_process() is None


def test_a_recording_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "calls.txt").write_bytes(b"\xff\x00\x81")
    with pytest.raises(InvalidProblem, match=r"calls.txt is not a recording: it is not text"):
        problems.recorded(tmp_path / "calls.txt")


def test_a_line_that_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "calls.txt"
    path.write_text("b1.h2.s5.d8.fp32\n\nb1.h2\n")
    with pytest.raises(InvalidProblem, match=r"calls.txt, line 3: .*missing"):
        problems.recorded(path)
