"""Where the project's own kernels were measured to be the fastest choice, on compute capability 9.0."""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

__all__ = ["few_scores", "hidden_training"]

#: Scores up to which the device is done before the host has launched what comes next: 8 heads of 512 x 512.
_FEW = 2**21
#: The same of a training step with a mask, of which other backends launch more: 2 times 16 heads of 1,024 x 1,024.
_FEW_HIDDEN = 2**25


def few_scores(problem: Problem) -> bool:
    """Whether the host's part decides, in 16-bit types."""
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    return DTYPES[problem.dtype] == 2 and scores <= (_FEW_HIDDEN if problem.grads and problem.needs_mask else _FEW)


def hidden_training(problem: Problem) -> bool:
    """Whether it is a training step in a 16-bit type in which a bool mask, lengths or a window hide something.

    torch's operators are given a float mask for it, and compute what is hidden.
    """
    has_float_mask = problem.mask is not None and not problem.mask.is_bool
    return bool(problem.grads) and problem.needs_mask and DTYPES[problem.dtype] == 2 and not has_float_mask
