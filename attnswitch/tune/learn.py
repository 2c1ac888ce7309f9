"""Policy LEARN in the program's own process: a thread that has one class after the other measured in another process.

Measuring here would hold Python's lock, change random generators and take the GPU's memory, and a kernel that crashes
would take the program with it. What is measured are problems, not the program's arrays, so the process that measures
(``attnswitch.tune.worker``) needs nothing of the program. The thread sleeps, asks, and adds what it is answered to the
wisdom of this process, by which later calls choose.

The worker is awake for a share of the time alone. It rests after each of its steps, which are its start, the
verification of a class, and its timing; before the first it has rested for what a start takes. So nothing begins in a
program that does not run long enough, and no call waits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

from attnswitch.child import Child
from attnswitch.machine.device import Device
from attnswitch.planning import planner, waiting
from attnswitch.planning import policy as policies
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem
from attnswitch.tune.messages import Answer, Ask, Say
from attnswitch.wisdom import view

__all__ = ["Learner", "begin", "end"]

_WORKER = "attnswitch.tune.worker"
#: Of the worker, which must not learn itself. Its threads sleep while they wait for each other: where the program keeps
#: the cores busy, threads that spin make a call seem to take a hundred times as long, and take the program's time.
_VARIABLES = {"ATTNSWITCH_POLICY": str(Policy.ESTIMATE), "ATTNSWITCH_RECORD": "", "OMP_WAIT_POLICY": "passive"}
#: Seconds that starting the worker is taken to need: it imports torch, and may have to start a GPU.
_START = 5.0
#: Seconds after which a step is taken to hang, and those between two looks at whether another program is done.
_LONGEST, _BUSY = 600.0, 2.0
#: Workers that are lost one after the other before there are no more.
_LOSSES = 3
#: Seconds that the program's end waits for the thread.
_PATIENCE = 2.0


class Lost(Exception):
    """The worker ended, or was ended because it did not answer."""


class Learner:
    """The thread, and the worker while there is one. ``share`` is that of the time in which the worker is awake."""

    def __init__(self, share: float) -> None:
        #: Seconds of rest for each second that it is awake, and seconds that it was and has not rested for.
        self._rests, self._owed = 1.0 / share - 1.0, 0.0
        self._woken, self._ended = threading.Event(), threading.Event()
        self._worker: Child | None = None
        #: Held while a worker is started, so that the program's end does not miss it.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="attnswitch-learn", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A class waits."""
        self._woken.set()

    def end(self) -> None:
        """End the worker and the thread, now."""
        self._ended.set()
        self._woken.set()
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
        self._thread.join(_PATIENCE)

    def disown(self) -> None:
        """In a fork, where the thread is not, and the worker is another process's."""
        if self._worker is not None:
            self._worker.disown()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the program must not hear of it but by ``explain``
            waiting.give_up(f"{type(error).__name__}: {error}")
        finally:
            self._dismiss()

    def _serve(self) -> None:
        losses = 0
        while not self._ended.is_set() and losses < _LOSSES:
            asked = self._next()
            if asked is None:
                self._dismiss()
                self._woken.wait()
                self._woken.clear()
                continue
            try:
                worker = self._worker or self._started()
            except Lost as loss:
                losses = self._lost(loss, losses)
                continue
            try:
                view.take(self._learned(worker, *asked))
                losses = 0
            except Lost as loss:
                losses = self._lost(loss, losses)
            waiting.done(*asked)  # also where it ended the worker, as it may again

    def _next(self) -> tuple[Problem, Device] | None:
        """The first class of those that wait which is not measured yet."""
        while (asked := waiting.first()) and not planner.make_plan(*asked, None, Policy.LEARN).open:
            waiting.done(*asked)
        return asked

    def _started(self) -> Child:
        """A worker that waits to be asked. Its start is rested for beforehand, as far as it takes what most take."""
        self._owed += _START
        self._rest()
        began = time.monotonic()
        with self._lock:
            if self._ended.is_set():
                raise Lost("the program ends")
            self._worker = Child(_WORKER, variables=_VARIABLES, apart=True)
        self._heard(self._worker)
        self._owed = max(0.0, time.monotonic() - began - _START)
        return self._worker

    def _learned(self, worker: Child, problem: Problem, device: Device) -> Any:
        """The records of a class, from the worker."""
        self._rest()
        torch = sys.modules.get("torch")
        threads = None if torch is None else torch.get_num_threads()
        heard = self._exchanged(worker, Ask(problem, device.where, threads))
        while not isinstance(heard, Answer):
            if heard is Say.BUSY:
                self._ended.wait(_BUSY)
            self._rest()
            heard = self._exchanged(worker, Say.GO)
        return heard.records

    def _exchanged(self, worker: Child, said: Any) -> Any:
        """What the worker answers to ``said``. In between it is awake."""
        began = time.monotonic()
        with contextlib.suppress(OSError):  # the answer tells why
            worker.requests.send(said)
        heard = self._heard(worker)
        self._owed += time.monotonic() - began
        return heard

    def _heard(self, worker: Child) -> Any:
        """What the worker says next. Raises ``Lost`` if it has ended, or says nothing for too long."""
        try:
            if worker.events.poll(_LONGEST):
                return worker.events.recv()
        except (EOFError, OSError):
            code, said = worker.wait(), worker.said().splitlines()
            raise Lost(
                f"the process that measures ended with exit code {code}{f': {said[-1]}' if said else ''}"
            ) from None
        raise Lost(f"the process that measures said nothing for {_LONGEST:g} s")

    def _rest(self) -> None:
        """Let the worker rest for what it was awake."""
        self._ended.wait(self._owed * self._rests)
        self._owed = 0.0

    def _lost(self, loss: Lost, before: int) -> int:
        """Tidy up after a worker; how many were lost one after the other, now."""
        self._dismiss()
        if before + 1 == _LOSSES:
            waiting.give_up(str(loss))
        return before + 1

    def _dismiss(self) -> None:
        """End the worker, if there is one."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


_learner: Learner | None = None
_beginning = threading.Lock()


def begin() -> None:
    """Have a thread of this process see to the classes that wait.

    Raises ``InvalidProblem`` for an ATTNSWITCH_LEARN_SHARE that is none.
    """
    global _learner
    with _beginning:
        if _learner is None:
            _learner = Learner(policies.share())
    _learner.wake()


def end() -> None:
    """End what measures for this process; the next class that is met begins it again."""
    global _learner
    with _beginning:
        learner, _learner = _learner, None
    if learner is not None:
        learner.end()


def _forked() -> None:
    """In a fork: classes that it meets are its own to have measured."""
    global _learner, _beginning
    _beginning = threading.Lock()
    learner, _learner = _learner, None
    waiting.forget()
    if learner is not None:
        learner.disown()


atexit.register(end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
