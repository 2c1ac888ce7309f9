"""Bytes to and from device memory, and beside the operands, of the standard and the tiled algorithm; and the roofline.

The standard algorithm writes the scores down; the tiled one (FlashAttention, arXiv:2205.14135 and 2307.08691) never
does.
"""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem
from attnswitch.problem.cost import STATISTIC, kv_read, least_bytes, mask_bytes, query_bytes, rows, visible

__all__ = ["extra_standard", "roofline", "sram_bytes", "standard_bytes", "tiled_bytes"]

#: Passes of the standard algorithm over arrays the size of the scores. Forward: S is written and read, P is written and
#: read. Backward: P is read for dV, dP written, both read and dS written, dS read for dQ and for dK.
_PASSES, _PASSES_BACKWARD = 4, 7


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
    keys = problem.group * kv_read(problem)  # every query head reads those of its key head
    read = max(1.0, tiles * visible(problem)) * keys
    return query_bytes(problem) + round(read) + mask_bytes(problem) + rows(problem) * STATISTIC


def sram_bytes(problem: Problem, shared: int) -> float:
    """The leading term of what any tiling moves with ``shared`` bytes on the chip: N^2 D^2 / M elements a head.

    Theorem 2 of arXiv:2205.14135, without its constant; for N 4096, D 128 and 100 to 228 KB that is 5 to 10 MB.
    """
    item = DTYPES[problem.dtype]
    pairs = float(rows(problem) * problem.seq_k)
    return pairs * problem.dim_qk * problem.dim_v / (shared / item) * item * visible(problem)


def extra_standard(problem: Problem) -> int:
    """Bytes beside operands and results that the standard algorithm holds: S and P; dP and dS for gradients."""
    return _score_bytes(problem) * (4 if problem.grads else 2)


def roofline(flops: float, moved: float, tflops: float, gbps: float) -> float:
    """Milliseconds that a device of ``tflops`` and ``gbps`` needs at least, where computing hides moving."""
    return max(flops / tflops / 1e9, moved / gbps / 1e6)


def _score_bytes(problem: Problem) -> int:
    return rows(problem) * problem.seq_k * DTYPES[problem.dtype]
