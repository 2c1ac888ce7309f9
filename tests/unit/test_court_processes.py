"""Which processes are a compiler's, that may stay: by what they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnswitch.verify.court import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


@contextmanager
def running(*command: str, **how: Any) -> Iterator[int]:
    """Its number, once it is what it is to be."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **how) as process:
        try:
            for _ in range(100):
                if processes.command(process.pid) == " ".join(command):
                    break
                time.sleep(0.05)
            yield process.pid
        finally:
            process.kill()


def test_those_of_multiprocessing_are() -> None:
    """Python tells them in one line what to run, with the options that it was given itself."""
    code = "\n".join(
        (
            "from multiprocessing import forkserver, resource_tracker",
            "resource_tracker.ensure_running(), forkserver.ensure_running()",
            "print(resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid, flush=True)",
            "input()",
        )
    )
    for options in ((), ("-B", "-X", "utf8", "-W", "ignore")):
        command = (sys.executable, *options, "-c", code)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            numbers = list(map(int, process.stdout.readline().split()))
            names = [processes.command(number) for number in numbers]
            assert [processes.is_compilers(number) for number in numbers] == [True, True], names
            assert not processes.is_compilers(process.pid)
            process.communicate("\n")


def test_one_that_has_just_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec it has no command line."""
    with running(sys.executable, "-c", "from multiprocessing.resource_tracker import main;main(0)") as number:
        read, early = Path.read_bytes, [b"", b""]

        def read_bytes(path: Path) -> bytes:
            return early.pop() if early and path.name == "cmdline" else read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert processes.is_compilers(number)
        assert not early


@pytest.mark.slow
def test_those_that_torch_compiles_in_are() -> None:
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    try:
        assert pool.submit(int, "3").result(60) == 3
        there = {pool.process.pid, *processes.below(pool.process.pid)}
        assert len(there) > 1
        assert all(map(processes.is_compilers, there)), [processes.command(number) for number in there]
    finally:
        pool.shutdown()


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "input()", "torch._inductor"),
        ("-c", "from multiprocessing.resource_tracker import main; input()"),
        ("-c", "from multiprocessing.resource_tracker import main;main(input())"),
        ("-c", "from multiprocessing.forkserver import main; main(0, 0, [], **{}); input()"),
        ("-c", "from multiprocessing.resource_tracker import main;main(  7  )"),
        ("-W", "ignore", "-c", "input()", "torch/_inductor/compile_worker/__main__.py"),
    ],
)
def test_what_python_is_told_beside_is_not(words: tuple[str, ...]) -> None:
    with running(sys.executable, *words) as number:
        assert not processes.is_compilers(number)


def test_other_programs_by_their_names_are_not() -> None:
    names = processes._of_torch(), "torch._inductor", "multiprocessing.resource_tracker"
    for name in names:
        with running(name, "60", executable="/bin/sleep") as number:
            assert not processes.is_compilers(number)
    with running(sys.executable, processes._of_torch(), executable="/bin/cat") as number:
        assert not processes.is_compilers(number)


@pytest.mark.parametrize("variables", [{}, {"PYTHONPATH": "FOLDER"}], ids=str)
def test_where_other_modules_have_the_names_is_not(variables: dict[str, str], tmp_path: Path) -> None:
    module = tmp_path / "multiprocessing" / "resource_tracker.py"
    module.parent.mkdir()
    module.with_name("__init__.py").touch()
    module.write_text("def main(number):\n    input()\n")
    code = "from multiprocessing.resource_tracker import main;main(0)"
    environment = {name: value.replace("FOLDER", str(tmp_path)) for name, value in variables.items()}
    with running(sys.executable, "-c", code, env=environment) as number:
        assert not processes.is_compilers(number)


def test_what_is_not_there_is_not() -> None:
    assert not processes.is_compilers(2**22 + 1)
