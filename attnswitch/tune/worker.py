"""The process that measures in the background: it is asked for one class after the other, and rests when it is told to.

    python -m attnswitch.tune.worker READ WRITE FOLDER

The three are a ``Child``'s. What it measures is remembered in the user's store. Backends are verified in a process of
their own, as ``attnswitch tune`` has them verified: one that crashes is left out, and does not take this one with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from filelock import FileLock, Timeout

from attnswitch import child, files
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.planning.plan import Plan
from attnswitch.tune import trial
from attnswitch.tune.messages import Answer, Ask, Say
from attnswitch.tune.sight import EFFORT
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import AUTO, Outcome
from attnswitch.verify.session import apart
from attnswitch.verify.session.pool import Isolated
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Record

__all__ = ["LOCK", "main"]

#: A file in the user's cache folder: whoever holds it measures, and the other programs of the user wait.
LOCK = "learn.lock"
#: Seconds that one launch may take while it is verified.
_TIMEOUT = 120.0
#: Milliseconds of rest before each loop on the CPU, which the program keeps busy as it likes.
_REST = 20.0
#: Says so, and returns when it is time to go on.
Pause = Callable[[Say], None]


def main() -> None:
    """Answer until the other end closes the connection."""
    parent = child.begin()

    def pause(why: Say) -> None:
        parent.events.send(why)
        parent.requests.recv()

    parent.events.send(Say.READY)
    with contextlib.ExitStack() as open_pools, contextlib.suppress(EOFError, BrokenPipeError):
        pools: dict[str, Isolated] = {}
        while True:
            ask: Ask = parent.requests.recv()
            if ask.where not in pools:
                pools[ask.where] = open_pools.enter_context(apart.pool(ask.where, AUTO, _TIMEOUT))
            if ask.threads is not None:
                torch.set_num_threads(ask.threads)
            with _alone(pause):
                parent.events.send(Answer(tuple(_learned(ask, pools[ask.where], pause))))


@contextlib.contextmanager
def _alone(pause: Pause) -> Iterator[None]:
    """Within the context no other program measures: two would slow each other down, and most measure the same."""
    lock = None
    with contextlib.suppress(OSError):  # this machine has no folder for it
        files.cache_folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(files.cache_folder() / LOCK)
        while not _acquired(lock):
            pause(Say.BUSY)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _learned(ask: Ask, pool: Isolated, pause: Pause) -> list[Record]:
    """What is known of the class of a problem, after what was not was measured and remembered."""
    view.reload()  # another program may have measured it
    plan = planner.make_plan(ask.problem, Device.parse(ask.where))
    known = _known(plan)
    if not plan.open:
        return known

    def examine(case: Case, backends: Sequence[str], where: str) -> list[Outcome]:
        outcomes = pool.examine(case, backends, where)
        pause(Say.REST)
        return outcomes

    effort = replace(EFFORT, rest=_REST) if ask.where == "cpu" else EFFORT
    tried = trial.run(ask.problem, ask.where, effort, examine)
    with contextlib.suppress(OSError):  # it counts in the process that asked all the same
        view.remember(tried.lasting)
    return [*known, *tried.lasting]


def _known(plan: Plan) -> list[Record]:
    facts = [fact for c in plan.candidates for fact in (c.time, c.untimed, c.fault)]
    return [fact for fact in facts if fact is not None]


if __name__ == "__main__":
    main()
