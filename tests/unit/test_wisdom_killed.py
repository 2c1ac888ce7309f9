"""Sixteen processes write into one store at once and are killed at random: what was acknowledged is there, whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

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
