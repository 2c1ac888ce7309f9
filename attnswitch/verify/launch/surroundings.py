"""What surrounds a call in an application: an autocast region, a side stream, another current GPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["PLAIN", "Surroundings", "surrounded", "surroundings"]

#: Elements of what keeps a GPU busy, and how often it goes over them: some milliseconds.
_BUSY, _TIMES = 2**26, 8


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``autocast`` is the dtype of the region, ``side`` a side stream beside busy ones, ``current`` the current GPU."""

    autocast: str = ""
    side: bool = False
    current: int | None = None


PLAIN = Surroundings()


def surroundings(device: str) -> Surroundings:
    """What surrounds a call on ``device`` (cpu, cuda:0) in this process now."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return PLAIN
    kind, _, index = device.partition(":")
    cast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else ""
    if kind != "cuda":
        return Surroundings(cast) if cast else PLAIN
    side = torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
    current = torch.cuda.current_device()
    return Surroundings(cast, side, None if current == int(index or 0) else current)


@contextlib.contextmanager
def surrounded(by: Surroundings, device: str) -> Iterator[None]:
    """Within the context calls on ``device`` are surrounded so. Then everything on a side stream is done."""
    if by == PLAIN:
        yield
        return
    torch: Any = importlib.import_module("torch")
    with contextlib.ExitStack() as stack:
        if by.current is not None:
            stack.enter_context(torch.cuda.device(by.current))
        if by.side:
            stack.enter_context(_beside_load(torch, device))
        if by.autocast:
            stack.enter_context(torch.autocast(device.partition(":")[0], dtype=getattr(torch, by.autocast)))
        yield


@contextlib.contextmanager
def _beside_load(torch: Any, device: str) -> Iterator[None]:
    """Within the context a side stream is the current one, while the one before and another are busy."""
    busy = torch.randn(_BUSY, device=device)
    before = torch.cuda.current_stream(device)
    side, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for stream in (side, other):
        stream.wait_stream(before)
    for stream in (before, other):
        with torch.cuda.stream(stream):
            for _ in range(_TIMES):
                busy.sin()
    with torch.cuda.stream(side):
        yield
    before.wait_stream(side)
    torch.cuda.synchronize(device)
