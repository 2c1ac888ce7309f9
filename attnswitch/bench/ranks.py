"""``Ranks``: what a problem takes whose sequence is dealt among ranks, by every split of them, before anything runs.

Times are those of the calls of each rank (``pace``), of bytes that go from rank to rank (``links``), and of bytes that
summing parts moves in device memory. A ring hides what is on its way behind what is computed; all-to-all hides nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnswitch.bench.links import Link
from attnswitch.bench.pace import Pace
from attnswitch.bench.rings import elapsed
from attnswitch.bench.splits import Split
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.machine.device import Device
from attnswitch.parallel.dealing import USUAL, Order
from attnswitch.problem import Problem
from attnswitch.wisdom.classes import TILE

__all__ = ["MOST", "Covered", "Phase", "Planned", "Ranks", "estimate"]

#: As many ranks as are worked out.
MOST = 256
#: Passes over what an exchange sends: it is packed, and put in order where it arrives; each reads and writes.
_PACKED = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """The forward or the backward of the slowest rank, in milliseconds; bytes that a rank sends.

    ``compute`` is what its calls and sums take, ``link`` what it sends and receives, ``exposed`` what of that is not
    hidden. ``step`` is bytes of a step of the ring, ``exchange`` those of all exchanges.
    """

    ms: float
    compute: float
    link: float
    exposed: float
    sent: int
    step: int
    exchange: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One split: ranks that trade heads, groups in the ring, and its phases; ``why_not`` where it cannot be.

    ``memory`` is bytes of a rank by what they are (``Split.memory``), in the forward and in the backward.
    """

    name: str
    heads_over: int
    ring: int
    why_not: str = ""
    forward: Phase | None = None
    backward: Phase | None = None
    memory: tuple[tuple[str, dict[str, int]], ...] = ()

    @property
    def ms(self) -> float:
        """Both phases."""
        return sum(phase.ms for phase in (self.forward, self.backward) if phase is not None)

    @property
    def peak(self) -> int:
        """Bytes of a rank, at most."""
        return max((sum(items.values()) for _, items in self.memory), default=0)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"ms": self.ms if self.forward else None, "memory": dict(self.memory), "peak": self.peak}


@dataclass(frozen=True, slots=True)
class Covered:
    """From how many rows a rank on a step of the ring computes for as long as its messages take.

    ``rows`` is None where it never does, ``ranks`` over how many the problem then has so many rows.
    """

    rows: int | None
    ranks: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """What ``problem`` takes over ``ranks`` devices joined by ``link``; the ring's rows are dealt in ``order``."""

    problem: Problem
    device: Device
    ranks: int
    link: Link
    order: Order
    splits: tuple[Planned, ...]
    #: Of the forward, and of the backward where there are gradients; None where there is no ring.
    covered: tuple[Covered, ...] | None
    #: What the times rest on: each source with its words and backends.
    paces: tuple[tuple[str, str, tuple[str, ...]], ...]

    @property
    def rows(self) -> int:
        """Rows of queries that a rank holds, the most that any has."""
        return Split(self.problem, self.ranks, 1, self.order).held[0]

    @property
    def best(self) -> Planned | None:
        """The split that takes the least time, of those that fit in memory if any does."""
        able = [split for split in self.splits if not split.why_not]
        fit = [split for split in able if self.fits(split)]
        return min(fit or able, key=lambda split: split.ms, default=None)

    def fits(self, split: Planned) -> bool:
        """Whether a rank has as much memory as ``split`` takes, as far as that is known."""
        return not self.device.memory or split.peak <= self.device.memory

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = asdict(replace(self, problem=str(self.problem), device=str(self.device), splits=()))  # type: ignore[arg-type]
        plain["splits"] = [split.to_json() for split in self.splits]
        phases = ("forward", "backward")
        plain["covered"] = self.covered and dict(zip(phases, map(asdict, self.covered), strict=False))
        plain["paces"] = [dict(zip(("source", "basis", "backends"), pace, strict=True)) for pace in self.paces]
        return plain | {"rows": self.rows, "best": self.best and self.best.name}


def estimate(
    problem: Problem,
    device: Device,
    ranks: int,
    link: Link,
    pace: Callable[[Problem], Pace],
    gbps: float,
    *,
    order: Order | None = None,
) -> Ranks:
    """Work ``problem`` out over ``ranks`` such devices, whose memory moves ``gbps``; ``pace`` gives the time of a call.

    Raises ``InvalidProblem`` for a number of ranks that makes no sense, ``Unsupported`` for what cannot be dealt.
    """
    _check(problem, ranks)
    found: dict[tuple[str, str], dict[str, None]] = {}

    @functools.cache
    def known(call: Problem) -> Pace:
        told = pace(call)
        found.setdefault((told.source, told.basis), {}).update(dict.fromkeys(told.backends))
        return told

    order = order or USUAL["ring"]
    clock = _Clock(link, known, gbps)
    splits = [Split(problem, ranks, over, order) for over in range(1, ranks + 1) if ranks % over == 0]
    planned = tuple(
        Planned(split.name, split.heads_over, split.ring, split.why_not) if split.why_not else clock.planned(split)
        for split in splits
    )
    ring = splits[0]
    covered = None if ring.ring == 1 or ring.why_not else tuple(clock.covered(ring, back) for back in _phases(problem))
    paces = tuple((source, basis, tuple(backends)) for (source, basis), backends in found.items())
    return Ranks(problem, device, ranks, link, order, planned, covered, paces)


