"""The launch of torch's operators that take whatever is hidden as an additive mask: cuDNN's, and the efficient one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.backend import Prepared
from attnswitch.problem import Problem

from .base import Launch
from .masks import Hiding
from .operands import bias, with_aligned_gradient

__all__ = ["launcher"]


def launcher(problem: Problem, operator: Callable[..., Any]) -> Launch:
    """``operator`` on ``problem``. Its lse is (B, Hq, Lq or more), or has a last axis of length 1.

    The lse is always asked for: the backward needs it even where only the mask has a gradient, and without it the
    efficient kernel of torch before 2.15 misreads keys whose head axis is expanded (pytorch#191937).
    """
    dropout, scale = problem.dropout, problem.softmax_scale
    scores, asked = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k), problem.lse

    def launch(hiding: Hiding) -> Prepared:
        mask, causal = hiding.mask, hiding.causal

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            added = None if mask is None else bias(mask, query, scores)
            found = operator(query, key, value, added, True, dropout, causal, scale=scale)
            lse = found[1].flatten(2)[..., : scores[2]] if asked else None
            return with_aligned_gradient(found[0]), lse

        return launched

    return launch
