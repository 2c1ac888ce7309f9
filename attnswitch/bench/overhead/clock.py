"""Ways to call timed in turn, a batch of each in a round, until the calls return or until the device is done.

The device is waited for between batches, so that no queue fills up. A few calls before each batch are not counted:
whatever ran before, a batch finds its own code in the caches. The order is drawn anew in each round, so that no way
always follows the same other.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnswitch.bench.measure import wait
from attnswitch.bench.overhead.operands import Source
from attnswitch.bench.overhead.ways import AUTO, TORCH, Way

__all__ = ["QUICK", "THOROUGH", "Effort", "one_thread", "turns"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a row is measured.

    ``calls`` of a batch at most, far fewer than a GPU queues, and fewer where they take long; ``uncounted`` calls
    before it. ``warm`` rounds before the clock starts and ``rounds`` after it are at most: one and three are run
    whatever they take, the others while less than a fifth of ``seconds``, and ``seconds``, has passed.
    """

    calls: int = 50
    uncounted: int = 10
    warm: int = 3
    rounds: int = 100
    seconds: float = 2.0


THOROUGH, QUICK = Effort(), Effort(calls=10, uncounted=2, warm=1, rounds=10, seconds=0.05)
#: Rounds at the least.
LEAST = 3
#: Seconds that a batch of torch's own calls takes at most, unless one call takes longer.
_BATCH = 0.005
#: Calls, uncounted calls and rounds at most where each number of keys is new: a row is about numbers near its own.
_NEW_CALLS, _NEW_UNCOUNTED, _NEW_ROUNDS = 5, 3, 30


def paced(effort: Effort, one: float, *, new_lengths: bool) -> Effort:
    """``effort`` with batches as long as is sensible for calls of ``one`` second."""
    calls = max(1, min(effort.calls, int(_BATCH / max(one, 1e-9))))
    uncounted = min(effort.uncounted, calls // 5)
    rounds = effort.rounds
    if new_lengths:
        calls, rounds = min(calls, _NEW_CALLS), min(rounds, _NEW_ROUNDS)
        uncounted = min(effort.uncounted, _NEW_UNCOUNTED)
    return replace(effort, calls=calls, uncounted=uncounted, rounds=rounds)


def turns(ways: Mapping[str, Way], feed: Source, device: str, effort: Effort, *, done: bool) -> dict[str, list[float]]:
    """Microseconds of a call for each round; with ``done``, until the device is done with the batch."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names, count, timed = list(ways), effort.uncounted + effort.calls, 0
    deal = random.Random(0)
    start = time.perf_counter()
    for turn in range(effort.warm + effort.rounds):
        spent = time.perf_counter() - start
        if not timed and turn and (turn == effort.warm or spent > effort.seconds / 5):
            timed, start = turn, time.perf_counter()
        elif timed and (turn - timed == effort.rounds or (turn - timed >= LEAST and spent > effort.seconds)):
            break
        for place, name in enumerate(deal.sample(names, len(names))):
            calls = [ways[name].of(operands) for operands in feed.take(count, place, len(names))]
            with ways[name].within():
                taken = _batch(calls, effort.uncounted, device, done=done)
            if timed:
                times[name].append(taken)
    return times


def one_call(ways: Mapping[str, Way], feed: Source, device: str) -> float:
    """Seconds of one of torch's own calls, or of the choice where there is none, the least of a few."""
    call = ways[TORCH if TORCH in ways else AUTO].of(feed.first)
    return min(_batch([call] * 4, 1, device, done=True) for _ in range(LEAST)) / 1e6


def _batch(calls: list[Callable[[], Any]], uncounted: int, device: str, *, done: bool) -> float:
    """Microseconds of one of ``calls``, the first ``uncounted`` left out."""
    for call in calls[:uncounted]:
        call()
    counted = calls[uncounted:]
    wait(device)
    start = time.perf_counter()
    for call in counted:
        call()
    if done:
        wait(device)
    return (time.perf_counter() - start) / len(counted) * 1e6


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Threads that share so little work are waited for longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
