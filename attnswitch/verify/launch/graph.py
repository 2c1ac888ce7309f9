"""A call captured in a CUDA graph and replayed with other numbers in the same memory."""

from __future__ import annotations

import importlib
from typing import Any

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch.call import Placed, Returned, call

__all__ = ["captured"]


def captured(case: Case, placed: Placed, fresh: Placed, backend: str) -> Returned:
    """Capture the forward on ``placed``, copy the operands of ``fresh`` over it, replay, and return what is there."""
    torch: Any = importlib.import_module("torch")
    device = placed.query.device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # plans and workspaces are made outside the capture
        for _ in range(2):
            call(case, placed, backend)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        returned = call(case, placed, backend, synchronize=False)
    for role, storage in placed.storage.items():
        storage.flat.copy_(fresh.storage[role].flat)
    for result in returned.results.values():
        result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    return returned
