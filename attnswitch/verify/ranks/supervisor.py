"""``Supervisor``: one rank's worker, and the store through which rank 0 gives tasks and gets answers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from attnswitch.child import Child, ending
from attnswitch.verify.ranks.mail import come, key_of, put, take
from attnswitch.verify.ranks.task import Answer, Task

__all__ = ["Supervisor"]

_WORKER = "attnswitch.verify.ranks.worker"
#: Seconds between two looks at a store: at first, and once nothing came for a while; and beside a worker.
_SHORT, _LONG, _GLANCE = 0.001, 0.05, 0.2
#: Seconds that a worker may take to begin: it imports torch, and meets all others.
_START = 120.0


class Supervisor:
    """Serves one rank. ``device`` is the worker's; an answer takes ``seconds`` at most."""

    def __init__(self, store: Any, rank: int, ranks: int, device: str, seconds: float) -> None:
        self._store, self._rank, self._ranks, self._device, self._seconds = store, rank, ranks, device, seconds
        self._worker: Child | None = None
        self._generation = -1

    def serve(self) -> None:
        """Tasks in their order, until there is None."""
        number = 0
        try:
            while True:
                task = self._wait(key_of("task", number))
                if task is None:
                    return
                put(self._store, key_of("answer", number, self._rank), self._answered(task, number))
                number += 1
        finally:
            self._end()

    def _wait(self, key: str) -> Task | None:
        pause = _SHORT
        while not come(self._store, key):  # to wait at the store would print a warning now and then
            time.sleep(pause)
            pause = min(_LONG, 1.1 * pause)
        task: Task | None = take(self._store, key)
        return task

    def _answered(self, task: Task, number: int) -> Answer:
        if task.generation != self._generation:
            self._end()
            self._generation = task.generation
        began = time.monotonic()
        if self._worker is None:
            arguments = map(str, (self._rank, self._ranks, self._generation, self._device, self._seconds))
            self._worker = Child(_WORKER, *arguments, apart=True)
            started = self._heard(began + _START, number)
            if isinstance(started, Answer):
                return started
            began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # how it ended is told below
            self._worker.requests.send(task)
        return self._heard(began + self._seconds, number) or Answer(failed="the worker said nothing")

    def _heard(self, limit: float, number: int) -> Answer | None:
        """What the worker says, None being that it is ready. It is ended if it died, is late, or nobody waits."""
        assert self._worker is not None
        worker = self._worker
        looked = time.monotonic()
        while not worker.events.poll(0.02):
            now = time.monotonic()
            if now > limit:
                self._end()
                return Answer(failed=f"rank {self._rank}: no answer in time; its process was ended", hung=True)
            if now - looked > _GLANCE:
                looked = now
                if come(self._store, key_of("over", number)):
                    self._end()
                    ended = f"rank {self._rank}: no answer when another had failed; its process was ended"
                    return Answer(failed=ended, after=True)
        try:
            heard: Answer | None = worker.events.recv()
        except (EOFError, OSError):
            code, said = worker.wait(), worker.said()
            self._end()
            return Answer(failed=f"rank {self._rank}: {ending(code)}" + (f"\n{said}" if code > 0 else ""))
        return heard

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker, self._generation = None, -1
