"""``Child``: a Python process that works for this one, as both ends see it: two pipes, and an end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Child", "Parent", "begin"]

#: Environment variable with the folders that the parent imports from. The child adds them behind its own: a folder of
#: the user's may hold a file that is named like a module of the standard library.
_PATHS = "ATTNSWITCH_WORKER_PATHS"
_PR_SET_PDEATHSIG = 1


class Child:
    """``python -m module``, whose main function calls ``begin``. It takes requests, and tells events.

    ``variables`` are added to its environment. One that is ``apart`` heads a process group of its own: Ctrl-C in a
    terminal does not reach it, and ``end`` takes its own children with it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        apart: bool = False,
    ) -> None:
        #: Of its own, until it ends.
        self.folder = Path(tempfile.mkdtemp(prefix="attnswitch-"))
        read_requests, self.requests = Pipe(duplex=False)
        self.events, write_events = Pipe(duplex=False)
        ends = (read_requests.fileno(), write_events.fileno())
        command = [sys.executable, "-m", module, *map(str, ends), str(self.folder), *arguments]
        environment = {**os.environ, **variables, _PATHS: os.pathsep.join(path for path in sys.path if path)}
        self._output = (self.folder / "output.txt").open("a+b")
        self._apart = apart
        self._process = subprocess.Popen(
            command,
            pass_fds=ends,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            process_group=0 if apart else None,
        )
        read_requests.close()
        write_events.close()

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait()

    def said(self) -> str:
        """The end of what it has printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-2000:]

    def kill(self) -> None:
        """Kill it, unless it is known to have ended; if it is apart, with its own children, which may outlive it."""
        if self._process.returncode is not None:  # its number may be another's by now
            return
        if self._apart:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill it if it still runs, and tidy up."""
        self.kill()
        for end in (self.requests, self.events, self._output):
            end.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def disown(self) -> None:
        """In a fork of the parent: close what it has of the child, which goes on working for the parent."""
        for end in (self.requests, self.events, self._output):
            end.close()
        self._process.returncode = 0  # so that it is not looked for among the children of the fork


class Parent(NamedTuple):
    """What a child has of its parent."""

    requests: Connection
    events: Connection
    folder: Path
    arguments: list[str]


def begin() -> Parent:
    """What a child does first: it leaves Ctrl-C to its parent, and ends when that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # a kernel that hangs must not outlive it; elsewhere the pipe tells, between two jobs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path += [path for path in os.environ.get(_PATHS, "").split(os.pathsep) if path and path not in sys.path]
    read, write, folder, *arguments = sys.argv[1:]
    requests, events = Connection(int(read), writable=False), Connection(int(write), readable=False)
    return Parent(requests, events, Path(folder), arguments)
