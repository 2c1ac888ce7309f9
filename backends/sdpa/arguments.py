"""What all of torch's operators are told beside operands and mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from attnswitch.problem import Problem

__all__ = ["Operator", "told"]

Operator = Callable[..., Any]


def told(operator: Operator, problem: Problem, causal: bool) -> tuple[Operator, tuple[Any, ...]]:
    """``operator`` with the scale, and dropout_p and is_causal, which come last among what it is given by place.

    Those that say nothing are left out: torch reads each in every call, which takes a tenth of a microsecond or more.
    """
    last = (problem.dropout, True) if causal else (problem.dropout,) if problem.dropout else ()
    # The default is that of the head dimension which the operator sees, and that is padded to a multiple of 8.
    if problem.scale is not None or problem.dim_qk % 8:
        operator = functools.partial(operator, scale=problem.softmax_scale)
    return operator, last
