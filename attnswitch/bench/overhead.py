"""What a call costs the host: the time until it returns, on tensors so small that there is little else.

The kernels of torch are called through attnswitch, and by ``scaled_dot_product_attention`` held to the same one. The
calls take turns, a batch of each in a round, and the device is waited for between batches, so that no queue fills up.
A few calls before each batch are not counted: whatever ran before, a batch finds its own code in the caches.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnswitch
from attnswitch.bench import workload
from attnswitch.bench.suites import ad_hoc
from attnswitch.bench.workload import Workload
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.measure import current, wait
from attnswitch.planning.plan import Plan
from attnswitch.problem import Problem

__all__ = ["AUTO", "PLAN", "TORCH", "Cost", "costs", "problems", "to_json"]

#: torch left to choose, the dispatcher left to choose, and a plan that was made before.
TORCH, AUTO, PLAN = "torch", "auto", "plan"
#: How torch calls the kernels that backends have of it.
_KERNELS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
#: Calls of a batch, and those before it: far fewer than a GPU queues.
CALLS, _UNCOUNTED = 50, 10
#: Batches before the clock starts.
_WARM = 3
_SIZES = ("b1.h1.s8.d64", "b2.h4.s32.d64")


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one call: the median of all batches, the 20th and the 80th percentile.

    ``beside`` names the call of the same kernel without attnswitch, where there is one, and ``over`` is the median of
    how much longer than that a batch took in its round: hosts change their speed from one round to the next.
    """

    problem: str
    call: str
    us: float
    us_low: float
    us_high: float
    beside: str | None = None
    over: float | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, the context that it is made in, and the call that it is set against."""

    run: Callable[[], Any]
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    beside: str | None = None


def problems(device: str) -> list[Problem]:
    """One head of 8 queries, and 8 heads of 32, each without gradients and with."""
    dtype = "fp32" if device == "cpu" else "bf16"
    return [Problem.parse(f"{size}.{dtype}{grads}") for size in _SIZES for grads in ("", ".grad")]


def costs(problem: Problem, device: str, backends: Sequence[str] = (), rounds: int = 100) -> Iterator[Cost]:
    """What each way to call costs for ``problem``; of every backend that takes torch's tensors, or of ``backends``.

    Raises ``InvalidProblem`` for a problem that torch's own call cannot say, and whatever a call raises.
    """
    with current(device), _one_thread():
        work = workload.make(ad_hoc(str(problem)), "backward" if problem.grads else "forward", device)
        made = _calls(work, backends)
        times = _timed({name: (call.run, call.within) for name, call in made.items()}, device, rounds)
    for name, found in times.items():
        cut = statistics.quantiles(found, n=5, method="inclusive")
        beside = made[name].beside
        over = None if beside is None else statistics.median(map(operator.sub, found, times[beside]))
        yield Cost(str(problem), name, statistics.median(found), cut[0], cut[-1], beside, over)


def _calls(work: Workload, backends: Sequence[str]) -> dict[str, _Call]:
    p = work.problem
    if p.needs_mask or p.softcap or p.lse or p.seeded:
        raise InvalidProblem(f"{p}: torch's own call is given no mask here, and has no softcap, lse or seed")
    operands, keywords = (work.query, work.key, work.value), work.keywords()
    plan = attnswitch.plan(*operands, **keywords)
    own = functools.partial(scaled_dot_product_attention, *operands, **_torchs(p))
    made = {TORCH: _Call(own)}
    attend = functools.partial(attnswitch.attention, *operands, **_given(keywords))
    for name in backends or _taking(plan):
        if name in _KERNELS:
            made[f"{TORCH}, {name}"] = _Call(own, functools.partial(sdpa_kernel, _KERNELS[name]))
        beside = f"{TORCH}, {name}" if name in _KERNELS else None
        made[name] = _Call(functools.partial(attend, backend=name), beside=beside)
    beside = found.beside if plan.backend is not None and (found := made.get(plan.backend)) is not None else None
    made[AUTO] = _Call(attend, beside=beside)
    made[PLAN] = _Call(functools.partial(plan, *operands), beside=beside)
    return made


def _torchs(p: Problem) -> dict[str, Any]:
    """The keywords of torch's own call that say something."""
    causal = p.causal and not p.sees_all  # torch's own is aligned to the top left
    given = {"is_causal": causal, "enable_gqa": p.group > 1, "dropout_p": p.dropout, "scale": p.scale}
    return {name: value for name, value in given.items() if value not in (False, None)}


def _given(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that say something, as a user writes them."""
    defaults = {"dropout_p": 0.0, "is_causal": False, "causal_alignment": "top_left", "softcap": 0.0}
    silent = {**defaults, "return_lse": False, "deterministic": False}
    return {name: value for name, value in keywords.items() if value is not None and value != silent.get(name)}


def _taking(plan: Plan) -> list[str]:
    """The backends that take the problem, as torch's tensors."""
    names = [candidate.backend for candidate in plan.candidates if candidate.fits]
    return [name for name in names if registry.loaded(name).native("torch") == "torch"]


def _timed(
    calls: Mapping[str, tuple[Callable[[], Any], Callable[[], contextlib.AbstractContextManager[Any]]]],
    device: str,
    rounds: int,
) -> dict[str, list[float]]:
    """Microseconds of a call, for each batch."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARM + rounds):
        for name, (call, within) in calls.items():
            with within():
                taken = _batch(call, device)
            if turn >= _WARM:
                times[name].append(taken)
    return times


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that share so little work are waited for longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batch(call: Callable[[], Any], device: str) -> float:
    for _ in repeat(None, _UNCOUNTED):
        call()
    wait(device)
    start = time.perf_counter()
    for _ in repeat(None, CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def to_json(
    found: Sequence[Cost],
    *,
    device: str,
    rounds: int,
    environment: Mapping[str, str],
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """The document: what it ran on, and every cost to a hundredth of a microsecond."""
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "device": device,
        "seconds": round(seconds, 3),
        "environment": dict(environment),
        "protocol": {"calls": CALLS, "uncounted": _UNCOUNTED, "rounds": rounds, "order": "round-robin", "threads": 1},
        "costs": [
            {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(cost).items()}
            for cost in found
        ],
    }
