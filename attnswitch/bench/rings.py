"""The clock of a ring: when each rank has what it computes next, from what its pieces take and what is on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Steps", "elapsed"]

#: Milliseconds that a rank computes at each step.
Steps = Sequence[float]


def elapsed(computed: Sequence[Steps], transfers: Callable[[int], float], last: float = 0.0) -> tuple[float, float]:
    """Milliseconds until the slowest of n ranks is done, and how many of them it computes.

    At step s rank r computes ``computed[r][s]``, while what comes from rank r - 1 takes ``transfers(s)``: both begin
    once the two ranks have begun the step. ``last`` follows the last step.
    """
    ranks = len(computed)
    at = [0.0] * ranks
    for step in range(ranks):
        done = [begun + computed[rank][step] for rank, begun in enumerate(at)]
        if taken := transfers(step):
            done = [max(ready, max(at[rank], at[rank - 1]) + taken) for rank, ready in enumerate(done)]
        at = done
    slowest = max(range(ranks), key=lambda rank: at[rank])
    return at[slowest] + last, sum(computed[slowest])
