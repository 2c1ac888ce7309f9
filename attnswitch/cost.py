"""What a problem costs by the conventions that attention benchmarks quote: floating-point operations and bytes."""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

__all__ = ["flops", "kv_bytes"]

#: Work of the backward over the forward: five matrix products, the scores among them again, over two.
_BACKWARD = 2.5


def flops(problem: Problem, *, backward: bool = False) -> float:
    """Operations of one call: 4 B Hq Lq Lk D, with D + Dv for 2 D where they differ, half of it if causal.

    A convention: lengths, windows and masks save work that it counts all the same, so that figures of such problems
    compare candidates and say nothing about the device. ``backward`` alone is 2.5 times the forward.
    """
    forward = 2.0 * problem.batch * problem.heads_q * problem.seq_q * problem.seq_k * (problem.dim_qk + problem.dim_v)
    if problem.causal and not problem.sees_all:
        forward /= 2
    return forward * _BACKWARD if backward else forward


def kv_bytes(problem: Problem) -> int:
    """Bytes of key and value, which a decoding step has to read once."""
    elements = problem.batch * problem.heads_kv * problem.seq_k * (problem.dim_qk + problem.dim_v)
    return elements * DTYPES[problem.dtype]
