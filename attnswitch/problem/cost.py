"""What a problem costs: operations, by the convention that attention benchmarks quote, and the fewest bytes.

``visible`` is the share of it that causal and windows leave. What the standard and the tiled algorithm move is in
``attnswitch.bench.traffic``.
"""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

#: Work of the backward over the forward: five matrix products, the scores among them again, over two.
BACKWARD = 2.5
#: Bytes of a statistic: lse, and in the backward the row sums of dO * O.
STATISTIC = 4
#: Columns of the widest heads of models whose values have memory of their own: Gemma's.
_WIDEST = 512


def flops(problem: Problem, *, backward: bool = False) -> float:
    """Operations of one call: 4 B Hq Lq Lk D, with D + Dv for 2 D where they differ, half of it if causal.

    A convention: lengths, windows and masks save work that it counts all the same, so that figures of such problems
    compare candidates and say nothing about the device. ``backward`` alone is 2.5 times the forward.
    """
    forward = 2.0 * rows(problem) * problem.seq_k * (problem.dim_qk + problem.dim_v)
    if problem.causal and not problem.sees_all:
        forward /= 2
    return forward * BACKWARD if backward else forward


def is_latent(problem: Problem) -> bool:
    """Whether values are taken for the first columns of the keys, in the same memory: DeepSeek's latent attention.

    Nothing in a problem says so. One key head, of more columns than any other model has, and more than of its value.
    """
    p = problem
    return p.heads_kv == 1 and p.dim_v < p.dim_qk and p.dim_qk > _WIDEST and not (p.grads or p.cache)


def kv_bytes(problem: Problem) -> int:
    """Bytes of key and value."""
    elements = problem.batch * problem.heads_kv * problem.seq_k * (problem.dim_qk + problem.dim_v)
    return elements * problem.element("key")


def kv_read(problem: Problem) -> int:
    """Bytes of key and value that a decoding step has to read once; of latent heads the values are within the keys."""
    both = kv_bytes(problem)
    return both * problem.dim_qk // (problem.dim_qk + problem.dim_v) if is_latent(problem) else both


def query_bytes(problem: Problem) -> int:
    """Bytes of query and output."""
    return rows(problem) * (problem.dim_qk + problem.dim_v) * DTYPES[problem.dtype]


def mask_bytes(problem: Problem) -> int:
    """Bytes of ``attn_mask``, if there is one."""
    if problem.mask_shape is None:
        return 0
    b, h, q, k = problem.mask_shape
    return b * h * q * k * problem.element("attn_mask")


def hiding_elements(problem: Problem) -> int:
    """Elements of one mask of all that hides: lengths and positions among them; broadcast axes count once."""
    p = problem
    axes = "" if p.mask is None else p.mask.axes
    batch = p.batch if "b" in axes or p.key_lengths else 1
    heads = p.heads_q if "h" in axes else 1
    queries = p.seq_q if "q" in axes or p.hides_by_position else 1
    return batch * heads * queries * p.seq_k


def least_bytes(problem: Problem, *, backward: bool = False) -> int:
    """Bytes that any algorithm moves: each operand read once, each result written once.

    The backward reads query, key, value, output and its gradient, and writes three gradients.
    """
    return (2 if backward else 1) * (query_bytes(problem) + kv_read(problem)) + mask_bytes(problem)


def extra_tiled(problem: Problem) -> int:
    """Bytes beside operands and results that the tiled algorithm holds: the lse, and the row sums of its backward."""
    return rows(problem) * STATISTIC * (2 if problem.grads else 1)


def rows(problem: Problem) -> int:
    """Rows of scores: B Hq Lq."""
    return problem.batch * problem.heads_q * problem.seq_q


def visible(problem: Problem) -> float:
    """The share of all pairs of query and key that causal and window leave; lengths and masks hide more."""
    p = problem
    if not p.positional or not p.seq_q or not p.seq_k:
        return 1.0
    left, right = p.reach
    pairs = p.seq_q * p.seq_k
    seen = pairs if right is None else _nearer(p, right + 1)
    seen -= 0 if left is None else _nearer(p, -left)
    return seen / pairs


def _nearer(p: Problem, distance: int) -> int:
    """Pairs whose key is less than ``distance`` after the query's own: of each query, as many as lie from 0 to Lk."""
    first = distance + (p.seq_k - p.seq_q if p.bottom_right else 0)
    return _clipped(first + p.seq_q, p.seq_k) - _clipped(first, p.seq_k)


def _clipped(end: int, most: int) -> int:
    """The sum of the numbers below ``end``, each held to at least 0 and at most ``most``."""
    below = min(max(end, 0), most)
    return below * (below - 1) // 2 + most * max(0, end - most)
