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

import attnswitch
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
#: Prints what the children of a process and of its fork answer together, both begun by threads that end.
FORKS = """
import os, threading
from attnswitch.child import Child
def answer():
    child = Child("echo", variables={"PYTHONPATH": PATHS})
    child.requests.send(1)
    answers.append(child.events.recv())
    child.end()
def in_a_thread():
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
answers = []
in_a_thread()
fork = os.fork()
in_a_thread() if fork == 0 else os.waitpid(fork, 0)
if fork == 0:
    print(sum(answers), flush=True)
"""
#: Imports what may lie in the current folder, and says why one of them cannot be had.
LOOKS = """
import json, queue, typing
from attnswitch import child
parent = child.begin()
try:
    import stranger
except ImportError as error:
    parent.events.send(str(error))
parent.requests.recv()
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


def test_a_fork_starts_children_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    program = FORKS.replace("PATHS", repr(str(tmp_path)))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr


def test_nothing_is_imported_from_the_current_folder(
    started: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent may lie anywhere: a file there that is called like a module of the standard library is not it."""
    here, modules = tmp_path / "here", tmp_path / "modules"
    for folder in (here, modules):
        folder.mkdir()
    for name in ("typing", "json", "queue", "stranger"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    (modules / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as an interpreter has it that was given no file
    started.append(Child("looks", variables={"PYTHONPATH": str(modules)}))
    assert started[-1].events.poll(60)
    assert started[-1].events.recv() == "No module named 'stranger'"
    assert not (tmp_path / "ran").exists()


def test_one_module_says_how_python_is_started() -> None:
    root = Path(attnswitch.__file__).parents[1]
    sources = [path for folder in ("attnswitch", "backends", "cli") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in sources if "sys.executable" in path.read_text()] == ["child.py"]


#: A parent with a file, a pipe and a secret starts a fork, and prints what that answers and what is seen of it.
FORKED = """
import os, sys
from pathlib import Path
from attnswitch.child import Child
def look(parent):
    files = len(os.listdir("/proc/self/fd")) - 1  # without this listing
    parent.events.send((parent.arguments, loaded, files, os.environ["PLACE"], os.getpgrp() == os.getpid()))
    print("to its own file", flush=True)
    parent.requests.recv()
loaded = [1, 2]
here, there = os.pipe(), open(__file__)
before = [w.strip() for w in open("/proc/self/environ").read().split(chr(0)) if "PLACE" in w]
child = Child.forked(look, "word", variables={"PLACE": "1234"})
print(*child.events.recv())
environ = Path(f"/proc/{child.number}/environ").read_text().split(chr(0))
print(before, [word for word in environ if "PLACE" in word], os.environ["PLACE"])
child.requests.close()
print(child.wait(), child.said().splitlines()[0], child.said().splitlines()[-1])
child.end()
print(child.folder.exists())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_forked_child_has_what_is_loaded_and_none_of_the_files(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKED)
    environ = {**os.environ, "PLACE": "0000"}
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    assert ran.stdout.splitlines() == [
        "['word'] [1, 2] 6 1234 True",
        "['PLACE=0000'] ['PLACE=1234'] 0000",
        "1 to its own file EOFError",
        "False",
    ], ran.stderr


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
