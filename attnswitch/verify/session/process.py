"""``Process``: a worker process as its parent sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from attnswitch.errors import VerificationError
from attnswitch.verify.session import journal
from attnswitch.verify.session.events import Event
from attnswitch.verify.session.explore import Job

__all__ = ["PATHS", "Died", "Process"]

#: Environment variable with the folders that the parent imports from. The worker adds them behind its own: a folder of
#: the user's may hold a file that is named like a module of the standard library.
PATHS = "ATTNSWITCH_WORKER_PATHS"
#: Seconds that a worker may take to begin: it imports torch, and may have to start a GPU.
_START = 300.0


class Died(Exception):
    """The process ended, or was ended because it did not answer, while ``entry`` ran.

    ``how`` says it in words; ``hung`` whether it was for want of an answer.
    """

    def __init__(self, how: str, entry: journal.Entry | None, hung: bool) -> None:
        super().__init__(how)
        self.how, self.entry, self.hung = how, entry, hung


class Process:
    """Starts a worker; a context manager that ends it.

    ``threads`` is how many its libraries may use, None for as many as they like. ``variables`` are added to its
    environment.
    """

    def __init__(
        self, device: str, threads: int | None = None, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attnswitch-")
        self._journal = Path(self._folder.name) / "journal.json"
        read_jobs, self._jobs = Pipe(duplex=False)
        self.events, write_events = Pipe(duplex=False)
        ends = (read_jobs.fileno(), write_events.fileno())
        command = [
            sys.executable,
            "-m",
            "attnswitch.verify.session.worker",
            *map(str, ends),
            str(self._journal),
            device,
        ]
        environment = {**os.environ, **variables, PATHS: os.pathsep.join(path for path in sys.path if path)}
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin while they wait
        self._output = (Path(self._folder.name) / "output.txt").open("w+b")
        self._process = subprocess.Popen(
            command, pass_fds=ends, env=environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        read_jobs.close()
        write_events.close()
        self._moved, self._count = time.monotonic(), -1
        self.provenance: dict[str, str] = {}
        self.ready = False

    def send(self, job: Job) -> None:
        """Give it a job; its events follow on ``events``."""
        self._moved = time.monotonic()
        try:
            self._jobs.send(job)
        except BrokenPipeError:
            raise self._dead() from None

    def receive(self) -> Event | None:
        """The next event, which must be waiting on ``events``; None for its greeting.

        Raises:
            Died: it ended instead.
            VerificationError: the verifier made a mistake in it.
        """
        try:
            message: Any = self.events.recv()
        except (EOFError, OSError):
            raise self._dead() from None
        self._moved = time.monotonic()
        if isinstance(message, dict):
            self.provenance, self.ready = message, True
            return None
        if isinstance(message, Exception):
            raise message
        event: Event = message
        return event

    def watch(self, timeout: float) -> None:
        """Raise ``Died``, having ended it, if the launch that it is in has taken ``timeout`` seconds."""
        entry = journal.read(self._journal)
        count = entry.count if entry else -1
        now = time.monotonic()
        if count != self._count:
            self._count, self._moved = count, now
        if not self.ready and now - self._moved > _START:
            self.end()
            raise VerificationError(f"a worker process did not start within {_START:g} s")
        if self.ready and now - self._moved > timeout:
            self.end()
            raise Died(f"no answer after {timeout:g} s; the process was ended", entry, hung=True)

    def _dead(self) -> Died:
        code = self._process.wait()
        entry = journal.read(self._journal)
        if not self.ready:
            self._output.seek(0)
            said = self._output.read().decode(errors="replace").strip()[-2000:]
            raise VerificationError(f"a worker process could not start (exit code {code}):\n{said}")
        self.end()
        return Died(_ending(code), entry, hung=False)

    def end(self) -> None:
        """Kill it if it still runs, and tidy up."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for end in (self._jobs, self.events):
            end.close()
        self._output.close()
        self._folder.cleanup()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"the process died of {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died of signal {-code}"
    return f"the process ended with exit code {code}"
