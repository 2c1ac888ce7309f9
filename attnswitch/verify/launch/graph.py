"""A call captured in a CUDA graph and replayed with other numbers in the same memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attnswitch.arrays import Array
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch.call import Placed, Returned, call

__all__ = ["captured", "replayed"]


def captured(case: Case, placed: Placed, fresh: Placed, backend: str) -> Returned:
    """Capture the forward on ``placed``, copy the operands of ``fresh`` over it, replay, and return what is there."""
    runs: list[Returned] = []

    def run() -> Iterable[Array]:
        runs.append(call(case, placed, backend, synchronize=False))
        return runs[-1].results.values()

    memory = [storage.flat for storage in placed.storage.values()]
    numbers = [fresh.storage[role].flat for role in placed.storage]
    replayed(run, memory, numbers, str(placed.query.device))
    return runs[-1]


def replayed(
    run: Callable[[], Iterable[Array | None]],
    memory: Sequence[Array | None],
    fresh: Sequence[Array | None],
    device: str,
) -> list[Array | None]:
    """What the graph of ``run`` makes when it is replayed, with the numbers of ``fresh`` in the ``memory`` it reads."""
    torch: Any = importlib.import_module("torch")
    before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(before)
    with torch.cuda.stream(side):  # plans and workspaces are made outside the capture
        for _ in range(2):
            run()
    before.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = list(run())
    for place, numbers in zip(memory, fresh, strict=True):
        if place is not None:
            _once(place).copy_(_once(numbers))
    for result in made:
        if result is not None:
            result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    return made


def _once(array: Any) -> Any:
    """Each element of memory once: one along axes that are expanded."""
    for axis, step in enumerate(array.stride()):
        if step == 0:
            array = array.narrow(axis, 0, min(1, array.shape[axis]))
    return array
