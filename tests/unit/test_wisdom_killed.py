"""Sixteen processes write into one store at once and are killed at random: what was acknowledged is there, whole.

One that is stopped keeps no call waiting.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch.wisdom import store
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.store import Store

#: Appends records of one writer, each numbered by its milliseconds, and says so of each that is on the disk. Every
#: write to the store comes in pieces with a pause between, so that a kill may well fall into the middle of a line.
WRITER = """
import os, sys, time
from pathlib import Path
from attnswitch import Problem
from attnswitch.wisdom import store
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.signature import Signature

whole = os.write
def slow(handle, content):
    time.sleep(0.001)
    return whole(handle, content[:97])
store.os.write = slow

kept, name = store.Store(Path(sys.argv[1])), sys.argv[2]
signature, problem = Signature("cpu", (), ""), Problem.parse("b1.h1.s8.d8.fp32")
whole(1, b"ready\\n")
for number in range(1, 100_000):
    kept.append([Time(problem, name, "", float(number), 1.0, 1.0, 1, 1, signature, "2026-11-01")])
    whole(1, b"%d\\n" % number)
"""
WRITERS = 16


def start(path: Path, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE)


def acknowledged(writer: subprocess.Popen[bytes]) -> list[float]:
    """What a writer that is dead has said; a number that its death cut off was not said."""
    assert writer.stdout is not None
    with writer.stdout as said:
        lines = said.read().split(b"\n")[:-1]
    return [float(line) for line in lines if line != b"ready"]


def test_nothing_acknowledged_is_lost_and_nothing_is_damaged(tmp_path: Path) -> None:
    kept = Store(tmp_path / "wisdom.jsonl")
    draw = random.Random(6)
    writers = {f"writer-{number}": start(kept.path, f"writer-{number}") for number in range(WRITERS)}
    try:
        for writer in writers.values():
            assert writer.stdout is not None
            assert writer.stdout.read(6) == b"ready\n"
        for name in draw.sample(sorted(writers), WRITERS):
            time.sleep(draw.uniform(0.01, 0.15))
            writers[name].kill()
            assert kept.read().damaged == []  # while others write
    finally:
        for writer in writers.values():
            writer.kill()
            writer.wait()
    promised = {(name, number) for name, writer in writers.items() for number in acknowledged(writer)}
    assert len(promised) > WRITERS
    found = kept.read()
    kept.append(found.records[:1])  # after whatever the last one left behind
    again = kept.read()
    assert (again.records, again.damaged) == ([*found.records, found.records[0]], [])
    there = [(record.backend, record.ms) for record in found.records if isinstance(record, Time)]
    assert promised <= set(there)
    # One of each may have been on the disk when its writer died before it could say so.
    assert len(there) == len(set(there)) <= len(promised) + WRITERS


# -- a writer that is stopped ------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""
Q = torch.ones(1, 1, 8, 8)


@pytest.fixture
def stopped(no_wisdom: Path) -> Iterator[Path]:
    """The lock of this user's wisdom, held by a process that is stopped."""
    lock = store.here().path.with_suffix(".lock")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        yield lock
        holder.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing can be stopped there")
def test_a_call_does_not_wait_for_a_writer_that_is_stopped(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    append = Store.append

    def timed(*arguments: Any) -> None:
        began = time.monotonic()
        try:
            append(*arguments)
        finally:
            waited.append(time.monotonic() - began)

    monkeypatch.setattr(Store, "append", timed)
    with pytest.warns(RuntimeWarning, match=rf"in this process alone: .* another process holds {stopped}: see whether"):
        out = attnswitch.attention(Q, Q, Q, policy="measure")
    torch.testing.assert_close(out, Q)
    assert len(waited) == 1
    assert 1.0 < waited[0] < 5.0
    attnswitch.attention(Q, Q, Q, policy="measure")
    assert len(waited) == 1
    assert attnswitch.plan(Q, Q, Q).chosen.time is not None  # type: ignore[union-attr]
    assert not store.here().path.exists()
