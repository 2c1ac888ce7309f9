"""``Process``: a worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from attnswitch.child import Child, ending
from attnswitch.errors import VerificationError
from attnswitch.verify.court import processes, server
from attnswitch.verify.drawing import provider
from attnswitch.verify.outcome import Failure
from attnswitch.verify.session import journal
from attnswitch.verify.session.events import Event, Ready
from attnswitch.verify.session.explore import Job
from attnswitch.verify.terms import Terms

__all__ = ["Died", "Process"]

_WORKER = "attnswitch.verify.session.worker"
#: Seconds that a worker may take to begin: it imports torch, and may have to start a GPU.
_START = 300.0


class Died(Exception):
    """The process ended, or was ended because it did not answer, while ``entry`` ran.

    ``how`` says it in words; ``hung`` whether it was for want of an answer.
    """

    def __init__(self, how: str, entry: journal.Entry | None, hung: bool) -> None:
        super().__init__(how)
        self.how, self.entry, self.hung = how, entry, hung

    @property
    def failure(self) -> Failure:
        """The finding that it is."""
        fenced = not self.hung and self.entry is not None and self.entry.case.check == "fences"
        return Failure(
            "hang" if self.hung else "crash", self.how + ", with operands beside which there is no memory" * fenced
        )


class Process:
    """Starts a worker; a context manager that ends it.

    ``threads`` is how many its libraries may use, None for as many as they like. ``variables`` are added to its
    environment. It judges on ``terms``.
    """

    def __init__(
        self,
        device: str,
        threads: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        terms: Terms = Terms(),  # noqa: B008
    ) -> None:
        if threads is not None:
            usual = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}  # its threads spin while they wait
            variables = {**{name: usual[name] for name in usual.keys() - os.environ.keys()}, **variables}
        self._child = Child(_WORKER, device, variables={**provider.storage(), **server.PLACE, **variables})
        with contextlib.suppress(BrokenPipeError):  # that it could not start is told by what it sends
            self._child.requests.send(terms)
        self.events = self._child.events
        self._moved, self._count = time.monotonic(), -1
        self.provenance: dict[str, str] = {}
        self.ready = False

    def send(self, job: Job) -> None:
        """Give it a job; its events follow on ``events``."""
        self._moved = time.monotonic()
        try:
            self._child.requests.send(job)
        except BrokenPipeError:
            raise self._dead() from None

    def receive(self) -> Event:
        """The next event, which must be waiting on ``events``.

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
            return Ready()
        if isinstance(message, Exception):
            raise message
        event: Event = message
        return event

    def watch(self, timeout: float) -> None:
        """Raise ``Died``, having ended it, if the launch that it is in has taken ``timeout`` seconds."""
        entry = journal.read(journal.path(self._child.folder))
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
        code = self._child.wait()
        entry = journal.read(journal.path(self._child.folder))
        if not self.ready:
            raise VerificationError(f"a worker process could not start (exit code {code}):\n{self._child.said()}")
        self.end()
        return Died(ending(code), entry, hung=False)

    def end(self) -> None:
        """Kill it if it still runs, with all that kernels started in it, and tidy up."""
        if not self._child.has_ended:
            processes.end_below(self._child.number)
        self._child.end()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()
