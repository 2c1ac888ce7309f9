"""Forms of a call that a backend has to say it takes: one that knows nothing of them would compute without them."""

from __future__ import annotations

from collections.abc import Iterator

from attnswitch.machine.backend import Backend
from attnswitch.problem import Problem

__all__ = ["refused"]


def refused(backend: Backend, problem: Problem) -> Iterator[str]:
    """Why ``backend`` does not take ``problem``, as far as its class says."""
    if problem.sinks and not backend.sinks:
        yield "sinks: its kernels know of none"
    if problem.alibi and not backend.alibi:
        yield "alibi_slopes: it adds nothing that depends on the distance"
    if problem.cache and backend.paged and problem.cache not in backend.caches:
        yield f"cache={problem.cache}: its kernels read pages of query's dtype"
    if problem.tree and backend.paged and not backend.trees:
        yield "tree_mask: its kernels read no mask beside pages"
    if problem.splits and not backend.splits:
        yield f"num_splits={problem.splits}: how it divides the keys of a sequence may depend on the batch"
