"""``Pace``: what one call takes, forward and backward apart, for whoever adds the calls of many ranks up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnswitch.bench import traffic
from attnswitch.bench.estimate import Peak
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.planning import planner
from attnswitch.planning.forecast import of_itself
from attnswitch.problem import Problem, cost
from attnswitch.wisdom.classes import TILE

__all__ = ["LONGEST", "Pace", "Source", "chosen_for", "expected", "extra", "forward_of", "shortened", "step_of", "work"]

#: What a time rests on. "roofline" is the least that the device needs, and no kernel reaches it.
Source = Literal["measured", "forecast", "roofline"]
#: Queries and keys of the longest calls that the forecast was made of; beyond, it would tend to the mean of all calls.
LONGEST = 16_384
#: Waves of tiles that fill a device: more take as much longer as they are more, which the forecast would have tend to
#: the mean, too.
_WAVES = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """Milliseconds of the forward and of the backward of one call, 0 where it has none; and the backends of each."""

    forward: float
    backward: float
    backends: tuple[str, ...]
    source: Source
    #: What the source rests on, in words.
    basis: str
    #: Bytes that the forward and the backward hold beside operands and results.
    extra: tuple[int, int] = (0, 0)


def expected(problem: Problem, device: Device, peak: Peak) -> Pace:
    """What the forecast has for the backend of the choice, or the roofline of ``peak`` where it has nothing.

    Calls beyond ``LONGEST`` take as much longer than one of that length as their work is more.
    """
    forward, step, backends = forward_of(problem), step_of(problem), chosen_for(problem, device)
    held, short = extra(problem, device, backends), _filling(forward, device)
    told, more = of_itself(short, device), work(forward) / work(short)
    ahead, behind = [told.ms[name] * more for name in backends[:1] if name in told.ms], [0.0]
    if step.grads:  # the forecast is of a whole step
        both = of_itself(_filling(step, device), device).ms
        behind = [(both[name] - told.ms[name]) * more for name in backends[-1:] if name in both]
    least = _roofline(forward, peak, backward=False), _roofline(step, peak, backward=True) if step.grads else 0.0
    if not ahead or not behind:
        return Pace(*least, (), "roofline", peak.source, held)
    return Pace(max(*ahead, least[0]), max(*behind, least[1]), backends, "forecast", told.source, held)


def chosen_for(problem: Problem, device: Device) -> tuple[str, ...]:
    """The backends of forward and backward, once where they are the same; the latter starts from what it is given."""
    forward, step = shortened(forward_of(problem)), shortened(step_of(problem))
    chosen = [planner.choose(forward, device).backend]
    if step.grads:
        chosen.append(planner.choose(step, device, restarts=True).backend)
    return tuple(dict.fromkeys(name for name in chosen if name is not None))


def extra(problem: Problem, device: Device, backends: Sequence[str]) -> tuple[int, int]:
    """Bytes that the forward and the backward hold beside operands and results, the most of any of ``backends``."""
    loaded = [registry.loaded(name) for name in backends]
    forward, step = (
        max((one_by_one.extra_bytes(backend, asked, device) for backend in loaded), default=cost.extra_tiled(asked))
        for asked in (forward_of(problem), step_of(problem))
    )
    return forward, step if problem.grads else 0


def forward_of(problem: Problem) -> Problem:
    """The call by which a rank computes a part: with its lse, by which parts are merged."""
    return problem.replace(grads="", lse=True)


def step_of(problem: Problem) -> Problem:
    """The call whose gradients a rank computes; no problem with gradients where none are asked for."""
    return problem.replace(lse=False)


def shortened(problem: Problem) -> Problem:
    """``problem``, or both its lengths cut in as many parts that neither is beyond ``LONGEST``, each a batch entry.

    So a device is as full of it as of the whole. Lengths stay multiples of a tile where they were.
    """
    parts = -(-max(problem.seq_q, problem.seq_k) // LONGEST)
    if parts <= 1:
        return problem
    lengths = {name: _part(getattr(problem, name), parts) for name in ("seq_q", "seq_k")}
    return problem.replace(batch=problem.batch * parts, **lengths)


def _filling(problem: Problem, device: Device) -> Problem:
    """``shortened``, of whose batch entries only as many are left as fill ``device``."""
    short = shortened(problem)
    if short is problem:
        return problem
    tiles = max(1, short.heads_q * -(-short.seq_q // TILE))
    return short.replace(batch=min(short.batch, -(-_WAVES * (device.sms or 1) // tiles)))


def _part(length: int, parts: int) -> int:
    short = length // parts
    return max(1, short - short % TILE if length % TILE == 0 and short >= TILE else short)


def work(problem: Problem) -> float:
    """Operations of the forward, of the pairs that are visible alone."""
    return 2.0 * cost.rows(problem) * problem.seq_k * cost.visible(problem) * (problem.dim_qk + problem.dim_v)


def _roofline(problem: Problem, peak: Peak, *, backward: bool) -> float:
    moved = cost.least_bytes(problem, backward=backward)
    return traffic.roofline(work(problem) * (cost.BACKWARD if backward else 1.0), moved, peak.tflops, peak.gbps)
