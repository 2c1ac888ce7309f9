"""Functions of calls without a graph: torch.compile neither looks into them nor into what they call."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.call import attend, backward, forms, headwise, options, paged, varlen
from attnswitch.call.operators import run

__all__ = ["keep_out"]

_FUNCTIONS: tuple[Any, ...] = (
    *(options.of_call, options.of_keywords, options.of_problem, options.seed_of),
    *(attend.attend, backward.gradients, backward.results, headwise.results, varlen.results),
    *(headwise.attend_by, headwise.gradients, forms.run, forms.planned),
    run.forward,  # and with it all that is wrapped alike
    *(varlen.attend, varlen.gradients, varlen.run_plan, paged.attend, paged.run_plan),
)


def keep_out() -> None:
    """Keep torch.compile out of them, and of all that they call.

    After an error in a function torch.compile leaves it out of later graphs, and compiles what it calls one by one: in
    calls that are right it then breaks over locks, generators and NumPy's numbers.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if not hasattr(frames, "_FrameExecStrategy"):  # a torch that has no such way
        return
    skip = frames._FrameAction.SKIP
    for function in _FUNCTIONS:
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
