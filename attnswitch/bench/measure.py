"""The one timing protocol: candidates in turn, a cold cache, the middle of many runs.

Candidates take turns, so that a clock that drifts or a neighbour on the machine hits all alike, in another order each
round, so that none always runs after what leaves its instructions in the caches. On a GPU
a pair of events stands around each run, a buffer of twice the L2 is zeroed before it, and the device is waited for at
the end only; zeroing also keeps the device busy while the host launches, so that the time is the device's and not the
host's, which is told apart. On the CPU it is the wall clock, with as many threads as torch is set to.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from attnswitch.errors import InvalidProblem

__all__ = ["Budget", "Clock", "Limits", "Timing", "current", "limits", "measure", "release", "wait"]

#: One run of something; what it returns is dropped.
Call = Callable[[], object]
#: Told of a candidate that raised.
Failed = Callable[[str, Exception], None]

#: Runs of a candidate whatever the budget says, and at most.
LEAST, MOST = 10, 400
#: Runs from which the length of one is estimated.
_TRIALS = 3
#: Head start that the host is given, in times of its slowest launch of a few, as others are slower yet: backwards that
#: torch's engine runs in a thread of its own by a factor; and in milliseconds at most: a longer call is one that waits
#: for the device itself.
_MARGIN, _HEAD_START = 1.5, 2.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one run: the median, the 20th and the 80th percentile of ``runs`` runs.

    ``host`` is what the host alone needs to launch it, the least seen; on the CPU that is the run itself.
    """

    median: float
    low: float
    high: float
    runs: int
    host: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Milliseconds for each candidate: to warm up, and to be measured in."""

    warmup: float = 25.0
    run: float = 100.0

    def __post_init__(self) -> None:
        """Raises ``InvalidProblem`` for what is no time."""
        for ms in (self.warmup, self.run):
            if not 0.0 <= ms < math.inf:
                raise InvalidProblem(f"a budget of {ms} ms: expected a finite number of milliseconds >= 0")

    def runs(self, one: float) -> int:
        """How many runs of ``one`` milliseconds are measured."""
        return max(LEAST, round(min(MOST, self.run / max(one, 1e-6))))

    def warm(self, one: float) -> int:
        """How many runs of ``one`` milliseconds warm it up."""
        return max(1, round(min(MOST, self.warmup / max(one, 1e-6))))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device reaches at best, in TFLOP/s of a matrix product and GB/s of a copy, read and written.

    ``size`` and ``dtype`` are those of the square matrices, ``copied`` the bytes of the buffer.
    """

    tflops: float
    gbps: float
    size: int
    dtype: str
    copied: int


class Clock(Protocol):
    """What ``measure`` needs of a device."""

    def run(self, call: Call) -> Callable[[], float]:
        """Run ``call`` once; the answer gives its milliseconds, once ``finish`` has returned."""

    def finish(self) -> None:
        """Wait until everything that was run is done."""

    def head_start(self, host: float) -> None:
        """See to it that the device does not wait for a host that needs ``host`` milliseconds for a launch."""


class _CpuClock:
    """The wall clock."""

    def run(self, call: Call) -> Callable[[], float]:
        start = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - start) * 1e3
        return lambda: elapsed

    def finish(self) -> None:
        """Nothing is left running."""

    def head_start(self, host: float) -> None:
        """The device is the host."""


