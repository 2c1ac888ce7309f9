"""One step of an application: the call, with its backward where there are gradients; and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnswitch.bench import deviation
from attnswitch.bench.candidates import Attend
from attnswitch.bench.workload import Workload

__all__ = ["first_line", "step", "wrong"]


def step(attend: Attend, work: Workload) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The call as an application makes it, with its backward where the problem has gradients."""
    if not work.problem.grads:
        return lambda: (attend(),)
    return lambda: torch.autograd.grad(attend(), work.leaves, work.grad_out)


def wrong(results: tuple[torch.Tensor, ...], reference: deviation.Reference) -> str:
    """What is wrong with ``results``, or nothing."""
    why = reference.wrong(results)
    return f"wrong: {why}" if why else ""


def first_line(error: Exception) -> str:
    """The type of an error, and the first line that says something."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
