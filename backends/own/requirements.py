"""What the project's own kernels ask of a problem alike, each as the reason against one that lacks it, or None."""

from __future__ import annotations

from attnswitch.problem import Problem

__all__ = ["aligned", "countable", "divisible", "sealed"]

#: Blocks of a CUDA grid, each of which takes at least one row.
_MOST_ROWS = 2**31 - 1
#: Parts of keys, each of which takes a row's numerators in memory: of a million keys, 256 in each.
_MOST_SPLITS = 4096


def aligned(problem: Problem, role: str) -> str | None:
    """The elements of operand ``role`` lie at multiples of their size."""
    memory = getattr(problem, role)
    if memory.align < 8 and memory.align < problem.element(role):
        return f"{role} is aligned to {memory.align} bytes only, less than one element; pass a copy"
    return None


def countable(problem: Problem) -> str | None:
    """The rows of all heads together are no more than a grid has blocks."""
    p = problem
    keys = 0 if p.page else p.batch * p.heads_kv * p.seq_k  # a table may be far longer than what it names
    for what, rows in (("queries", p.batch * p.heads_q * p.seq_q), ("keys", keys)):
        if rows > _MOST_ROWS:
            return f"{rows} {what} of all heads together: a grid has at most {_MOST_ROWS} blocks; split the batch"
    return None


def divisible(problem: Problem) -> str | None:
    """The parts that keys are asked to be divided into have room in memory."""
    if problem.splits > _MOST_SPLITS:
        return f"num_splits={problem.splits}: each part of the keys is kept in memory, of {_MOST_SPLITS} at most"
    return None


def sealed(problem: Problem) -> str | None:
    """No NaN or inf is hidden by position or mask, from where it would get into a tile's products."""
    if problem.nonfinite and (problem.positional or problem.mask is not None):
        return (
            "NaN or inf in the arrays, and positions are hidden: a tile's product with hidden values would let them"
            " leak; replace them, or hide whole keys with key_lengths"
        )
    return None
