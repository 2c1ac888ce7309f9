"""What all of torch's operators are told beside operands and mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from attnswitch.problem import Problem

__all__ = ["Operator", "told"]

Operator = Callable[..., Any]


def told(operator: Operator, problem: Problem, causal: bool) -> Operator:
    """``operator`` with dropout_p, is_causal and scale, as far as they say something.

    torch reads whatever is given in each call, which takes a tenth of a microsecond or more.
    """
    said: dict[str, Any] = {}
    if problem.dropout:
        said["dropout_p"] = problem.dropout
    if causal:
        said["is_causal"] = True
    # The default is that of the head dimension which the operator sees, and that is padded to a multiple of 8.
    if problem.scale is not None or problem.dim_qk % 8:
        said["scale"] = problem.softmax_scale
    return functools.partial(operator, **said) if said else operator
