"""``Child``: a Python process that works for this one, as both ends see it: two pipes, and an end with its parent.

It is a new one, or a fork of this one. ``command``, ``environment`` and ``follow`` are for every process of Python that
this package starts, and ``safe_path`` is for those that ``concurrent.futures`` starts for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

__all__ = [
    *("Child", "Parent", "adopt", "begin", "command", "end_with_parent", "ending"),
    *("environment", "follow", "hidden", "is_hidden", "safe_path"),
]

#: Environment variable with the folders that the parent imports from. The child adds them behind its own: a folder of
#: the user's may hold a file that is named like a module of the standard library.
_PATHS = "ATTNSWITCH_WORKER_PATHS"
#: Python's own, which says what its option -P says.
_SAFE_PATH = "PYTHONSAFEPATH"
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 3, 4, 36

_Start = Callable[[], subprocess.Popen[bytes]]


def command(module: str, *arguments: str) -> list[str]:
    """What starts ``python -m module``, with nothing imported from the current folder, which may be anybody's."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """That of this process and ``variables``, with which another can ``follow`` it."""
    return {**os.environ, **variables, _PATHS: os.pathsep.join(path for path in sys.path if path)}


def follow() -> None:
    """In a process that was started so: import from wherever its parent does as well."""
    sys.path += [path for path in os.environ.get(_PATHS, "").split(os.pathsep) if path and path not in sys.path]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Within the context, processes that ``multiprocessing`` spawns import nothing from the current folder either."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE_PATH, None)
        else:
            os.environ[_SAFE_PATH] = before


class Child:
    """``python -m module``, whose main function calls ``begin``. It takes requests, and tells events.

    ``variables`` are added to its environment. One that is ``apart`` heads a process group of its own: Ctrl-C in a
    terminal does not reach it, and ``end`` takes its own children with it. Its folder is ``within`` another, where
    somebody else will tidy up if this process cannot.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        apart: bool = False,
        within: Path | None = None,
    ) -> None:
        parent = self._opened(within, *arguments)
        ends = (parent.requests.fileno(), parent.events.fileno())
        started_by = command(module, *map(str, ends), str(self.folder), *arguments)
        variables = environment(variables)
        self._apart = apart

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                started_by,
                pass_fds=ends,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                process_group=0 if apart else None,
            )

        in_main = threading.current_thread() is threading.main_thread()
        self._process: subprocess.Popen[bytes] | _Fork = start() if in_main else _starter.run(start)
        parent.requests.close()
        parent.events.close()

    @classmethod
    def forked(
        cls,
        work: Callable[[Parent], object],
        *arguments: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        within: Path | None = None,
    ) -> Child:
        """A fork of this process, where nothing else runs: ``work`` finds all that is loaded, and no file but its own.

        It is apart. This process was started with other ``variables`` of as many letters: who looks at the fork from
        without reads those given here.
        """
        child = cls.__new__(cls)
        parent = child._opened(within, *arguments)
        child._apart = True
        number = os.fork()
        if number == 0:
            try:
                os.setpgid(0, 0)
                _keep_open(child._output, parent)
                _set_in_place(variables)
                end_with_parent()
                work(parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        child._process = _Fork(number)
        parent.requests.close()
        parent.events.close()
        return child

    def _opened(self, within: Path | None, *arguments: str) -> Parent:
        """The folder and both ends of both pipes, of which those returned are the child's."""
        #: Of its own, until it ends.
        self.folder = Path(tempfile.mkdtemp(prefix="attnswitch-", dir=within))
        self._output = (self.folder / "output.txt").open("a+b")
        requests, self.requests = Pipe(duplex=False)
        self.events, events = Pipe(duplex=False)
        return Parent(requests, events, self.folder, list(arguments))

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait()

    @property
    def number(self) -> int:
        """That of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended: its number may be another's by now."""
        return self._process.returncode is not None

    def said(self) -> str:
        """The end of what it has printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-2000:]

    def kill(self) -> None:
        """Kill it, unless it is known to have ended; if it is apart, with its own children, which may outlive it."""
        if self.has_ended:
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


class _Fork:
    """A fork, with what ``subprocess.Popen`` says of a process."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.returncode: int | None = None

    def wait(self) -> int:
        """The exit code, once it has ended; 0 if another has waited for it."""
        if self.returncode is None:
            self.returncode = 0
            with contextlib.suppress(ChildProcessError):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it is not known to have ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _keep_open(output: IO[bytes], parent: Parent) -> None:
    """In a fork: close all files but these, and print to ``output``."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for standard in (1, 2):
        os.dup2(output.fileno(), standard)
    kept = {0, 1, 2, parent.requests.fileno(), parent.events.fileno(), output.fileno()}
    for number in {int(name) for name in os.listdir("/dev/fd")} - kept:  # its limit may be any number
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(number)


def _set_in_place(variables: Mapping[str, str]) -> None:
    """Set variables of the environment where this process was given them, which is what others of this user read."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name, value in variables.items():
        assert len(os.environ[name]) == len(value), "no room for it"
        ctypes.memmove(getenv(name.encode()), value.encode(), len(value))
        os.environ[name] = value


class _Starter:
    """A thread that lasts as long as the process, and starts the children of threads that may not.

    Linux ends a child with the thread that started it, not with its process.
    """

    def __init__(self) -> None:
        self._begun = False
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]] = queue.SimpleQueue()

    def run(self, start: _Start) -> subprocess.Popen[bytes]:
        """What ``start`` returns or raises."""
        with self._lock:
            if not self._begun:
                threading.Thread(target=self._serve, name="attnswitch-starter", daemon=True).start()
                self._begun = True
        started: Future[subprocess.Popen[bytes]] = Future()
        self._asked.put((start, started))
        return started.result()

    def _serve(self) -> None:
        while True:
            start, started = self._asked.get()
            try:
                started.set_result(start())
            except BaseException as error:  # whoever asked is told
                started.set_exception(error)


_starter = _Starter()


def _begin_again() -> None:
    """A fork has none of its parent's threads but the one that forked."""
    global _starter
    _starter = _Starter()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_begin_again)


class Parent(NamedTuple):
    """What a child has of its parent."""

    requests: Connection
    events: Connection
    folder: Path
    arguments: list[str]


def end_with_parent() -> None:
    """Have this process end when its parent does."""
    # A kernel that hangs must not outlive it; elsewhere than on Linux the pipe tells, between two jobs.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt() -> None:
    """Have processes below this one be its own once their parents end, so that who ends this one finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Within the context no other process of this user reads this one's memory, unless it may trace all, as root's."""
    before = _prctl(_PR_GET_DUMPABLE)
    _prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        if before:
            _prctl(_PR_SET_DUMPABLE, before)


def is_hidden() -> bool:
    """Whether it is so."""
    return _prctl(_PR_GET_DUMPABLE) == 0


def _prctl(option: int, value: int = 0) -> int | None:
    """What Linux answers; None elsewhere."""
    return int(ctypes.CDLL(None).prctl(option, value)) if sys.platform == "linux" else None


def ending(code: int) -> str:
    """How a process ended whose exit code is ``code``, as a sentence."""
    if code < 0:
        try:
            return f"the process died of {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died of signal {-code}"
    return f"the process ended with exit code {code}"


def begin() -> Parent:
    """What a child does first: it leaves Ctrl-C to its parent, and ends when that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    follow()
    read, write, folder, *arguments = sys.argv[1:]
    requests, events = Connection(int(read), writable=False), Connection(int(write), readable=False)
    return Parent(requests, events, Path(folder), arguments)