class _CudaClock:
    """Events around each run, after a buffer of twice the L2 was zeroed."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 128 * 2**20
        self._cold = torch.empty(2 * cache, dtype=torch.int8, device=device)
        self._zeroings = 1

    def run(self, call: Call) -> Callable[[], float]:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._zeroings):
            self._cold.zero_()
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end))

    def finish(self) -> None:
        self._torch.cuda.synchronize()

    def head_start(self, host: float) -> None:
        """Zero the buffer again and again for as long as the host needs."""
        self.finish()
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        repeats = 8
        start.record()
        for _ in range(repeats):
            self._cold.zero_()
        end.record()
        self.finish()
        one = max(start.elapsed_time(end) / repeats, 1e-3)
        self._zeroings = 1 + int(min(host, _HEAD_START) / one)


def measure(
    candidates: Mapping[str, Call],
    device: str,
    *,
    budget: Budget | None = None,
    failed: Failed | None = None,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time ``candidates`` in turn.

    Args:
        candidates: calls by name. A call may keep what it needs, such as a graph whose gradients alone are timed.
        device: "cpu" or "cuda:0", as torch spells it.
        budget: milliseconds for each candidate.
        failed: told of a candidate that raises, which is then left out. Without it the exception is raised.
        clock: in place of the device's own.

    Returns:
        Timings by name, in the order of ``candidates``, of those that did not fail.
    """
    budget = budget or Budget()
    live = dict(candidates)
    with current(device):
        clock = clock or (_CpuClock() if device == "cpu" else _CudaClock(device))

        def attempt(name: str, action: Callable[[], Any]) -> Any:
            """The answer of ``action``; if it raises, candidate ``name`` is out and the answer None."""
            try:
                return action()
            except Exception as error:  # a candidate may fail in any way
                if failed is None:
                    raise
                live.pop(name, None)
                failed(name, error)
                return None

        trials: dict[str, tuple[float, float, float]] = {}
        for name, call in candidates.items():
            trial = attempt(name, lambda call=call: _trial(call, clock))  # type: ignore[misc]
            if trial is not None:
                trials[name] = trial
        if not live:
            return {}
        clock.head_start(_MARGIN * max(slowest for *_, slowest in trials.values()))
        for name in _turns({name: budget.warm(trials[name][0]) for name in live}):
            if name in live:
                attempt(name, live[name])
        answers: dict[str, list[Callable[[], float]]] = {name: [] for name in live}
        for name in _turns({name: budget.runs(trials[name][0]) for name in live}):
            if name in live:
                answer = attempt(name, lambda name=name: clock.run(live[name]))  # type: ignore[misc]
                answers[name] += [answer] if answer else []
        return _timings(live, answers, trials, clock, attempt)


def _timings(
    live: dict[str, Call],
    answers: dict[str, list[Callable[[], float]]],
    trials: dict[str, tuple[float, float, float]],
    clock: Clock,
    attempt: Callable[[str, Callable[[], Any]], Any],
) -> dict[str, Timing]:
    """Wait for the device once, and read every run. A device that is lost takes every candidate with it."""
    for name in tuple(live):
        attempt(name, clock.finish)
    found = {}
    for name in live:
        times = sorted(answer() for answer in answers[name])
        low, median, high = (_quantile(times, q) for q in (0.2, 0.5, 0.8))
        found[name] = Timing(median, low, high, len(times), trials[name][1])
    return found


def _trial(call: Call, clock: Clock) -> tuple[float, float, float]:
    """Milliseconds of one run, on the device and on the host, the least of a few, and the most of the host's.

    Whatever is built is built before.
    """
    call()
    clock.finish()
    device, host = [], []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        answer = clock.run(call)
        host.append((time.perf_counter() - start) * 1e3)
        clock.finish()
        device.append(answer())
    return min(device), min(host), max(host)


def _turns(counts: Mapping[str, int]) -> Iterator[str]:
    """Each name as often as its count, in rounds; names with fewer runs are spread over all the rounds.

    The order within a round is drawn, the same in every process.
    """
    rounds = max(counts.values(), default=0)
    order, drawn = list(counts), random.Random(0)
    for turn in range(rounds):
        drawn.shuffle(order)
        for name in order:
            if (turn + 1) * counts[name] // rounds > turn * counts[name] // rounds:
                yield name


def _quantile(times: list[float], q: float) -> float:
    """Quantile of sorted ``times``, linear between neighbours."""
    place = q * (len(times) - 1)
    below = int(place)
    above = min(below + 1, len(times) - 1)
    return times[below] + (times[above] - times[below]) * (place - below)


@contextlib.contextmanager
def current(device: str) -> Iterator[None]:
    """``device`` as the current GPU, on whose stream events are recorded."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield


def wait(device: str) -> None:
    """Until ``device``, if it is the current GPU, has done what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def release(device: str, *, graphs: bool = True) -> None:
    """Give memory back that nothing holds any more: ``graphs`` are cycles, and a cached block may not fit."""
    if graphs:
        gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def limits(device: str, budget: Budget | None = None) -> Limits:
    """The best of ``device`` now: a square matrix product of N(0,1) numbers, and a copy.

    On a GPU 8192 x 8192 bfloat16 and 1 GiB, on the CPU 1024 x 1024 float32 and 64 MiB. Numbers that are all alike would
    cost less power and look faster.
    """
    import torch

    on_cpu = device == "cpu"
    size, dtype, copied = (1024, torch.float32, 2**26) if on_cpu else (8192, torch.bfloat16, 2**30)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"product": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    with torch.no_grad():
        times = measure(calls, device, budget=budget)
    name = str(dtype).removeprefix("torch.")
    return Limits(
        2 * size**3 / times["product"].median / 1e9, 2 * copied / times["copy"].median / 1e6, size, name, copied
    )
