"""The launch of torch's operators that take whatever is hidden as an additive mask: cuDNN's, and the efficient one."""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Forward
from attnswitch.problem import Problem

from .arguments import Operator, told
from .base import Launch
from .masks import Hiding
from .operands import bias, with_aligned_gradient

__all__ = ["launcher"]


def launcher(problem: Problem, operator: Operator, *, always_lse: bool = False) -> Launch:
    """``operator`` on ``problem``. Its lse is (B, Hq, Lq or more), or has a last axis of length 1.

    It computes one where the problem asks for it, where there are gradients, since the backward needs it even for that
    of the mask alone, and where ``always_lse`` says so.
    """
    scores, asked = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k), problem.lse
    with_lse = asked or bool(problem.grads) or always_lse

    def launch(hiding: Hiding) -> Forward:
        mask = hiding.mask
        call = told(operator, problem, hiding.causal)
        if mask is None and not with_lse:
            return lambda query, key, value: (call(query, key, value, None, False)[0], None)

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            added = None if mask is None else bias(mask, query, scores)
            found = call(query, key, value, added, with_lse)
            lse = found[1].flatten(2)[..., : scores[2]] if asked else None
            return with_aligned_gradient(found[0]), lse

        return launched

    return launch
