"""``Estimate``: what a problem has to cost on a device, by ``cost`` and ``traffic``, before anything runs."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import islice
from typing import Any

from attnswitch.bench import traffic
from attnswitch.machine import one_by_one, registry
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.problem import Problem, cost

__all__ = ["Direction", "Estimate", "Peak", "Tile", "estimate", "published", "sheet"]

#: Rows of queries in a tile, where no backend says.
_QUERIES = 128


@dataclass(frozen=True, slots=True)
class Peak:
    """TFLOP/s and GB/s of a device at best, and where they are from."""

    tflops: float
    gbps: float
    source: str


@dataclass(frozen=True, slots=True)
class Direction:
    """The forward or the backward: operations, bytes to and from device memory, and milliseconds on the roofline.

    ``least`` moves every operand once, which a tiled kernel reaches where a cache holds what its tiles share;
    ``intensity`` is operations a byte. Milliseconds are None where the device's peak is not known.
    """

    flops: float
    least: int
    standard: int
    intensity: float
    intensity_standard: float
    ms: float | None
    ms_standard: float | None


@dataclass(frozen=True, slots=True)
class Tile:
    """What a kernel of a backend keeps on the chip (``machine.backend.Tile``)."""

    backend: str
    role: str
    queries: int
    keys: int
    stages: int
    shared: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What ``problem`` has to cost on ``device``; bytes unless a name says otherwise.

    ``tiled`` is what tiles of ``queries`` rows move in the forward without any cache, ``sram`` the leading term of the
    bound on every tiling with the ``shared`` bytes of the device.
    """

    problem: Problem
    device: Device
    peak: Peak | None
    visible: float
    forward: Direction
    backward: Direction | None
    queries: int
    tiled: int
    shared: int
    sram: float
    extra_standard: int
    extra_tiled: int
    tiles: tuple[Tile, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(replace(self, problem=str(self.problem), device=str(self.device)))  # type: ignore[arg-type]


def estimate(problem: Problem, device: Device, peak: Peak | None, *, configs: bool = False) -> Estimate:
    """Work ``problem`` out on ``device``; with the tiles of all ``configs``, or of each backend's first choice."""
    tiles = tuple(dict.fromkeys(_tiles(problem, device, None if configs else 1)))
    queries = next((tile.queries for tile in tiles if tile.role in ("", "forward")), _QUERIES)
    shared = device.on_chip
    return Estimate(
        problem,
        device,
        peak,
        cost.visible(problem),
        _direction(problem, peak, backward=False),
        _direction(problem, peak, backward=True) if problem.grads else None,
        queries,
        traffic.tiled_bytes(problem, queries),
        shared,
        traffic.sram_bytes(problem, shared),
        traffic.extra_standard(problem),
        cost.extra_tiled(problem),
        tiles,
    )


def published(device: Device, dtype: str) -> Peak | None:
    """What the data sheet of ``device`` says for operands of ``dtype``; None where the table has none."""
    key, row = sheet(device)
    return Peak(row.get(dtype, row["float32"]), row["gbps"], f"data sheet of the {key.upper()}") if row else None


def sheet(device: Device) -> tuple[str, dict[str, Any]]:
    """The name of ``device`` in the table of data sheets, and its row; "" and nothing where the table has none."""
    name = _plain(device.name)
    named = ((key, row) for key, row in _table().items() if name in (key, *map(_plain, row.get("names", ()))))
    return next(named, ("", {})) if device.kind == "cuda" else ("", {})


def _plain(name: str) -> str:
    """A device's name as the table has it: the whole of it, for ``A10G`` is no ``A10`` and a card no module."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("attnswitch.bench").joinpath("peaks.toml").read_text(encoding="utf-8"))


def _direction(problem: Problem, peak: Peak | None, *, backward: bool) -> Direction:
    work = cost.flops(problem, backward=backward)
    least = cost.least_bytes(problem, backward=backward)
    standard = traffic.standard_bytes(problem, backward=backward)
    times = (None, None)
    if peak is not None:
        times = tuple(traffic.roofline(work, moved, peak.tflops, peak.gbps) for moved in (least, standard))  # type: ignore[assignment]
    return Direction(work, least, standard, work / max(least, 1), work / max(standard, 1), *times)


def _tiles(problem: Problem, device: Device, most: int | None) -> Iterator[Tile]:
    """The tiles of every backend that takes the problem and says what its tiles are, of at most so many configs."""
    for name in registry.names():
        backend = registry.load(name)
        if isinstance(backend, Missing) or any(one_by_one.reasons(backend, problem, device)):
            continue
        asked = one_by_one.asked(backend, problem)
        for config in islice(backend.configs(asked, device), most):
            yield from (Tile(name, *tile) for tile in backend.tiles(asked, device, config))
