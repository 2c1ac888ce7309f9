"""What a problem costs: floating-point operations, bytes to and from device memory, memory beside the operands, time.

Operations are counted by the convention that attention benchmarks quote. Bytes are those of two algorithms: the
standard one, which writes the scores down, and the tiled one (FlashAttention, arXiv:2205.14135 and 2307.08691), which
never does.
"""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem

__all__ = [
    "extra_standard",
    "extra_tiled",
    "flops",
    "kv_bytes",
    "least_bytes",
    "roofline",
    "sram_bytes",
    "standard_bytes",
    "tile_bytes",
    "tiled_bytes",
    "visible",
]

#: Work of the backward over the forward: five matrix products, the scores among them again, over two.
_BACKWARD = 2.5
#: Passes of the standard algorithm over arrays the size of the scores. Forward: S is written and read, P is written and
#: read. Backward: P is read for dV, dP written, both read and dS written, dS read for dQ and for dK.
_PASSES, _PASSES_BACKWARD = 4, 7
#: Bytes of a statistic: lse, and in the backward the row sums of dO * O.
_STATISTIC = 4


def flops(problem: Problem, *, backward: bool = False) -> float:
    """Operations of one call: 4 B Hq Lq Lk D, with D + Dv for 2 D where they differ, half of it if causal.

    A convention: lengths, windows and masks save work that it counts all the same, so that figures of such problems
    compare candidates and say nothing about the device. ``backward`` alone is 2.5 times the forward.
    """
    forward = 2.0 * problem.batch * problem.heads_q * problem.seq_q * problem.seq_k * (problem.dim_qk + problem.dim_v)
    if problem.causal and not problem.sees_all:
        forward /= 2
    return forward * _BACKWARD if backward else forward


def visible(problem: Problem) -> float:
    """The share of all pairs of query and key that causal and window leave; lengths and masks hide more."""
    p = problem
    if not p.positional or not p.seq_q or not p.seq_k:
        return 1.0
    left, right = p.reach
    pairs = p.seq_q * p.seq_k
    seen = pairs if right is None else _within(p, right + 1)
    seen -= 0 if left is None else _within(p, -left)
    return seen / pairs


def _within(p: Problem, distance: int) -> int:
    """Pairs whose key is less than ``distance`` after the query's own: of each query, as many as lie from 0 to Lk."""
    first = distance + (p.seq_k - p.seq_q if p.bottom_right else 0)
    return _clipped(first + p.seq_q, p.seq_k) - _clipped(first, p.seq_k)


def _clipped(end: int, most: int) -> int:
    """The sum of the numbers below ``end``, each held to at least 0 and at most ``most``."""
    below = min(max(end, 0), most)
    return below * (below - 1) // 2 + most * max(0, end - most)


def kv_bytes(problem: Problem) -> int:
    """Bytes of key and value, which a decoding step has to read once."""
    elements = problem.batch * problem.heads_kv * problem.seq_k * (problem.dim_qk + problem.dim_v)
    return elements * DTYPES[problem.dtype]


def least_bytes(problem: Problem, *, backward: bool = False) -> int:
    """Bytes that any algorithm moves: each operand read once, each result written once.

    The backward reads query, key, value, output and its gradient, and writes three gradients.
    """
    queries, keys, mask = _query_bytes(problem), kv_bytes(problem), _mask_bytes(problem)
    return (2 if backward else 1) * (queries + keys) + mask


def standard_bytes(problem: Problem, *, backward: bool = False) -> int:
    """Bytes that the standard algorithm moves: ``least_bytes``, and each array of scores as often as it is touched."""
    passes = _PASSES_BACKWARD if backward else _PASSES
    return least_bytes(problem, backward=backward) + passes * _score_bytes(problem)


def tiled_bytes(problem: Problem, queries: int) -> int:
    """Bytes that the tiled forward moves, were there no cache: key and value once for each tile of ``queries`` rows.

    An L2 that holds the keys and values of the heads that run side by side saves all but the first reading, down to
    ``least_bytes`` and the lse. Tiles that causal or a window hides are not read.
    """
    tiles = -(-problem.seq_q // queries)
    keys = problem.group * kv_bytes(problem)  # every query head reads those of its key head
    read = max(1.0, tiles * visible(problem)) * keys
    return _query_bytes(problem) + round(read) + _mask_bytes(problem) + _rows(problem) * _STATISTIC


def sram_bytes(problem: Problem, shared: int) -> float:
    """The leading term of what any tiling moves with ``shared`` bytes on the chip: N^2 D^2 / M elements a head.

    Theorem 2 of arXiv:2205.14135, without its constant; for N 4096, D 128 and 100 to 228 KB that is 5 to 10 MB.
    """
    item = DTYPES[problem.dtype]
    pairs = float(problem.batch * problem.heads_q * problem.seq_q * problem.seq_k)
    return pairs * problem.dim_qk * problem.dim_v / (shared / item) * item * visible(problem)


def extra_standard(problem: Problem) -> int:
    """Bytes beside operands and results that the standard algorithm holds: S and P; dP and dS for gradients."""
    return _score_bytes(problem) * (4 if problem.grads else 2)


def extra_tiled(problem: Problem) -> int:
    """Bytes beside operands and results that the tiled algorithm holds: the lse, and the row sums of its backward."""
    return _rows(problem) * _STATISTIC * (2 if problem.grads else 1)


def tile_bytes(problem: Problem, queries: int, keys: int, stages: int = 1) -> int:
    """Bytes on the chip of one tile: its queries, ``stages`` tiles of keys and values in flight, and its weights."""
    item = DTYPES[problem.dtype]
    width = problem.dim_qk + problem.dim_v
    return (queries * problem.dim_qk + stages * keys * width + queries * keys) * item


def roofline(flops: float, moved: float, tflops: float, gbps: float) -> float:
    """Milliseconds that a device of ``tflops`` and ``gbps`` needs at least, where computing hides moving."""
    return max(flops / tflops / 1e9, moved / gbps / 1e6)


def _rows(problem: Problem) -> int:
    return problem.batch * problem.heads_q * problem.seq_q


def _query_bytes(problem: Problem) -> int:
    """Query and output."""
    return _rows(problem) * (problem.dim_qk + problem.dim_v) * DTYPES[problem.dtype]


def _score_bytes(problem: Problem) -> int:
    return _rows(problem) * problem.seq_k * DTYPES[problem.dtype]


def _mask_bytes(problem: Problem) -> int:
    if problem.mask is None or problem.mask_shape is None:
        return 0
    b, h, q, k = problem.mask_shape
    return b * h * q * k * DTYPES.get(problem.mask.dtype, 1)
