"""A child works for a process, whichever of its threads started it, and ends with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnswitch.child import Child

ECHO = """
from attnswitch import child
parent = child.begin()
while True:
    try:
        parent.events.send(parent.requests.recv())
    except EOFError:
        break
"""
#: A parent that starts a child from a thread that ends, says which, and waits; its child waits where no pipe tells.
PARENT = """
import threading, time
from attnswitch.child import Child
def start():
    child = Child("hangs", variables={"PYTHONPATH": PATHS})
    child.events.recv()
    print(child._process.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(600)
"""
HANGS = "import time; from attnswitch import child; parent = child.begin(); parent.events.send(0); time.sleep(600)"


@pytest.fixture
def started() -> Iterator[list[Child]]:
    """Children to be ended after the test."""
    children: list[Child] = []
    yield children
    for child in children:
        child.end()


def in_a_thread(children: list[Child], folder: Path) -> Child:
    """A child, once the thread that started it and had its first answer has ended."""

    def start() -> None:
        children.append(Child("echo", variables={"PYTHONPATH": str(folder)}))
        assert answers(children[-1])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return children[-1]


def answers(child: Child) -> bool:
    try:
        child.requests.send("still there?")
        return child.events.poll(60) and child.events.recv() == "still there?"
    except (BrokenPipeError, EOFError):
        return False


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def test_it_outlives_the_thread_that_started_it(started: list[Child], tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    for _ in range(2):
        child = in_a_thread(started, tmp_path)
        time.sleep(0.2)
        assert answers(child), f"it ended with {child.wait()}"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_starts_children_of_its_own(started: list[Child], tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    in_a_thread(started, tmp_path)
    fork = os.fork()
    if fork == 0:
        code = 1
        try:
            own: list[Child] = []
            child = in_a_thread(own, tmp_path)
            code = 0 if answers(child) else 2
            child.end()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert answers(started[0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pipe tells, between two jobs")
def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    program = PARENT.replace("PATHS", repr(str(tmp_path)))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        assert runs(pid)
        parent.kill()
    end = time.monotonic() + 30
    while runs(pid):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("it is still there")
        time.sleep(0.05)
