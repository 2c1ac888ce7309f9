"""``Cost``: what a call of a row costs one way, beside torch's own call."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnswitch.bench.measure import current, wait
from attnswitch.bench.overhead import clock
from attnswitch.bench.overhead.clock import Effort
from attnswitch.bench.overhead.forms import FormFeed, form_ways, torch_call
from attnswitch.bench.overhead.operands import Feed, Source
from attnswitch.bench.overhead.rows import Row
from attnswitch.bench.overhead.ways import Way, ways

__all__ = ["Cost", "costs", "kernels"]

#: Calls that are looked at for the kernels they launch.
_LOOKED_AT = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one call: the median of all batches, the 20th and the 80th percentile.

    ``beside`` names the call that it is set against: torch's own of the same kernel, or of torch's own choice; of a
    ``first`` call the same one as it comes again. ``over`` and ``ratio`` are the medians of how much longer than that a
    batch took in its round, as a difference and as a factor: hosts change their speed from one round to the next.
    ``kernels`` counts what one call launches on a GPU, copies among it, for rows with masks.
    """

    section: str
    problem: str
    keys: str
    new: str
    step: bool
    call: str
    us: float
    us_low: float
    us_high: float
    batches: int
    beside: str | None = None
    over: float | None = None
    ratio: float | None = None
    kernels: float | None = None
    #: Why torch has no call of its own for it; of forms alone.
    unmatched: str | None = None


def costs(row: Row, device: str, backends: Sequence[str] = (), effort: Effort = clock.THOROUGH) -> Iterator[Cost]:
    """What each way to call costs for ``row``; of every backend that takes torch's tensors, or of ``backends``.

    Raises whatever a call raises.
    """
    unmatched: str | None = None
    with current(device), clock.one_thread():
        feed: Source
        if row.section == "forms":
            feed = FormFeed(row, device)
            made, unmatched = form_ways(feed, backends), torch_call(feed.first)[1] or None
        else:
            feed = Feed(row, device)
            made = ways(row, feed, backends)
        effort = clock.paced(effort, clock.one_call(made, feed, device), new_lengths=row.new == "length")
        if row.new == "length":
            most = (effort.warm + effort.rounds) * (effort.uncounted + effort.calls) * len(made)
            feed = Feed(row, device, most)
        times = clock.turns(made, feed, device, effort, done=row.step)
        launched = kernels(made, feed) if row.section == "masks" and device.startswith("cuda") else {}
    for name, taken in times.items():
        cut = statistics.quantiles(taken, n=5, method="inclusive")
        beside = made[name].beside
        against = None if beside is None else times[beside]
        yield Cost(
            section=row.section,
            problem=str(row.problem),
            keys=row.keys,
            new=row.new,
            step=row.step,
            call=name,
            us=statistics.median(taken),
            us_low=cut[0],
            us_high=cut[-1],
            batches=len(taken),
            beside=beside,
            over=None if against is None else statistics.median(map(operator.sub, taken, against)),
            ratio=None if against is None else statistics.median(map(operator.truediv, taken, against)),
            kernels=launched.get(name),
            unmatched=unmatched,
        )


def kernels(made: Mapping[str, Way], feed: Source) -> dict[str, float]:
    """How many kernels, copies and fills one call of each way launches on the current GPU, on average."""
    calls = {name: [way.of(operands) for operands in feed.take(_LOOKED_AT)] for name, way in made.items()}
    first = next(iter(made))
    _launched(calls[first], made[first])  # the first look of a process may miss what was launched
    return {name: _launched(calls[name], way) for name, way in made.items()}


def _launched(calls: list[Callable[[], Any]], way: Way) -> float:
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    wait("cuda")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with way.within(), profile(activities=activities, acc_events=True) as seen:  # else some versions warn, of one cycle
        for call in calls:
            call()
        wait("cuda")
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sum(not getattr(event, "is_user_annotation", False) for event in events) / len(calls)
