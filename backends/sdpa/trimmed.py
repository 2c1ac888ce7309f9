"""Keys past the last query under a causal mask from the top left, on the CPU: none is seen, and none is read.

torch's kernels of the CPU go through them all the same, so that few queries beside many keys take O(Lq Lk).
"""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .reshaped import ReshapedKernel

__all__ = ["TrimmedKernel", "trimmed"]


def trimmed(problem: Problem, device: Device) -> Problem | None:
    """``problem`` without the keys that no query sees; None where there are none, or anything else hides keys."""
    p = problem
    if device.kind != "cpu" or not p.plainly_causal or p.bottom_right or not 0 < p.seq_q < p.seq_k:
        return None
    if p.mask is not None or p.key_lengths or p.grads or p.dropout:
        return None
    return p.replace(seq_k=p.seq_q)


class TrimmedKernel(ReshapedKernel):
    """The kernel of the problem that ``trimmed`` gives, with so many ``keys``, for calls with all of them."""

    def __init__(self, kernel: Kernel, keys: int) -> None:
        super().__init__(kernel)
        self.keys = keys

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """The keys and values that are seen, in the same memory."""
        return query, key[:, :, : self.keys], value[:, :, : self.keys]