def _phases(problem: Problem) -> tuple[bool, ...]:
    return (False, True) if problem.grads else (False,)


def _check(problem: Problem, ranks: int) -> None:
    if not 1 <= ranks <= MOST:
        raise InvalidProblem(f"{ranks} ranks: expected 1 to {MOST}")
    if min(problem.seq_q, problem.seq_k) < 2 * ranks or not problem.batch:
        raise InvalidProblem(f"{problem} over {ranks} ranks: expected at least two queries and two keys for each")
    for said, what in (
        (problem.page, "a paged cache is not dealt by rows"),
        (problem.varlen, "what a rank computes of packed sequences depends on where they begin, which no problem says"),
        (problem.dropout, "the dropout mask is a function of the whole"),
        ("m" in problem.grads, "over ranks attn_mask gets no gradient"),
    ):
        if said:
            raise Unsupported(f"{problem} over ranks: {what}")


@dataclass(frozen=True, slots=True)
class _Clock:
    """Milliseconds of what splits do."""

    link: Link
    pace: Callable[[Problem], Pace]
    gbps: float

    def planned(self, split: Split) -> Planned:
        phases = _phases(split.problem)
        forward, *backward = (self.phase(split, backward=back) for back in phases)
        memory = tuple(
            (name, split.memory(backward=back, kernels=self.extra(split, back)))
            for name, back in zip(("forward", "backward"), phases, strict=False)
        )
        return Planned(split.name, split.heads_over, split.ring, "", forward, backward[0] if backward else None, memory)

    def phase(self, split: Split, *, backward: bool) -> Phase:
        ring, rows = split.ring, split.held[1]
        keys, sums = (split.message(rows), split.sums(rows)) if ring > 1 else (0, 0)

        def sent(step: int) -> list[int]:
            """What is on its way while ``step`` is computed: keys, and sums of the step before."""
            going = [keys] if step + 1 < ring else []
            return [*going, sums] if backward and step else going

        computed = [
            [self.computed(split, rank, (rank - step) % ring, backward=backward) for step in range(ring)]
            for rank in range(ring)
        ]
        last = self.link.ms(sums) if backward else 0.0
        ms, compute = elapsed(computed, lambda step: self.link.ms(sum(sent(step)), len(sent(step))), last)
        steps = [sent(step) for step in range(ring)] + [[sums]] * (backward and ring > 1)
        traded = split.exchanged
        exchange = sum(map(self.link.ms, traded))
        packing = _PACKED * sum(traded) / self.gbps / 1e6
        link = exchange + sum(self.link.ms(sum(step), len(step)) for step in steps)
        ms, compute = ms + exchange + packing, compute + packing
        step = keys + sums if backward else keys
        return Phase(ms, compute, link, ms - compute, sum(map(sum, steps)) + sum(traded), step, sum(traded))

    def computed(self, split: Split, rank: int, owner: int, *, backward: bool) -> float:
        return sum(self.call(split, call, backward=backward) for call in split.calls(rank, owner))

    def call(self, split: Split, call: Problem, *, backward: bool) -> float:
        """A call, and adding what it returns to the sums."""
        pace = self.pace(call)
        moved = split.adding(call) if backward else split.merging(call)
        return (pace.backward if backward else pace.forward) + moved / self.gbps / 1e6

    def extra(self, split: Split, backward: bool) -> int:
        """Bytes that the calls of a rank hold beside operands and results, at most."""
        calls = (call for owner in range(split.ring) for call in split.calls(split.ring - 1, owner))
        return max((self.pace(call).extra[backward] for call in calls), default=0)

    def covered(self, split: Split, backward: bool) -> Covered:
        """From the rows of one rank down, by tiles: the fewest below which a step is not covered any more."""
        whole = max(split.problem.seq_k // TILE, 1)
        good, bad = whole, 0
        if not self._covers(split, whole * TILE, backward):
            return Covered(None, 0)
        while good > 1 and not bad:
            half = good // 2
            good, bad = (half, 0) if self._covers(split, half * TILE, backward) else (good, half)
        while good - bad > 1 and bad:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._covers(split, middle * TILE, backward) else (good, middle)
        return Covered(good * TILE, max(1, split.problem.seq_k // (good * TILE)))

    def _covers(self, split: Split, rows: int, backward: bool) -> bool:
        sent = [split.message(rows), split.sums(rows)] if backward else [split.message(rows)]
        return self.call(split, split.full(rows), backward=backward) >= self.link.ms(sum(sent), len(sent))
